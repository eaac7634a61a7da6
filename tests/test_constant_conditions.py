"""Conditions on constant tensors, and numbers that are made of them, are what they were on the example."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pd2bw_fx
from pd2bw_fx.errors import TraceError


def inputs() -> tuple[Tensor]:
    return (torch.randn(4, 6, generator=torch.Generator().manual_seed(4)),)


def model_of(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


class Solving(nn.Module):
    """x: (batch, 6), followed through time by Euler's method; what it asks of the times never changes."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Sequential(nn.Linear(6, 6), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        times = torch.linspace(0, 1, 5)
        later = times[1:] > times[:-1]
        assert later.all() or (~later).all()
        found = torch.empty(len(times), *x.shape)
        found[0] = x
        for number, (now, then) in enumerate(itertools.pairwise(times)):
            if then > 0.9:
                x = 2 * x
            x = x + (then - now) * self.slope(x)
            found[number + 1] = x
        return found.square().mean()


def test_conditions_on_constants_need_no_leave(tmp_path: Path) -> None:
    model = model_of(Solving)

    pipe = pd2bw_fx.split(model, inputs(), cluster=2, num_stages=2, costs="analytic", check="full")

    assert pipe.trace_report is not None
    assert pipe.trace_report.notes == ()
    assert not any("assert" in program.source for program in pipe.programs)
    assert sum(program.source.count("x = 2 * x") for program in pipe.programs) == 1
    # What is handed on half written is the same in every run.
    assert any("torch.zeros(5, x.shape[0], 6" in program.source for program in pipe.programs)
    pipe.export_onnx(tmp_path / "onnx")


class Stepping(Solving):
    """Takes as many steps as it computes from the times, as the solvers of torchdiffeq do."""

    def __init__(self, number_of: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.number_of = number_of

    def forward(self, x: Tensor) -> Tensor:
        first, last = torch.linspace(0, 1, 5)[[0, -1]]
        times = torch.arange(0, self.number_of(torch.ceil((last - first) / 0.3 + 1)), dtype=x.dtype) * 0.3
        times[-1] = last
        assert times[-1] == last
        for now, then in itertools.pairwise(times):
            x = x + (then - now) * self.slope(x)
        return x.square().mean()


@pytest.mark.parametrize("number_of", [lambda tensor: tensor.item(), int, float])
def test_numbers_of_constants_are_numbers(number_of: Callable[[Tensor], Any]) -> None:
    torch.manual_seed(0)
    model = Stepping(number_of)

    pipe = pd2bw_fx.split(model, inputs(), cluster=2, num_stages=2, costs="analytic", check="full")

    assert pipe.trace_report is not None
    assert pipe.trace_report.tracer == "export"
    assert pipe.trace_report.notes == ()
    assert not any("assert" in program.source for program in pipe.programs)


class Written(Solving):
    """Asks for an input's value through a tensor of zeros that it is written to."""

    def forward(self, x: Tensor) -> Tensor:
        seen = torch.zeros(3)
        seen[0] = x.sum()
        return self.slope(x).mean() if seen.any() else self.slope(x).sum()


class Drawing(Solving):
    def forward(self, x: Tensor) -> Tensor:
        return self.slope(x).mean() if torch.rand(()) < 0.5 else self.slope(x).sum()


class Called(Solving):
    """Counts in a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.slope(x).mean() if self.calls > 2 else self.slope(x).sum()


class Numbered(Called):
    """Reads its counter as a number, and not as a truth value."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.slope(x)[:, : int(self.calls)].sum()


class Counted(Solving):
    """Counts in a plain number, of which it makes a tensor."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        times = torch.arange(int(torch.full((), 2.0 * self.calls)), dtype=x.dtype)
        return sum((self.slope(x).mean() * now for now in times), torch.zeros(()))


@pytest.mark.parametrize("kind", [Written, Drawing, Called, Numbered, Counted])
def test_what_may_be_otherwise_in_the_next_call_is_no_constant(kind: type[nn.Module]) -> None:
    with pytest.raises(TraceError):
        pd2bw_fx.split(model_of(kind), inputs(), cluster=2, costs="analytic")
