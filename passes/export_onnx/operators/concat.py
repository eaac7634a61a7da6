"""Stacks tensors of several types. The exporter casts them to a common type for torch.cat alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def _of_one_type(
    function: Callable[..., Tensor], tensors: Sequence[Tensor], *args: Any, **kwargs: Any
) -> Any:
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) == 1:
        return NotImplemented
    dtype = functools.reduce(torch.promote_types, dtypes)
    return function([tensor.to(dtype) for tensor in tensors], *args, **kwargs)


_NAMES = ("column_stack", "concat", "concatenate", "dstack", "hstack", "row_stack", "stack", "vstack")

BY_FUNCTION: Mapping[Any, Callable[..., Any]] = {
    function: functools.partial(_of_one_type, function)
    for function in (getattr(torch, name) for name in _NAMES)
}
"""Functions of torch."""
