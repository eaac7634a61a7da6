"""The error for a stage that the exporter cannot translate: which call it is, and what to try."""

from __future__ import annotations

import traceback
from collections.abc import Iterator

import torch
from torch import fx

from pd2bw_fx.errors import ExportError
from pd2bw_fx.onnx_session import first_line
from pd2bw_fx.source_check import operators_called
from pd2bw_fx.stage import StageProgram
from pd2bw_fx.stage_errors import Place, place_in, place_of
from pd2bw_fx.untraced_operands import NAMESPACE as UNTRACED

# The exporter's translations begin at the first; beyond the last it writes files that the checker refuses.
OLDEST_OPSET, NEWEST_OPSET = 18, 25

_DynamicShape = torch._subclasses.fake_tensor.DynamicOutputShapeException  # of a kernel that nobody has
_OF_TORCH = ("aten", "prims")
_NO_OPSET = (
    "no opset has it: write it in other operators, or split the model without it for the export; a loss goes "
    "into a loss_fn, which that split is not given (docs/ONNX.md)"
)


def cannot_be_translated(program: StageProgram, opset: int, error: Exception) -> ExportError:
    """Returns the error for whatever the exporter has raised."""
    place = next(filter(None, map(_place, _chain(error))), None)
    at = "look for the operator in its source" if place is None else f"it is in {place.call}, {place.origin}"
    return ExportError(
        f"stage {program.stage} cannot be translated to ONNX opset {opset}: {first_line(error)}; {at}; "
        f"{_advice(program, error)}"
    )


def _advice(program: StageProgram, error: Exception) -> str:
    foreign = [called for called in operators_called(program.source) if called[0] not in _OF_TORCH]
    if foreign and foreign[0][0] == UNTRACED:
        return f"{foreign[0][1]} is not traced: split the model without it to export it"
    if foreign:
        return f"{'::'.join(foreign[0])} is none of torch's own, and ONNX knows those alone"
    is_unknown = any(isinstance(each, _DynamicShape | NotImplementedError) for each in _chain(error))
    if is_unknown or "No ONNX function found" in str(error):
        return _NO_OPSET
    if "SymbolicTensor" in first_line(error):  # of the exporter: a number, for which it has no attribute
        return (
            "the exporter knows no number there that depends on values: compute with tensors, without .item()"
        )
    return f"another opset ({OLDEST_OPSET} to {NEWEST_OPSET}) may know it"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _place(error: BaseException) -> Place | None:
    """Returns the call at which the stage was traced, or whose operator was translated."""
    nodes = (frame.f_locals.get("node") for frame, _ in traceback.walk_tb(error.__traceback__))
    traces = [node.meta.get("stack_trace") or "" for node in nodes if isinstance(node, fx.Node)]
    return place_in(traces[-1]) if traces else place_of(error)
