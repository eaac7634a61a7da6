"""Operators that ONNX does not have, computed by those that it has."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .floored import BY_NAME as FLOORED
from .joined import BY_FUNCTION as JOINED
from .ordering import BY_NAME as ORDERING
from .stable import BY_FUNCTION as STABLE_FUNCTIONS
from .stable import BY_NAME as STABLE
from .stable import up_to_each
from .whole_numbers import BY_NAME as WHOLE_NUMBERS


def _cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: str | None = None) -> Any:
    return torch.linalg.vector_norm(x1.unsqueeze(-2) - x2.unsqueeze(-3), ord=p, dim=-1)


def _hypot(self: Tensor, other: Tensor) -> Tensor:
    return (self * self + other * other).sqrt()


def _lgamma(self: Tensor) -> Tensor:
    """Stirling's series seven steps further, in double precision; the reflection below a half."""
    x = self.double()
    is_small = x < 0.5
    z = torch.where(is_small, 1 - x, x)
    far = z + 7
    square = far.reciprocal().square()
    series = (1 / 12 - square * (1 / 360 - square * (1 / 1260 - square / 1680))) / far
    found = (far - 0.5) * far.log() - far + 0.5 * math.log(2 * math.pi) + series
    for step in range(7):
        found = found - (z + step).log()
    reflected = math.log(math.pi) - (math.pi * x).sin().abs().log() - found
    return torch.where(is_small, reflected, found).to(self.dtype)


# Above and below w = 5, with the highest power first.
_ERFINV_NEAR = (
    2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087, -0.00125372503,
    -0.00417768164, 0.246640727, 1.50140941,
)  # fmt: skip
_ERFINV_FAR = (
    -0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613,
    0.00943887047, 1.00167406, 2.83297682,
)  # fmt: skip


def _erfinv(self: Tensor) -> Any:
    """M. Giles, "Approximating the erfinv function" (2010), table 5: single precision."""
    if self.dtype is torch.float64:
        return NotImplemented
    x = self.float()
    w = -((1 - x) * (1 + x)).log()
    is_near = w < 5
    z = torch.where(is_near, w - 2.5, w.sqrt() - 3)
    found = torch.zeros_like(x)
    for near, far in zip(_ERFINV_NEAR, _ERFINV_FAR, strict=True):
        found = found * z + torch.where(is_near, near, far)
    return torch.where(x.abs() == 1, x * math.inf, found * x).to(self.dtype)


def _isin(
    elements: Tensor, test_elements: Tensor, *, assume_unique: bool = False, invert: bool = False
) -> Tensor:
    found = (elements.unsqueeze(-1) == test_elements.flatten()).any(-1)
    return ~found if invert else found


def _searchsorted(
    sorted_sequence: Tensor,
    self: Tensor,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
) -> Tensor:
    """How many of the sequence are smaller: its rows' own values, or any, where it has one row."""
    if sorter is not None:
        sorted_sequence = sorted_sequence.gather(-1, sorter)
    rows = sorted_sequence if sorted_sequence.dim() == 1 else sorted_sequence.unsqueeze(-2)
    values = self.unsqueeze(-1)
    before = rows <= values if right or side == "right" else rows < values
    return before.sum(-1, dtype=torch.int32 if out_int32 else torch.int64)


