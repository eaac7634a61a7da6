"""Sizes that are open in custom autograd functions as they are in the model, and tensors that these keep."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

import pd2bw_fx
from tests.test_custom_functions import batch, model_of


class Paired(torch.autograd.Function):
    """Lays out both operands by the batch of the first one, as the parallel scan of Mamba does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        rows = x.shape[0]
        return (x.view(rows, 2, -1) * y.view(rows, 2, -1)).view(rows, -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return gradient * y * 2, gradient * x


def test_sizes_that_are_equal_in_the_model_are_so_in_the_function() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = Paired.apply(self.first(x), self.second(x))
            return result.square().mean()

    model = model_of(Model)
    pipe = pd2bw_fx.split(model, batch(4)[:1], cluster=1, costs="analytic")
    assert pipe.verify(model, example={"x": batch(7)[0]}).exact


@functools.cache
def weights_of_rows() -> Tensor:
    return torch.linspace(0.0, 1.0, 6, dtype=torch.float64)


class Solved(torch.autograd.Function):
    """Solves by a triangle for the batch as columns, with a tensor that it keeps from its first call."""

    @staticmethod
    def forward(ctx: Any, triangle: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(triangle)
        return torch.linalg.solve_triangular(triangle, x * weights_of_rows()[:, None], upper=False)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        (triangle,) = ctx.saved_tensors
        solved = torch.linalg.solve_triangular(triangle.mT, gradient, upper=True)
        return None, solved * weights_of_rows()[:, None]


def test_a_batch_of_columns_is_open_and_what_a_function_keeps_is_a_constant() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)
            self.register_buffer("triangle", torch.eye(6) + torch.ones(6, 6).tril())

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = Solved.apply(self.triangle, self.layer(x).T)
            return result.square().mean()

    model = model_of(Model)
    model(batch(4)[0])
    pipe = pd2bw_fx.split(model, batch(4)[:1], cluster=1, costs="analytic")
    assert pipe.verify(model, example={"x": batch(7)[0]}).exact
