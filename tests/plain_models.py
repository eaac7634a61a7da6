"""A model that is as plain as can be, for others to add what people add."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).square().mean()


def rows() -> tuple[Tensor]:
    return (torch.randn(4, 8, generator=torch.Generator().manual_seed(0)),)


class Normed(Plain):
    """Each forward turns the vectors that estimate the largest singular value."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.spectral_norm(self.first)
        self.second = nn.utils.parametrizations.weight_norm(self.second)
