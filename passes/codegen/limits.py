"""Names for the limits of floating-point types: torch.finfo(scores.dtype).min for -3.4028234663852886e38.

Where an operator refuses a number that its operand's type cannot hold, the limit is written as that of the
operand, which under autocast may have another type than it was traced with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

# The limits of float16 are left out: 65504.0 is also what people write.
_LIMITS: Mapping[float, tuple[torch.dtype, str]] = {
    getattr(torch.finfo(dtype), name): (dtype, name)
    for dtype in (torch.float64, torch.bfloat16, torch.float32)
    for name in ("min", "max", "eps", "tiny")
    if (dtype, name) != (torch.bfloat16, "eps")  # 1 / 128
}
_FITTING = {
    "clamp", "clamp_max", "clamp_min", "fill", "full_like", "index_fill", "masked_fill", "nan_to_num",
    "new_full", "pad", "where",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Limit:
    """The smallest or largest number of an operand's type."""

    operand: fx.Node
    name: str


def limit_of_a_type(value: float) -> str | None:
    """Returns `torch.finfo(torch.float32).min` and the like for a limit of a type, else None."""
    dtype, name = _LIMITS.get(value, (None, ""))
    return None if dtype is None else f"torch.finfo({dtype}).{name}"


def with_limits(node: fx.Node, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the operands by name, with a `Limit` for each number that is a limit of an operand's type."""
    limits = {name: _limit(node, value) for name, value in values.items()}
    return {name: limits[name] or value for name, value in values.items()}


def is_asked_for_a_limit(operand: fx.Node, reader: fx.Node) -> bool:
    """Whether the reader is written with a limit of this operand's type."""
    limits = [_limit(reader, value) for value in (*reader.args, *reader.kwargs.values())]
    return any(limit is not None and limit.operand is operand for limit in limits)


def _limit(node: fx.Node, value: Any) -> Limit | None:
    dtype, name = _LIMITS.get(value, (None, "")) if type(value) is float else (None, "")
    target = node.target
    if name not in ("min", "max") or not isinstance(target, torch._ops.OpOverload):
        return None
    if target._opname not in _FITTING:
        return None
    typed = (operand for operand in node.all_input_nodes if _type(operand) == dtype)
    operand = next(typed, None)
    return None if operand is None else Limit(operand, name)


def _type(node: fx.Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None
