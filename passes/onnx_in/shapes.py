"""Finds what two runs cannot tell of a shape: which sizes the file fixes, and which depend on values."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .load import reads

if TYPE_CHECKING:
    import onnx_ir as ir

Shape = tuple[int | str | None, ...]

# The size of their outputs depends on the values of their inputs.
_BY_VALUES = frozenset({
    "Compress", "ConcatFromSequence", "If", "Loop", "NonMaxSuppression", "NonZero", "OptionalGetElement",
    "Scan", "SequenceAt", "Unique",
})  # fmt: skip
# The same, for the operands from this position on.
_BY_OPERANDS: Mapping[str, int] = {
    "CenterCropPad": 1, "Col2Im": 1, "ConstantOfShape": 0, "Expand": 1, "MaxUnpool": 2, "OneHot": 1, "Pad": 1,
    "Range": 0, "Reshape": 1, "Resize": 1, "Slice": 1, "Split": 1, "Tile": 1, "TopK": 1, "Upsample": 1,
}  # fmt: skip


def shaped_by_values(model: ir.Model) -> set[str]:
    """Returns the values whose sizes may differ for inputs of equal sizes, and all computed from them."""
    carrying = {id(value) for value in model.graph.inputs}  # values that depend on the contents of inputs
    shaped: set[int] = set()
    names: set[str] = set()
    for node in model.graph:
        read = [id(value) for value in reads(node)]
        first = _BY_OPERANDS.get(node.op_type)
        telling = [] if first is None else [id(value) for value in node.inputs[first:] if value is not None]
        is_shaped = not shaped.isdisjoint(read) or not carrying.isdisjoint(telling)
        if is_shaped or (node.op_type in _BY_VALUES and not carrying.isdisjoint(read)):
            shaped |= {id(value) for value in node.outputs}
            names |= {value.name or "" for value in node.outputs}
        if node.op_type not in ("Shape", "Size") and not carrying.isdisjoint(read):
            carrying |= {id(value) for value in node.outputs}
    return names


def inferred_shapes(model: ir.Model, inputs: Mapping[str, Shape]) -> dict[str, Shape]:
    """Returns the shapes that the file or ONNX's inference knows, with None for an unknown size.

    `inputs` are the shapes of the inputs, which may be fixed where the file leaves them open.
    """
    import onnx_ir as ir
    from onnx_ir.passes import common

    copy = model.clone()
    for value in copy.graph.inputs:
        value.shape = ir.Shape(inputs[value.name or ""])
    with _quiet():
        common.ShapeInferencePass(check_type=False, strict_mode=False, data_prop=True)(copy)
    values = [*copy.graph.inputs, *(value for node in copy.graph for value in node.outputs)]
    return {
        value.name or "": tuple(size if isinstance(size, int) else size.value for size in value.shape)
        for value in values
        if value.shape is not None
    }


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences inference, and keeps the declared shapes where it fails."""
    logger = logging.getLogger("onnx_ir")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
