"""Integers by integers: quotients and shifts of every type of them.

The exporter writes quotients by way of float32, exact up to 2**24, and shifts of a type that only some have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

_LARGEST_SHIFT = 62  # of which two to its power is an int64


def _is_whole(operand: Any) -> bool:
    if isinstance(operand, Tensor):
        dtype = operand.dtype
        return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)
    return isinstance(operand, int) and not isinstance(operand, bool)


def divided(self: Any, other: Any, *, rounding_mode: str | None = None, out: Tensor | None = None) -> Any:
    """Rounded up where `trunc` is above `floor`: a negative quotient with a remainder."""
    if rounding_mode is None or out is not None or not (_is_whole(self) and _is_whole(other)):
        return NotImplemented
    self, other = as_tensors(self, other)
    quotient = torch.floor_divide(self, other)
    if rounding_mode == "floor":
        return quotient
    is_up = (torch.remainder(self, other) != 0) & ((self < 0) != (other < 0))
    return quotient + is_up.to(quotient.dtype)


def as_tensors(*operands: Any) -> Iterator[Tensor]:
    """Of the type that torch computes their quotient in; one of them is a tensor already."""
    dtype = torch.result_type(*operands)
    for each in operands:
        yield each.to(dtype) if isinstance(each, Tensor) else torch.tensor(each, dtype=dtype)


def _shifted(self: Any, other: Any, function: Callable[[Tensor, Any], Tensor], out: Tensor | None) -> Any:
    if not (isinstance(self, Tensor) and _is_whole(self) and _is_whole(other)) or out is not None:
        return NotImplemented
    dtype = torch.result_type(self, other)
    if dtype is torch.int64:  # the exporter has them, and no wider type is there
        return NotImplemented
    if isinstance(other, Tensor):
        factor = torch.pow(2, other.to(torch.int64).clamp(0, _LARGEST_SHIFT))
    else:
        factor = 1 << min(other, _LARGEST_SHIFT)
    return function(self.to(torch.int64), factor).to(dtype)


def _right(self: Any, other: Any, *, out: Tensor | None = None) -> Any:
    """floor(x / 2**n), of negative numbers too."""
    return _shifted(self, other, torch.floor_divide, out)


def _left(self: Any, other: Any, *, out: Tensor | None = None) -> Any:
    """x * 2**n; the cast back leaves the lower bits."""
    return _shifted(self, other, torch.mul, out)


BY_NAME: Mapping[str, Callable[..., Any]] = {
    "__lshift__": _left,
    "__rshift__": _right,
    "bitwise_left_shift": _left,
    "bitwise_right_shift": _right,
}
"""Functions of torch and tensors."""
