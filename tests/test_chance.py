"""Where Python's or numpy's random numbers decide in a forward it is found, however seldom they do."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pd2bw_fx.errors import TraceError
from pd2bw_fx.passes.trace import trace
from pd2bw_fx.passes.trace.chance import extreme_numbers

DRAWN: dict[str, Callable[[], float]] = {
    "random": random.random,
    "uniform": lambda: random.uniform(0, 1),
    "numpy": lambda: float(np.random.rand()),
}


class _LayerDrop(nn.Module):
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
    with pytest.raises(TraceError, match="draws Python or numpy random numbers"):
        trace(_LayerDrop(DRAWN[name], 1e-6), (torch.randn(4, 3),), tracer=tracer)


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize("tracer", ["auto", "fx"])
def test_a_rate_of_zero_is_no_chance(name: str, tracer: str) -> None:
    trace(_LayerDrop(DRAWN[name], 0.0), (torch.randn(4, 3),), tracer=tracer)


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
