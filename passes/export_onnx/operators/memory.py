"""Functions that read memory as it lies, where an exported file knows values by their order alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def _as_strided(
    self: Tensor, size: Sequence[Any], stride: Sequence[Any], storage_offset: int | None = None
) -> Any:
    """Puts the dimensions in the order in which they lie in memory first, which a file takes them to have."""
    if storage_offset is not None or self.is_contiguous():
        return NotImplemented
    strides = self.stride()
    laid_out = self.permute(sorted(range(self.dim()), key=lambda dim: -strides[dim]))
    if self.storage_offset() != 0 or not laid_out.is_contiguous():
        return NotImplemented
    return torch.as_strided(laid_out, size, stride)


BY_NAME: Mapping[str, Callable[..., Any]] = {"as_strided": _as_strided}
