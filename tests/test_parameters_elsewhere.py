"""Parameters that a forward has from elsewhere than their modules, and tensors in a parameter's memory."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import pd2bw_fx
from pd2bw_fx.errors import InputError, TraceError
from tests.plain_models import Plain
from tests.trained import assert_trained_by_the_rule


class Double(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.double()  # before a tensor is held: it gives a buffer's name to another one


class Listed(Double):
    """Keeps its weights in a list beside the layers, and the first one transposed in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = [self.first.weight, self.second.weight]

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(x @ self.weights[0].T + self.first.bias)
        return functional.linear(hidden, self.weights[1], self.second.bias).square().mean()


class Bound(Double):
    """Calls functions that were given their weights once, and a scale that is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((8,), 0.5, dtype=torch.float64))
        self.call = functools.partial(functional.linear, weight=self.first.weight, bias=self.first.bias)
        self.held = {"scale": self.scale}

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.call(x)) * self.held["scale"]).square().mean()


class Variable:
    """A library's own, as Keras has them: what holds the parameter is no module."""

    def __init__(self, value: nn.Parameter) -> None:
        self.value = value


class OfVariables(Double):
    def __init__(self) -> None:
        super().__init__()
        self.variables = [Variable(parameter) for parameter in self.parameters()]

    def forward(self, x: Tensor) -> Tensor:
        weight, bias, *others = [variable.value for variable in self.variables]
        hidden = torch.tanh(torch.addmm(bias, x, weight.t()))
        return torch.addmm(others[1], hidden, others[0].t()).square().mean()


HOLDERS = (Listed, Bound, OfVariables)


def split(model: nn.Module, tracer: str = "auto") -> pd2bw_fx.Pipeline:
    x = torch.randn(4, 8, dtype=torch.float64)
    return pd2bw_fx.split(model, (x,), cluster=2, num_stages=2, costs="analytic", tracer=tracer)


@pytest.mark.parametrize("holder", HOLDERS)
def test_held_parameters_are_trained(holder: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = holder()
    pipe = split(model)
    assert "constant" not in "".join(stage.source for stage in pipe.stages)
    assert pipe.trace_report is not None
    assert pipe.trace_report.tracer == "export"
    batches = [torch.randn(6, 8, dtype=torch.float64) for _ in range(3)]
    assert_trained_by_the_rule(model, pipe, batches)


@pytest.mark.parametrize("holder", HOLDERS)
def test_torch_fx_reads_held_parameters(holder: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    pipe = split(holder(), "fx")
    assert "constant" not in "".join(stage.source for stage in pipe.stages)
    pipe.verify()


class Alias(Double):
    def __init__(self, part: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.kept = part(self.first.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) + x @ self.kept).square().mean()


@pytest.mark.parametrize("tracer", ["auto", "fx"])
@pytest.mark.parametrize("part", [Tensor.detach, lambda weight: weight.data, lambda weight: weight.data.t()])
def test_an_attribute_in_a_parameters_memory_is_refused(
    tracer: str, part: Callable[[Tensor], Tensor]
) -> None:
    with pytest.raises(TraceError, match=r"in the memory of the parameter 'first\.weight'.*in the forward$"):
        split(Alias(part), tracer)
    pipe = split(Alias(lambda weight: weight.detach().clone()), tracer)
    assert "x @ self.kept" in "".join(stage.source for stage in pipe.stages)


def test_two_tensors_of_a_model_in_one_memory_are_refused() -> None:
    tied = Double()
    tied.second.weight.data = tied.first.weight.data
    with pytest.raises(
        InputError, match=r"^'second\.weight' is in the memory of the parameter 'first\.weight'"
    ):
        split(tied)
    program = torch.export.export(tied, (torch.randn(4, 8, dtype=torch.float64),))
    with pytest.raises(InputError, match="weight' is in the memory of the parameter"):
        pd2bw_fx.split(program, cluster=2, costs="analytic")

    class Reading(Double):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.start.sum()

    kept = Reading()
    kept.register_buffer("start", kept.second.weight.detach()[2:4])
    with pytest.raises(InputError, match=r"^'start' is in the memory .* 'second\.weight'.*\(\.clone\(\)\)$"):
        split(kept)


def test_memory_apart_frozen_or_not_read_is_nobodys_matter() -> None:
    tied = Double()
    tied.second.weight = tied.first.weight

    flat = Double()
    numbers = torch.randn(sum(parameter.numel() for parameter in flat.parameters()), dtype=torch.float64)
    nn.utils.vector_to_parameters(numbers, flat.parameters())

    partly_frozen = Double()
    partly_frozen.third = nn.Linear(8, 8, dtype=torch.float64).requires_grad_(False)
    partly_frozen.second.requires_grad_(False).weight.data = partly_frozen.third.weight.data

    not_read = Double()
    not_read.copies = nn.ParameterList([nn.Parameter(p.data) for p in not_read.parameters()])

    for model in (tied, flat, partly_frozen, not_read):
        for tracer in ("auto", "fx"):
            assert split(model, tracer).verify().exact
