"""Fourier transforms that pad or cut what they are given, and the order of their waves."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .complex_numbers import pairs_of


def _turned(input: Tensor, dim: Any = None, *, of_odd: int) -> Tensor:  # noqa: A002 - as torch calls it
    """Moves the second half of each dimension to the front; of an odd size, `of_odd` more entries."""
    named = range(input.dim()) if dim is None else (dim,) if isinstance(dim, int) else dim
    for place in (d % input.dim() for d in named):
        before = (slice(None),) * place
        kept = (input.shape[place] + 1 - of_odd) // 2
        input = torch.cat([input[(*before, slice(kept, None))], input[(*before, slice(kept))]], place)  # noqa: A001
    return input


def _of_sizes(
    transform: Callable[..., Tensor],
    input: Tensor,  # noqa: A002 - as torch calls it
    s: Any = None,
    dim: Any = None,
    norm: str | None = None,
    *,
    out: Any = None,
) -> Any:
    """Cuts the input to the sizes that are asked for, or adds zeros, before it is transformed.

    Torch does so between the transforms of two dimensions, where numbers are complex.
    """
    if s is None or out is not None:
        return NotImplemented
    dims = dim if dim is not None else range(-len(s), 0) if transform in _OF_MANY.values() else (-2, -1)
    wanted = dict(zip(dims, s, strict=True))
    taken = dict(wanted)
    if transform in _TO_REAL:
        taken[dims[-1]] = s[-1] // 2 + 1
    sizes = [(input.shape[place], size) for place, size in taken.items()]
    if any(type(size) is not int for pair in sizes for size in pair) or all(a >= b for a, b in sizes):
        return NotImplemented
    for place, size in taken.items():
        input = _resized(input, place % input.dim(), size)  # noqa: A001
    last = {"s": tuple(s)} if transform in _TO_REAL else {}
    return transform(input, dim=tuple(dims), norm=norm, **last)


def _of_size(
    transform: Callable[..., Tensor],
    input: Tensor,  # noqa: A002 - as torch calls it
    n: int | None = None,
    dim: int = -1,
    norm: str | None = None,
    *,
    out: Any = None,
) -> Any:
    if n is None or out is not None:
        return NotImplemented
    if not input.is_complex():
        return NotImplemented
    return _of_sizes(_OF_MANY[transform], input, (n,), (dim,), norm)


def _resized(x: Tensor, dim: int, size: int) -> Tensor:
    if x.shape[dim] >= size:
        return x[(*(slice(None),) * dim, slice(size))]
    parts = pairs_of(x) if x.is_complex() else x
    added = parts.new_zeros(*parts.shape[:dim], size - x.shape[dim], *parts.shape[dim + 1 :])
    parts = torch.cat([parts, added], dim)
    return torch.view_as_complex(parts) if x.is_complex() else parts


_TO_REAL = {torch.fft.irfft2, torch.fft.irfftn}
_OF_MANY = {
    torch.fft.fft: torch.fft.fftn,
    torch.fft.ifft: torch.fft.ifftn,
    torch.fft.irfft: torch.fft.irfftn,
    torch.fft.rfft: torch.fft.rfftn,
}
_OF_TWO = (torch.fft.fft2, torch.fft.ifft2, torch.fft.irfft2, torch.fft.rfft2)

BY_FUNCTION: Mapping[Any, Callable[..., Any]] = {
    torch.fft.fftshift: functools.partial(_turned, of_odd=0),
    torch.fft.ifftshift: functools.partial(_turned, of_odd=1),
    **{one: functools.partial(_of_size, one) for one in _OF_MANY},
    **{several: functools.partial(_of_sizes, several) for several in (*_OF_MANY.values(), *_OF_TWO)},
}
"""Functions of torch.fft."""
