"""Inputs for custom autograd functions, and models around them."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def batch(size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    return tuple(torch.randn(size, 6, dtype=torch.float64, generator=generator) for _ in range(2))  # type: ignore[return-value]


def model_of(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()
