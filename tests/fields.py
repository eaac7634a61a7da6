"""A scalar field of points, for the tests of derivatives that a forward computes."""

from __future__ import annotations

from torch import Tensor, nn


class Field(nn.Module):
    """A scalar field of points (batch, 3); its subclasses differentiate it in their forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)
        )

    def at(self, point: Tensor) -> Tensor:
        """point: (3,) -> (), or (batch, 3) -> (batch,)"""
        value: Tensor = self.layers(point).squeeze(-1)
        return value

    def total(self, x: Tensor) -> Tensor:
        total: Tensor = self.layers(x).sum()
        return total
