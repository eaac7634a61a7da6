"""Floor division and remainder of floats, computed from fmod as torch computes them.

The exporter writes the floor of the quotient instead. In float32 0.3 / 0.1 is 3, while 0.3 // 0.1 is 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .complex_numbers import divided_by_number
from .integers import as_tensors, divided
from .values import known_or_tensor

_FLOATS = (torch.float16, torch.float32, torch.float64)


def _div(self: Any, other: Any, *, rounding_mode: str | None = None, out: Tensor | None = None) -> Any:
    if rounding_mode is None:
        return divided_by_number(self, other, out=out)
    if rounding_mode != "floor" or (result := _floor_divided(self, other, out=out)) is NotImplemented:
        return divided(self, other, rounding_mode=rounding_mode, out=out)
    return result


def _floor_divided(self: Any, other: Any, *, out: Tensor | None = None) -> Any:
    self, other = _known(self, other)
    if out is not None or not all(isinstance(each, Tensor | float | int) for each in (self, other)):
        return NotImplemented
    if not _are_of_floats(self, other):  # the exporter takes the number of `7 // x` for a tensor
        return NotImplemented if isinstance(self, Tensor) else torch.floor_divide(*as_tensors(self, other))
    dtype = torch.result_type(self, other)
    self, other = _wide(self, other)
    left, is_across = _left(self, other)
    quotient = (self - left) / other - is_across.to(left.dtype)
    whole = quotient.floor()
    whole = whole + (quotient - whole > 0.5).to(whole.dtype)
    return torch.where(other == 0, self / other, whole).to(dtype)


def _remainder(self: Any, other: Any, *, out: Tensor | None = None) -> Any:
    self, other = _known(self, other)
    if out is not None or not _are_of_floats(self, other):
        return NotImplemented
    dtype = torch.result_type(self, other)
    self, other = _wide(*as_tensors(self, other))
    left, is_across = _left(self, other)
    return torch.where(is_across, left + other, left).to(dtype)


def _known(*operands: Any) -> Sequence[Any]:
    """Returns the operands, computed numbers beside a tensor of floats as tensors."""
    has_floats = any(isinstance(each, Tensor) and each.dtype in _FLOATS for each in operands)
    return [*map(known_or_tensor, operands)] if has_floats else operands


def _wide(*operands: Any) -> Iterator[Tensor]:
    """Yields the operands as tensors, float16 ones in float32, in which torch divides them.

    torch does not round a Python number to float16 for a quotient. For a remainder it does.
    """
    dtype = torch.result_type(*operands)
    if dtype is not torch.float16:
        yield from as_tensors(*operands)
        return
    for each in operands:
        is_tensor = isinstance(each, Tensor)
        yield each.to(dtype).to(torch.float32) if is_tensor else torch.tensor(each, dtype=torch.float32)


def _left(self: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the remainder of a division rounded to zero, and where its sign is not the divisor's."""
    left = torch.fmod(self, other)
    return left, (left != 0) & ((other < 0) != (left < 0))


def _are_of_floats(*operands: Any) -> bool:
    known = all(isinstance(each, Tensor | float | int) for each in operands)
    return known and torch.result_type(*operands) in _FLOATS


def _floor_divided_by(self: Tensor, other: Any) -> Any:
    return _floor_divided(other, self)


def _remainder_by(self: Tensor, other: Any) -> Any:
    return _remainder(other, self)


BY_NAME: Mapping[str, Callable[..., Any]] = {
    "__floordiv__": _floor_divided,
    "__mod__": _remainder,
    "__rfloordiv__": _floor_divided_by,
    "__rmod__": _remainder_by,
    "div": _div,
    "divide": _div,
    "floor_divide": _floor_divided,
    "remainder": _remainder,
}
"""Functions of torch and tensors."""
