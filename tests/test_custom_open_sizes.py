"""Sizes in custom autograd functions, open as they are in the model or fixed, and tensors that these keep."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pd2bw_fx
from tests.custom_functions import batch, model_of


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


class Constant(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * torch.tensor([1.0, 2.0], dtype=x.dtype).repeat(3)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class BySize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] > 3 else x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Sized(nn.Module):
    """`function` on a layer of a width that is fixed in the model."""

    def __init__(self, function: Any, width: int = 6) -> None:
        super().__init__()
        self.layer = nn.Linear(6, width)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.function.apply(self.layer(x))
        return result.sum()


def test_sizes_that_the_model_fixes_may_be_fixed_in_the_function_too() -> None:
    model = Sized(Constant).double()
    pipe = pd2bw_fx.split(model, batch(4)[:1], cluster=1, costs="analytic")

    assert pipe.trace_report.tracer == "export"
    assert pipe.verify(model).exact
    assert "torch.tensor([1.0, 2.0], dtype=torch.float64, device=x.device)" in pipe.stages[0].source


def test_a_function_that_depends_on_the_batch_size_is_traced_at_one() -> None:
    model = Sized(BySize).double()
    pipe = pd2bw_fx.split(model, batch(4)[:1], cluster=1, costs="analytic")

    assert pipe.trace_report.tracer == "export-static"
    assert "BySize computes depends on sizes" in pipe.trace_report.attempts[0].reason
    assert pipe.verify(model).exact


class ByNumpy(torch.autograd.Function):
    """Finds by numpy, which takes no open size, which entries of dimension 1 are mirrored."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        width = x.shape[1] - 0.5
        order = np.fmod(np.arange(x.shape[1]) + 2.0, width).astype("int64")
        return x[:, order]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 3


class ByNumpyInTheBatch(ByNumpy):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return ByNumpy.forward(ctx, x.t()).t()


@pytest.mark.parametrize(("kind", "tracer"), [(ByNumpy, "export"), (ByNumpyInTheBatch, "export-static")])
def test_what_takes_no_open_size_is_traced_at_those_that_are_fixed(kind: Any, tracer: str) -> None:
    model = Sized(kind).double()
    pipe = pd2bw_fx.split(model, batch(4)[:1], cluster=1, costs="analytic")

    assert pipe.trace_report.tracer == tracer
    assert pipe.verify(model).exact
    if tracer == "export-static":
        assert "ByNumpyInTheBatch can be traced at the example's sizes" in str(pipe.trace_report)


def test_a_table_of_many_numbers_is_an_operand_of_the_function(tmp_path: Path) -> None:
    model = Sized(ByNumpy, width=80).double()
    pipe = pd2bw_fx.split(model, batch(4)[:1], cluster=1, costs="analytic")

    assert pipe.trace_report.tracer == "export"
    assert "ByNumpy.apply(self.layer(x), self.constant_0)" in pipe.stages[0].source
    pipe.save(tmp_path)
    assert pd2bw_fx.load(tmp_path).verify(model, example={"x": batch(7)[0]}).exact
