"""Writes stages as ONNX files, checks them, merges them again, and runs them.

    export          one file per stage, or one annotated file, checked against the model
    manifest        what manifest.json says of the files
    graph           one stage as an ONNX model, with the names that we promise
    refusal         the error for a stage that cannot be translated
    spelling        calls that the exporter gets wrong, written otherwise while it records a stage
    operators/      operators that ONNX lacks, computed by those that it has
    assertions      what a stage asserts, as nodes that end a run
    translations    torch's translations to ONNX, read once in a process
    known_sizes     sizes that are sums of others when torch traces a stage again
    origin          metadata of each node: its module, its source line, its stage
    grouped         products of groups of rows, one by one
    annotate        the standard's multi-device annotation: the stage of each node
    parts           the files of a plan for a model that is an ONNX file itself
    merge           the stages as one model again
    original        the model that the files are checked against
    examples        the inputs that the files are checked on
    check           how far results are from what is expected, and how far they may be
    sensitivity     how far a rounding moves the values that stages make
    exactness       the coarsest type on the way to a value
    varying         why a stage computes something else in every run
    run             stages run one after another, as modules and as files
    chain           stages run in a process each
    arrays          tensors as arrays, which onnxruntime takes
    pairs           complex tensors that enter or leave a stage
    batched         which axis is the batch's
    text            a file in the ONNX text format

The libraries that write and run ONNX files are an optional extra. They are imported when first needed;
ExportError says what to install where one is missing.
"""

from .annotate import check_annotation
from .chain import run_onnx_processes
from .export import Form, export_onnx
from .merge import EXTERNAL_ABOVE_BYTES, merge_onnx
from .original import Original
from .parts import export_parts
from .run import KIND, run_onnx
from .text import onnx_text

__all__ = [
    "EXTERNAL_ABOVE_BYTES",
    "KIND",
    "Form",
    "Original",
    "check_annotation",
    "export_onnx",
    "export_parts",
    "merge_onnx",
    "onnx_text",
    "run_onnx",
    "run_onnx_processes",
]
