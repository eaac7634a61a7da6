"""Weights that are rounded once more, by which one sees what roundings do to results."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

NUM_ROUNDINGS = 3
TIMES_SENSITIVITY = 4.0  # a result may differ by so many times what one rounding of all weights does to it
_TYPES = (
    torch.float64, torch.complex128, torch.float32, torch.complex64, torch.float16, torch.bfloat16,
)  # fmt: skip


def rounded(tensors: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Returns the tensors with each entry moved up or down at random by the rounding of its type."""
    generator = torch.Generator().manual_seed(seed)
    return {name: _rounded(tensor, generator) for name, tensor in tensors.items()}


def _rounded(tensor: Tensor, generator: torch.Generator) -> Tensor:
    if tensor.dtype not in _TYPES:
        return tensor
    up = torch.randint(2, tensor.shape, generator=generator, device="cpu").to(tensor) * 2 - 1
    return tensor * (1 + torch.finfo(tensor.dtype).eps * up)
