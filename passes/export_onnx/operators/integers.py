"""Division and shifts of integers of every type.

The exporter divides in float32, which is exact up to 2**24, and shifts by an operator of few types.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

_LARGEST_SHIFT = 62  # 2**62 is the largest power of two in an int64


def _is_whole(operand: Any) -> bool:
    if isinstance(operand, Tensor):
        dtype = operand.dtype
        return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)
    return isinstance(operand, int) and not isinstance(operand, bool)


def divided(self: Any, other: Any, *, rounding_mode: str | None = None, out: Tensor | None = None) -> Any:
    """Divides integers, rounded as `rounding_mode` says.

    "trunc" is one more than "floor" where the quotient is negative and there is a remainder.
    """
    if rounding_mode is None or out is not None or not (_is_whole(self) and _is_whole(other)):
        return NotImplemented
    self, other = as_tensors(self, other)
    quotient = torch.floor_divide(self, other)
    if rounding_mode == "floor":
        return quotient
    is_up = (torch.remainder(self, other) != 0) & ((self < 0) != (other < 0))
    return quotient + is_up.to(quotient.dtype)


def as_tensors(*operands: Any) -> Iterator[Tensor]:
    """Yields the operands as tensors of the type in which torch divides them; one of them is a tensor."""
    dtype = torch.result_type(*operands)
    for each in operands:
        yield each.to(dtype) if isinstance(each, Tensor) else torch.tensor(each, dtype=dtype)


def _shifted(self: Any, other: Any, function: Callable[[Tensor, Any], Tensor], out: Tensor | None) -> Any:
    if not (isinstance(self, Tensor) and _is_whole(self) and _is_whole(other)) or out is not None:
        return NotImplemented
    dtype = torch.result_type(self, other)
    if dtype is torch.int64:  # the exporter translates these, and there is no wider type
        return NotImplemented
    if isinstance(other, Tensor):
        factor = torch.pow(2, other.to(torch.int64).clamp(0, _LARGEST_SHIFT))
    else:
        factor = 1 << min(other, _LARGEST_SHIFT)
    return function(self.to(torch.int64), factor).to(dtype)


def _right(self: Any, other: Any, *, out: Tensor | None = None) -> Any:
    """Computes floor(x / 2**n), also for negative x."""
    return _shifted(self, other, torch.floor_divide, out)


def _left(self: Any, other: Any, *, out: Tensor | None = None) -> Any:
    """Computes x * 2**n; the cast back keeps the lower bits."""
    return _shifted(self, other, torch.mul, out)


BY_NAME: Mapping[str, Callable[..., Any]] = {
    "__lshift__": _left,
    "__rshift__": _right,
    "bitwise_left_shift": _left,
    "bitwise_right_shift": _right,
}
"""Functions of torch and tensors."""
