"""Cumulative products, maxima and minima along a dimension of any size, known or open."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .stable import up_to_each


def _cumprod(self: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    if dtype is None and not (self.dtype.is_floating_point or self.dtype.is_complex):
        dtype = torch.int64
    return _scanned(self if dtype is None else self.to(dtype), dim, torch.mul, torch.prod, 1)


def _cummax(self: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    if self.dtype is torch.bool:
        values, places = _cummax(self.to(torch.int32), dim)
        return values.to(torch.bool), places
    values = _scanned(self, dim, torch.maximum, _largest, _extreme(self.dtype, -1))
    return values, _where_they_are(self, values, dim)


def _cummin(self: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    if self.dtype is torch.bool:
        values, places = _cummin(self.to(torch.int32), dim)
        return values.to(torch.bool), places
    values = _scanned(self, dim, torch.minimum, _smallest, _extreme(self.dtype, 1))
    return values, _where_they_are(self, values, dim)


def _largest(rows: Tensor, dim: int) -> Tensor:
    return _unless_none(rows.amax(dim), rows, dim)


def _smallest(rows: Tensor, dim: int) -> Tensor:
    return _unless_none(rows.amin(dim), rows, dim)


def _unless_none(found: Tensor, rows: Tensor, dim: int) -> Tensor:
    """Puts NaN back, which onnxruntime's ReduceMax and ReduceMin pass over."""
    return found.masked_fill(rows.isnan().any(dim), math.nan) if rows.dtype.is_floating_point else found


def _where_they_are(self: Tensor, values: Tensor, dim: int) -> Tensor:
    """Returns the index of the last entry so far that equals the value; NaN equals NaN here."""
    shape = [1] * self.dim()
    shape[dim] = -1
    places = torch.arange(self.shape[dim], device=self.device).reshape(shape)
    is_it = self == values
    if self.dtype.is_floating_point:
        is_it = is_it | (self.isnan() & values.isnan())
    return _scanned(torch.where(is_it, places, 0), dim, torch.maximum, torch.amax, 0)


def _extreme(dtype: torch.dtype, sign: int) -> float | int:
    if dtype.is_floating_point:
        return sign * math.inf
    return torch.iinfo(dtype).min if sign < 0 else torch.iinfo(dtype).max


def _scanned(
    tensor: Tensor,
    dim: int,
    function: Callable[[Tensor, Tensor], Tensor],
    reduction: Callable[[Tensor, int], Tensor],
    neutral: float,
) -> Tensor:
    """Scans a dimension with an associative function.

    A dimension of known size n takes log2(n) steps over all of it. An open one is reduced in a row for each
    entry (`up_to_each`).
    """
    size, step = tensor.shape[dim], 1
    if type(size) is not int:  # an open size
        return reduction(up_to_each(tensor, dim, neutral), -1).movedim(-1, dim)
    while step < size:
        filling = torch.full_like(tensor.narrow(dim, 0, step), neutral)
        tensor = function(tensor, torch.cat([filling, tensor.narrow(dim, 0, size - step)], dim))
        step *= 2
    return tensor


BY_NAME: Mapping[str, Callable[..., Any]] = {
    "cummax": _cummax,
    "cummin": _cummin,
    "cumprod": _cumprod,
}
"""Functions of torch and tensors."""
