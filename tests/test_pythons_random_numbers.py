"""What a forward draws from Python's or numpy's generators is refused where it changes the trace."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pd2bw_fx
from pd2bw_fx.errors import TraceError, VerificationError
from pd2bw_fx.passes.trace import trace
from pd2bw_fx.passes.trace.checks.extreme_random import extreme_numbers

DRAWN: dict[str, Callable[[], float]] = {
    "random": random.random,
    "uniform": lambda: random.uniform(0, 1),
    "numpy": lambda: float(np.random.rand()),
}


class _SeldomLeftOut(nn.Module):
    def __init__(self, draw: Callable[[], float], rate: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.draw, self.rate = draw, rate

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.draw() <= self.rate:
                continue
            x = layer(x)
        return (x + torch.arange(3)).sum()


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize("tracer", ["auto", "fx"])
def test_a_layer_that_is_seldom_left_out_is_found(name: str, tracer: str) -> None:
    lines = {
        "random": r"if self\.draw\(\) <= self\.rate:",
        "uniform": r'"uniform": lambda: random',
        "numpy": r'"numpy": lambda: float',
    }
    place = rf"\(test_pythons_random_numbers\.py:\d+: {lines[name]}"
    message = rf"draws Python or numpy random numbers in its forward {place}"
    with pytest.raises(TraceError, match=message):
        trace(_SeldomLeftOut(DRAWN[name], 1e-6), (torch.randn(4, 3),), tracer=tracer)


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize("tracer", ["auto", "fx"])
def test_a_rate_of_zero_is_no_chance(name: str, tracer: str) -> None:
    model, x = _SeldomLeftOut(DRAWN[name], 0.0), torch.randn(4, 3)
    traced = trace(model, (x,), tracer=tracer)
    assert traced.call is not None
    assert [value.item() for value in traced.call({"x": x}).values()] == [model(x).item()]


def test_extreme_numbers_are_extreme_and_leave_the_generators_alone() -> None:
    random.seed(0)
    np.random.seed(0)
    expected = [random.random(), np.random.rand(), random.gauss(0, 1), np.random.randn()]
    random.seed(0)
    np.random.seed(0)
    with extreme_numbers(largest=False):
        assert 0 < max(draw() for draw in DRAWN.values()) < 1e-7
        assert np.isfinite([random.gauss(0, 1), random.normalvariate(0, 1), np.random.randn()]).all()
    with extreme_numbers(largest=True):
        assert 1 - 1e-7 < min(draw() for draw in DRAWN.values()) < 1
        assert np.isfinite([random.gauss(0, 1), random.normalvariate(0, 1), np.random.randn()]).all()
    assert [random.random(), np.random.rand(), random.gauss(0, 1), np.random.randn()] == expected


class _LayerDrop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))


class _DrawnInTheCondition(_LayerDrop):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.training and torch.rand(()) < 0.1:
                continue
            x = layer(x)
        return x.sum()


class _DrawnBefore(_LayerDrop):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            number = torch.rand([])
            skip = self.training and number < 0.1
            if not skip:
                x = layer(x)
        return x.sum()


@pytest.mark.parametrize("kind", [_DrawnInTheCondition, _DrawnBefore])
def test_layers_left_out_at_random_have_advice_of_their_own(kind: type[_LayerDrop]) -> None:
    with pytest.raises(TraceError, match=r"leaving layers out .*, with inputs that are augmented at random"):
        trace(kind(), (torch.randn(4, 3),))


def test_python_random_numbers_that_change_the_program_are_refused() -> None:
    class LayerDrop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(8))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                if random.random() > 0.5:
                    x = layer(x)
            return x.sum()

    with pytest.raises(TraceError, match="random numbers"):
        trace(LayerDrop(), (torch.randn(3, 2),))


_GENERATOR, _RANDOM = np.random.default_rng(0), random.Random(0)


class _Masked(nn.Module):
    """The trace has its draw as a constant, which looks alike whatever was drawn."""

    def __init__(self, draw: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)
        self.draw = draw
        self.generator, self.random = np.random.default_rng(0), random.Random(0)
        self.settings = {"drawing": random.Random(0)}

    def forward(self, x: Tensor) -> Tensor:
        drawn = torch.as_tensor(self.draw(self), dtype=torch.float32)
        return self.last(torch.relu(self.first(x)) * (1 + 1e-5 * drawn)).square().mean()


@pytest.mark.parametrize("tracer", ["export", "fx"])
@pytest.mark.parametrize(
    "draw",
    [
        lambda model: np.random.rand(8) > 0.5,
        lambda model: [random.uniform(0, 1) for _ in range(8)],
        lambda model: np.random.permutation(8),
        lambda model: model.generator.random(8),
        lambda model: model.random.random(),
        lambda model: _GENERATOR.random(8),
        lambda model: _RANDOM.random(),
        lambda model: model.settings["drawing"].random(),
    ],
)
def test_constants_that_are_drawn_anew_are_refused(draw: Callable[[nn.Module], Any], tracer: str) -> None:
    with pytest.raises(TraceError, match="draws Python or numpy random numbers"):
        pd2bw_fx.split(
            _Masked(draw), torch.randn(4, 8), cluster=2, costs="analytic", tracer=tracer, check=False
        )


def test_a_generator_that_nobody_knows_of_is_seen_by_comparing() -> None:
    waiting = iter(random.Random(0).random, None)

    def draw(_: nn.Module) -> float:
        return 1e5 * next(waiting)

    with pytest.raises(VerificationError, match="the model computes something else from call to call"):
        pd2bw_fx.split(_Masked(draw), torch.randn(4, 8), cluster=2, costs="analytic")