def _kthvalue(self: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    values, places = self.topk(k, dim=dim, largest=False)
    return _last(values, dim, keepdim), _last(places, dim, keepdim)


def _median(self: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor | tuple[Tensor, Tensor]:
    """The lower one of two in the middle."""
    if dim is None:
        return _median(self.flatten(), 0)[0]
    return _kthvalue(self, (self.shape[dim] + 1) // 2, dim, keepdim)


def _last(tensor: Tensor, dim: int, keepdim: bool) -> Tensor:
    last = tensor.select(dim, -1)
    return last.unsqueeze(dim) if keepdim else last


def _cumprod(self: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    return _scanned(self if dtype is None else self.to(dtype), dim, torch.mul, torch.prod, 1)


def _cummax(self: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    values = _scanned(self, dim, torch.maximum, torch.amax, _extreme(self.dtype, -1))
    return values, _where_they_are(self, values, dim)


def _cummin(self: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    values = _scanned(self, dim, torch.minimum, torch.amin, _extreme(self.dtype, 1))
    return values, _where_they_are(self, values, dim)


def _where_they_are(self: Tensor, values: Tensor, dim: int) -> Tensor:
    """The place of the last one so far that is the value."""
    shape = [1] * self.dim()
    shape[dim] = -1
    places = torch.arange(self.shape[dim], device=self.device).reshape(shape)
    return _scanned(torch.where(self == values, places, 0), dim, torch.maximum, torch.amax, 0)


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
    """What the function makes of all elements up to each: in log2(n) steps over the whole dimension, or where
    only a run tells n by the reduction of a row for each."""
    size, step = tensor.shape[dim], 1
    if type(size) is not int:  # a symbol
        return reduction(up_to_each(tensor, dim, neutral), -1).movedim(-1, dim)
    while step < size:
        filling = torch.full_like(tensor.narrow(dim, 0, step), neutral)
        tensor = function(tensor, torch.cat([filling, tensor.narrow(dim, 0, size - step)], dim))
        step *= 2
    return tensor


def _masked_select(self: Tensor, mask: Tensor) -> Any:
    values, chosen = torch.broadcast_tensors(self, mask)  # type: ignore[no-untyped-call]
    return values[chosen]


def _embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> tuple[Tensor, None, None, None]:
    """indices: (words), of which each bag has those from its offset to the next one's: the sum (mode 0), the
    mean (1) or the largest (2) of their rows."""
    ends = offsets[:-1] if include_last_offset else offsets
    bags = (ends <= torch.arange(indices.shape[0], device=ends.device).unsqueeze(1)).sum(1) - 1
    is_in = bags == torch.arange(ends.shape[0], device=ends.device).unsqueeze(1)  # (bags, words)
    if padding_idx is not None:
        is_in = is_in & (indices != padding_idx)
    rows = functional.embedding(indices, weight)
    if mode == 2:
        largest = rows.masked_fill(~is_in.unsqueeze(2), -math.inf).amax(1)
        return largest.where(is_in.any(1, keepdim=True), 0.0), None, None, None
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(1)
    total = is_in.to(rows.dtype) @ rows
    count = is_in.sum(1, keepdim=True).clamp(min=1)
    return total if mode == 0 else total / count, None, None, None


def _bags_of_layer(
    input: Tensor,  # noqa: A002 - as torch calls it
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    """input: (bags, words), or (words) with offsets. What nn.EmbeddingBag calls; `max_norm` would write."""
    if max_norm is not None:
        return NotImplemented
    if offsets is None:
        offsets = torch.arange(input.shape[0], device=input.device) * input.shape[1]
    return _embedding_bag(
        weight,
        input.flatten(),
        offsets,
        mode=("sum", "mean", "max").index(mode),
        per_sample_weights=None if per_sample_weights is None else per_sample_weights.flatten(),
        include_last_offset=include_last_offset,
        padding_idx=padding_idx,
    )[0]


def _multilabel_margin(
    input: Tensor,  # noqa: A002 - as torch calls it
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    """input: (batch, classes); target: its classes, up to the first -1."""
    if size_average is not None or reduce is not None or input.dim() != 2:
        return NotImplemented
    is_given = (target < 0).to(torch.int64).cumsum(1) == 0
    given = torch.where(is_given, target, 0)
    classes = torch.arange(input.shape[1], device=input.device)
    is_of_row = ((given.unsqueeze(2) == classes) & is_given.unsqueeze(2)).any(1)
    beside = is_given.unsqueeze(2) & ~is_of_row.unsqueeze(1)  # (batch, targets, classes)
    margins = (1 - (input.gather(1, given).unsqueeze(2) - input.unsqueeze(1))).clamp(min=0)
    losses = torch.where(beside, margins, 0.0).sum((1, 2)) / input.shape[1]
    return losses.mean() if reduction == "mean" else losses.sum() if reduction == "sum" else losses


def _rrelu(
    input: Tensor,  # noqa: A002 - as torch calls it
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    inplace: bool = False,
) -> Any:
    return NotImplemented if training else functional.leaky_relu(input, (lower + upper) / 2)


def _squeeze(self: Tensor, dim: int | tuple[int, ...] | None = None) -> Tensor:
    """Of the dimensions that were named those of size 1: ONNX's Squeeze takes no others."""
    if self.dim() == 0:
        return self
    named = range(self.dim()) if dim is None else (dim,) if isinstance(dim, int) else dim
    ones = sorted(d % self.dim() for d in named if isinstance(self.shape[d], int) and self.shape[d] == 1)
    for place in reversed(ones):
        self = self.squeeze(place)
    return self


def _adaptive_max_pool(
    input: Tensor,  # noqa: A002 - as torch calls it
    output_size: Any,
    return_indices: bool = False,
    *,
    num_dims: int,
) -> Any:
    """The largest of each window, one dimension after the other, and its place among all: the first of
    several. Where sizes are open it is left as it is."""
    asked = output_size if isinstance(output_size, tuple | list) else (output_size,) * num_dims
    wanted = dict(zip(range(-num_dims, 0), asked * (num_dims // len(asked)), strict=True))
    shape = input.shape[-num_dims:]
    if any(type(size) is not int for size in shape):
        return NotImplemented
    values, places = input, torch.arange(math.prod(shape), device=input.device).reshape(shape)
    places = places.expand(input.shape)
    for dim, count in reversed(wanted.items()):
        size = values.shape[dim]
        if count is None or count == size:
            continue
        bounds = [(place * size // count, -(-(place + 1) * size // count)) for place in range(count)]
        found = [values.narrow(dim, start, end - start).max(dim, keepdim=True) for start, end in bounds]
        values = torch.cat([cell.values for cell in found], dim)
        starts = torch.tensor([start for start, _ in bounds], device=input.device)
        own = torch.cat([cell.indices for cell in found], dim)
        own = own + starts.reshape(-1, *(1,) * (-dim - 1))
        places = places.gather(dim, own)
    return (values, places) if return_indices else values


def _adaptive_max_pool_with_places(
    self: Tensor, output_size: Any, return_indices: bool = True, *, num_dims: int
) -> Any:
    return _adaptive_max_pool(self, output_size, True, num_dims=num_dims)


_BY_NAME: Mapping[str, Callable[..., Any]] = {
    **STABLE,
    **ORDERING,
    **WHOLE_NUMBERS,
    **FLOORED,
    "cdist": _cdist,
    "cummax": _cummax,
    "cummin": _cummin,
    "cumprod": _cumprod,
    "erfinv": _erfinv,
    "hypot": _hypot,
    "isin": _isin,
    "kthvalue": _kthvalue,
    "lgamma": _lgamma,
    "masked_select": _masked_select,
    "median": _median,
    "multilabel_margin_loss": _multilabel_margin,
    "rrelu": _rrelu,
    "searchsorted": _searchsorted,
    "squeeze": _squeeze,
}

_POOLS = {
    function: functools.partial(kernel, num_dims=num_dims)
    for num_dims in (1, 2, 3)
    for kernel, function in (
        (_adaptive_max_pool, getattr(functional, f"adaptive_max_pool{num_dims}d")),
        (_adaptive_max_pool_with_places, getattr(functional, f"adaptive_max_pool{num_dims}d_with_indices")),
    )
} | {torch.adaptive_max_pool1d: functools.partial(_adaptive_max_pool_with_places, num_dims=1)}

TRANSLATABLE: Mapping[Any, Callable[..., Any]] = {
    getattr(holder, name): function
    for name, function in _BY_NAME.items()
    for holder in (functional, torch, Tensor)
    if hasattr(holder, name)
} | {
    **STABLE_FUNCTIONS,
    **JOINED,
    torch.embedding_bag: _embedding_bag,
    functional.embedding_bag: _bags_of_layer,
    torch.special.erfinv: _erfinv,
    torch.special.gammaln: _lgamma,
    **_POOLS,
}
"""By the function, under each of its public names. One returns NotImplemented where it leaves it as it is."""
