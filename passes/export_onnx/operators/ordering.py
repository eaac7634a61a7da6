"""Functions that compare: bounds, extremes of a whole tensor, stable sorts, copysign."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def at_least(x: Tensor, bound: Any) -> Tensor:
    """Returns x, or the bound where x is smaller.

    ONNX's Clip takes the largest finite number for a bound that is left out, so that infinities are lost.
    """
    return torch.where(x < bound, bound, x)


def at_most(x: Tensor, bound: Any) -> Tensor:
    """Returns x, or the bound where x is larger."""
    return torch.where(x > bound, bound, x)


def _clamp(self: Tensor, min: Any = None, max: Any = None, *, out: Tensor | None = None) -> Any:  # noqa: A002
    is_one_number = (
        (min is None) != (max is None) and not isinstance(min, Tensor) and not isinstance(max, Tensor)
    )
    if not is_one_number or out is not None or not self.dtype.is_floating_point:
        return NotImplemented
    return at_most(self, max) if min is None else at_least(self, min)


def _clamp_min(self: Tensor, min: Any, *, out: Tensor | None = None) -> Any:  # noqa: A002
    return _clamp(self, min, out=out)


def _clamp_max(self: Tensor, max: Any, *, out: Tensor | None = None) -> Any:  # noqa: A002
    return _clamp(self, None, max, out=out)


def _amax(self: Tensor, dim: int | Sequence[int] = (), keepdim: bool = False, *, out: Any = None) -> Any:
    return _extreme(self, dim, keepdim, torch.amax, out)


def _amin(self: Tensor, dim: int | Sequence[int] = (), keepdim: bool = False, *, out: Any = None) -> Any:
    return _extreme(self, dim, keepdim, torch.amin, out)


def _extreme(self: Tensor, dim: int | Sequence[int], keepdim: bool, function: Any, out: Any) -> Any:
    """Reduces over all dimensions where none is given."""
    if out is not None or isinstance(dim, int) or len(dim) or self.dim() == 0:
        return NotImplemented
    return function(self, tuple(range(self.dim())), keepdim)


def _fmax(self: Tensor, other: Tensor, *, out: Tensor | None = None) -> Any:
    return NotImplemented if out is not None else _of_numbers(self, other, torch.maximum)


def _fmin(self: Tensor, other: Tensor, *, out: Tensor | None = None) -> Any:
    return NotImplemented if out is not None else _of_numbers(self, other, torch.minimum)


def _of_numbers(a: Tensor, b: Tensor, function: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Takes the number where one of the two is NaN."""
    return torch.where(a.isnan(), b, torch.where(b.isnan(), a, function(a, b)))


def _copysign(self: Tensor, other: Any, *, out: Tensor | None = None) -> Any:
    """Finds the sign of a zero from its reciprocal."""
    if out is not None or not isinstance(other, Tensor) or not other.dtype.is_floating_point:
        return NotImplemented
    is_negative = (other < 0) | ((other == 0) & (other.reciprocal() < 0))
    return torch.where(is_negative, -self.abs(), self.abs())


def _sort(
    self: Tensor, dim: int = -1, descending: bool = False, *, stable: bool | None = None, **more: Any
) -> Any:
    """ONNX's TopK keeps the order of equal values, so that a plain sort is stable."""
    return NotImplemented if more or stable is None else torch.sort(self, dim, descending)


def _argsort(
    self: Tensor, dim: int = -1, descending: bool = False, *, stable: bool | None = None, **more: Any
) -> Any:
    return NotImplemented if more or stable is None else torch.sort(self, dim, descending)[1]


def scatter_reduce(
    self: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Any:
    """Divides a sum by a count for "mean"; entries that get nothing stay as they are."""
    if reduce != "mean" or not self.dtype.is_floating_point:
        return NotImplemented
    given = src[tuple(slice(size) for size in index.shape)]
    count = torch.zeros_like(self).scatter_add(dim, index, torch.ones_like(given))
    total = torch.zeros_like(self).scatter_add(dim, index, given)
    if include_self:
        return (self + total) / (count + 1)
    return torch.where(count > 0, total / count, self)


BY_NAME: Mapping[str, Callable[..., Any]] = {
    "amax": _amax,
    "amin": _amin,
    "argsort": _argsort,
    "clamp": _clamp,
    "clamp_max": _clamp_max,
    "clamp_min": _clamp_min,
    "clip": _clamp,
    "copysign": _copysign,
    "fmax": _fmax,
    "fmin": _fmin,
    "scatter_reduce": scatter_reduce,
    "sort": _sort,
}
"""Functions of torch and tensors."""
