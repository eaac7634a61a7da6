"""Stages as ONNX files: written, checked, put together again, and run one after another.

What makes ONNX files and runs them is an optional extra; it is imported when first needed, and ExportError
says what to install where it is missing.
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
