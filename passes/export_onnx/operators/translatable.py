"""The table of torch functions that are computed otherwise for the exporter, and those without a module."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .complex_functions import BY_FUNCTION as OTHER_COMPLEX_FUNCTIONS
from .complex_functions import BY_NAME as COMPLEX_FUNCTIONS
from .complex_numbers import BY_NAME as COMPLEX_NUMBERS
from .complex_numbers import subtracted_from_number
from .complex_parts import BY_FUNCTION as COMPLEX_PARTS
from .concat import BY_FUNCTION as JOINED
from .division import BY_NAME as FLOORED
from .fourier import BY_FUNCTION as FOURIER_TRANSFORMS
from .integers import BY_NAME as WHOLE_NUMBERS
from .matrices import BY_FUNCTION as FUNCTIONS_OF_MATRICES
from .matrices import BY_NAME as OF_MATRICES
from .memory import BY_NAME as OF_MEMORY
from .ordering import BY_NAME as ORDERING
from .ordering import scatter_reduce
from .pools import BY_FUNCTION as POOLS
from .scans import BY_NAME as SCANS
from .special import BY_FUNCTION as SPECIAL_FUNCTIONS
from .special import BY_NAME as SPECIAL
from .stable import BY_FUNCTION as STABLE_FUNCTIONS
from .stable import BY_NAME as STABLE
from .values import BY_NAME as COMPUTED_NUMBERS


def _cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: str | None = None) -> Any:
    return torch.linalg.vector_norm(x1.unsqueeze(-2) - x2.unsqueeze(-3), ord=p, dim=-1)


def _isin(
    elements: Tensor | float,
    test_elements: Tensor | float,
    *,
    assume_unique: bool = False,
    invert: bool = False,
) -> Any:
    """Either of the two may be a number."""
    if isinstance(elements, Tensor) and isinstance(test_elements, Tensor):
        found = (elements.unsqueeze(-1) == test_elements.flatten()).any(-1)
    elif isinstance(elements, Tensor):
        found = elements == test_elements
    elif isinstance(test_elements, Tensor):
        found = (test_elements == elements).any()
    else:
        return NotImplemented
    return ~found if invert else found


def _searchsorted(
    sorted_sequence: Tensor,
    self: Tensor | float,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
) -> Tensor:
    """Counts the entries of the sorted sequence that are smaller than each value.

    A sequence of several rows is given the values of the same row. A single one is given any, or a number.
    """
    if sorter is not None:
        sorted_sequence = sorted_sequence.gather(-1, sorter)
    rows = sorted_sequence if sorted_sequence.dim() == 1 else sorted_sequence.unsqueeze(-2)
    values = self.unsqueeze(-1) if isinstance(self, Tensor) else self
    before = rows <= values if right or side == "right" else rows < values
    return before.sum(-1, dtype=torch.int32 if out_int32 else torch.int64)


def _kthvalue(self: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    values, places = self.topk(k, dim=dim, largest=False)
    return _last(values, dim, keepdim), _last(places, dim, keepdim)


def _median(self: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor | tuple[Tensor, Tensor]:
    """Takes the lower of two middle values, and the first NaN where there is one."""
    if dim is None:
        return _median(self.flatten(), 0)[0]
    values, places = _kthvalue(self, (self.shape[dim] + 1) // 2, dim, keepdim)
    if not self.dtype.is_floating_point:
        return values, places
    is_none = self.isnan()
    has_none = is_none.any(dim, keepdim=keepdim)
    first = is_none.to(torch.int32).argmax(dim, keepdim=keepdim)
    return values.masked_fill(has_none, math.nan), torch.where(has_none, first, places)


def _last(tensor: Tensor, dim: int, keepdim: bool) -> Tensor:
    last = tensor.select(dim, -1)
    return last.unsqueeze(dim) if keepdim else last


def _subtracted_from(self: Tensor, other: Any, *, alpha: float = 1) -> Any:
    """The exporter does not know `1.5 - x` for integers x, nor `1 - x` for complex ones."""
    if self.dtype.is_complex:
        return subtracted_from_number(self, other, alpha=alpha)
    dtype = torch.result_type(self, other)
    if isinstance(other, Tensor) or alpha != 1 or dtype is self.dtype:
        return NotImplemented
    return torch.tensor(other, dtype=dtype) - self.to(dtype)


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
    """Computes the sum (mode 0), mean (1) or maximum (2) of the rows of each bag.

    indices: (words). A bag has the words from its offset to the next bag's.
    """
    ends = offsets[:-1] if include_last_offset else offsets
    bags = (ends <= torch.arange(indices.shape[0], device=ends.device).unsqueeze(1)).sum(1) - 1
    is_in = bags == torch.arange(ends.shape[0], device=ends.device).unsqueeze(1)  # (bags, words)
    if padding_idx is not None:  # may be negative
        is_in = is_in & (indices != padding_idx % weight.shape[0])
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
    """Computes what nn.EmbeddingBag calls, without `max_norm`, which writes to the weight.

    input: (bags, words), or (words) with offsets.
    """
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
    """input: (batch, classes). target: the right classes of each row, up to the first -1."""
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


def _extremes(self: Tensor, *, dim: int | None = None, keepdim: bool = False, out: Any = None) -> Any:
    if out is not None:
        return NotImplemented
    named = range(self.dim()) if dim is None else (dim,)
    return self.amin(tuple(named), keepdim), self.amax(tuple(named), keepdim)


def _chunked(self: Tensor, chunks: int, dim: int = 0) -> Any:
    """Of an open size, which the exporter takes for one that it knows."""
    size = self.shape[dim]
    if type(size) is int:
        return NotImplemented
    count, each = len(torch.chunk(self, chunks, dim)), (size + chunks - 1) // chunks
    before = (slice(None),) * (dim % self.dim())
    bounds: list[Any] = [None, *(each * place for place in range(1, count)), None]
    return tuple(self[(*before, slice(start, end))] for start, end in itertools.pairwise(bounds))


def _reduced_by_index(
    self: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Any:
    others = [1] * source.dim()
    others[dim] = -1
    places = index.reshape(others).expand(source.shape)
    reduced = scatter_reduce(self, dim, places, source, reduce, include_self=include_self)
    if reduced is not NotImplemented:
        return reduced
    return self.scatter_reduce(dim, places, source, reduce, include_self=include_self)


def _histogram(self: Tensor, bins: int = 100, min: float = 0, max: float = 0, *, out: Any = None) -> Any:  # noqa: A002
    """Between the least and the largest number where both bounds are 0; the last bin has its end too."""
    if out is not None or min != max:
        return NotImplemented
    x = self.flatten()
    least, most = x.amin(0), x.amax(0)
    width = torch.where(most > least, most - least, 1.0)
    least = torch.where(most > least, least, least - 0.5)
    place = ((x - least) / width * bins).to(torch.int64).clamp(0, bins - 1)
    return (place.unsqueeze(1) == torch.arange(bins, device=x.device)).sum(0).to(self.dtype)


def _squeeze(self: Tensor, dim: int | tuple[int, ...] | None = None) -> Tensor:
    """Squeezes those named dimensions that have size 1. ONNX's Squeeze takes no others."""
    if self.dim() == 0:
        return self
    named = range(self.dim()) if dim is None else (dim,) if isinstance(dim, int) else dim
    ones = sorted(d % self.dim() for d in named if isinstance(self.shape[d], int) and self.shape[d] == 1)
    for place in reversed(ones):
        self = self.squeeze(place)
    return self


