"""Sums, products and quotients of a complex tensor and a real number, and writes to parts, part by part.

The exporter has complex tensors as pairs of numbers in a last dimension, and looks for one in the number too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def _times(self: Any, other: Any, *, out: Tensor | None = None) -> Any:
    if not isinstance(self, Tensor):
        self, other = other, self
    if out is not None or not _are_complex_and_real(self, other):
        return NotImplemented
    return torch.view_as_complex(_parts(self) * other)


def divided_by_number(self: Any, other: Any, *, out: Tensor | None = None) -> Any:
    if out is not None or not _are_complex_and_real(self, other):
        return NotImplemented
    return torch.view_as_complex(_parts(self) / other)


def _plus(self: Any, other: Any, *, alpha: float = 1, out: Tensor | None = None) -> Any:
    if not isinstance(self, Tensor):
        self, other = other, self
    if out is not None or not _are_complex_and_real(self, other):
        return NotImplemented
    parts = _parts(self)
    return torch.view_as_complex(parts + torch.tensor([other * alpha, 0], dtype=parts.dtype))


def _minus(self: Any, other: Any, *, alpha: float = 1, out: Tensor | None = None) -> Any:
    return _plus(self, -other * alpha, out=out) if _are_complex_and_real(self, other) else NotImplemented


def subtracted_from_number(self: Any, other: Any, *, alpha: float = 1) -> Any:
    if not _are_complex_and_real(self, other) or not isinstance(alpha, int | float):
        return NotImplemented
    return _plus(_times(self, -alpha), other)


def _put_into_places(self: Tensor, places: Any, value: Any) -> Any:
    """Writes pairs of numbers: the exporter would look for the derivative of a complex write."""
    are_complex = all(isinstance(tensor, Tensor) and tensor.is_complex() for tensor in (self, value))
    if not are_complex or self.is_conj():
        return NotImplemented
    torch.view_as_real(self)[places] = _parts(value)
    return None


def _are_complex_and_real(tensor: Any, number: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.dtype.is_complex and isinstance(number, int | float)


def _parts(tensor: Tensor) -> Tensor:
    """Returns the real and the imaginary part in a last dimension."""
    if not tensor.is_conj():
        return torch.view_as_real(tensor)
    parts = torch.view_as_real(tensor.conj())
    return parts * torch.tensor([1, -1], dtype=parts.dtype)


BY_NAME: Mapping[str, Callable[..., Any]] = {
    "__add__": _plus,
    "__mul__": _times,
    "__radd__": _plus,
    "__rmul__": _times,
    "__setitem__": _put_into_places,
    "__sub__": _minus,
    "__truediv__": divided_by_number,
    "add": _plus,
    "mul": _times,
    "multiply": _times,
    "sub": _minus,
    "subtract": _minus,
    "true_divide": divided_by_number,
}
"""Functions of torch and tensors."""