_BY_NAME: Mapping[str, Callable[..., Any]] = {
    "__rsub__": _subtracted_from,
    **STABLE,
    **ORDERING,
    **OF_MEMORY,
    **WHOLE_NUMBERS,
    **FLOORED,
    **SCANS,
    **SPECIAL,
    **COMPUTED_NUMBERS,
    **OF_MATRICES,
    "aminmax": _extremes,
    "cdist": _cdist,
    "chunk": _chunked,
    "isin": _isin,
    "histc": _histogram,
    "index_reduce": _reduced_by_index,
    "kthvalue": _kthvalue,
    "masked_select": _masked_select,
    "median": _median,
    "multilabel_margin_loss": _multilabel_margin,
    "rrelu": _rrelu,
    "rsub": _subtracted_from,
    "searchsorted": _searchsorted,
    "squeeze": _squeeze,
}


def _by_function(by_name: Mapping[str, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """Returns the table by the functions of these names, of torch, tensors and torch.nn.functional."""
    return {
        getattr(holder, name): function
        for name, function in by_name.items()
        for holder in (functional, torch, Tensor)
        if hasattr(holder, name)
    }


def _first_that_knows(*functions: Callable[..., Any]) -> Callable[..., Any]:
    def asked(*args: Any, **named: Any) -> Any:
        results = (function(*args, **named) for function in functions)
        return next((result for result in results if result is not NotImplemented), NotImplemented)

    return functions[0] if len(functions) == 1 else asked


_TABLES: Sequence[Mapping[Any, Callable[..., Any]]] = (
    _by_function(COMPLEX_NUMBERS),
    _by_function(COMPLEX_FUNCTIONS),
    OTHER_COMPLEX_FUNCTIONS,
    COMPLEX_PARTS,
    _by_function(_BY_NAME),
    STABLE_FUNCTIONS,
    JOINED,
    FUNCTIONS_OF_MATRICES,
    {torch.embedding_bag: _embedding_bag, functional.embedding_bag: _bags_of_layer},
    SPECIAL_FUNCTIONS,
    POOLS,
    FOURIER_TRANSFORMS,
)

TRANSLATABLE: Mapping[Any, Callable[..., Any]] = {
    function: _first_that_knows(*(table[function] for table in _TABLES if function in table))
    for function in {function: None for table in _TABLES for function in table}
}
"""Maps each public name of a torch function to the function that takes its place."""
