"""What torch.fx records of a forward is what the stages do, in the words of its author."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pd2bw_fx
from pd2bw_fx.errors import TraceError
from pd2bw_fx.passes.normalise import normalise
from pd2bw_fx.passes.trace import trace


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("table", torch.linspace(-1, 1, 12).reshape(3, 4))


class _Parts(_Layers):
    def forward(self, x: Tensor) -> Tensor:
        largest = self.first(x).max(-1, keepdim=True).values
        sizes, places = torch.topk(self.first(x), 2)
        return self.last(largest * x + sizes.sum()).mean() + places.sum()


class _PartsByName(_Layers):
    def forward(self, x: Tensor) -> Tensor:
        found = self.first(x).sort(dim=0)
        return (self.last(found.values) * found.indices).mean()


class _Attributes(_Layers):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.last(hidden.T.mT).mean()


class _Tables(_Layers):
    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        return self.last(self.first(x) + self.table[words]).mean()


class _Masks(_Layers):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        mask = ~((x > 0) | (hidden > 0)) ^ (x < -1) & (hidden < 1)
        others = torch.arange(4)[None] <= torch.arange(4)[:, None]
        return F.softmax(self.last(hidden).masked_fill(mask, -9.0) @ others.float(), -1)[..., 0].mean()


class _Reshapes(_Layers):
    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.squeeze(self.last(torch.unsqueeze(self.first(x), 1)), 1)
        return torch.reshape(hidden, (-1, 2, 2)).square().sum((1, 2)).mean()


class _Scaling(nn.Module):
    def forward(self, x: Tensor, scales: Tensor) -> Tensor:
        return x * scales


class _Constants(_Layers):
    def __init__(self) -> None:
        super().__init__()
        self.scaled, self.scales = _Scaling(), torch.linspace(0, 1, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.scaled(self.first(x), self.scales)).mean()


@pytest.mark.parametrize("kind", [_Parts, _PartsByName, _Attributes, _Tables, _Masks, _Reshapes, _Constants])
@pytest.mark.parametrize("num_stages", [1, 2])
def test_the_stages_compute_what_the_model_does(kind: type[nn.Module], num_stages: int) -> None:
    torch.manual_seed(0)
    inputs = (torch.randn(4, 4), torch.tensor([0, 2, 1, 0]))[: 2 if kind is _Tables else 1]
    pipe = pd2bw_fx.split(
        kind(), inputs, cluster=num_stages, num_stages=num_stages, costs="analytic", tracer="fx"
    )

    pipe.verify()
    source = "".join(stage.source for stage in pipe.stages)
    assert "test_symbolic.py:" in source
    assert ".py:" not in source.replace("test_symbolic.py:", "")


class _Masked(_Layers):
    def forward(self, x: Tensor) -> Tensor:
        self.first.weight.data *= 0.5
        return self.last(self.first(x)).mean()


def test_an_assignment_that_torch_fx_forgets_is_refused() -> None:
    model = _Masked()
    before = model.first.weight.clone()

    with pytest.raises(TraceError, match=r"the forward writes 'first\.weight' through \.data"):
        pd2bw_fx.split(model, (torch.randn(4, 4),), cluster=2, costs="analytic", tracer="fx")

    assert torch.equal(model.first.weight, before)


class _Assigned(_Layers):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        self.table = self.table * 0.9
        return self.last(hidden * self.table[0]).mean()


class _Asked(_Layers):
    def forward(self, x: Tensor) -> Tensor:
        self.table = self.table * 0.9
        return self.last(self.first(x)).mean() if self.table.sum() > 0 else self.first(x).mean()


@pytest.mark.parametrize(
    ("kind", "told"), [(_Assigned, "assigns the buffer 'table' anew"), (_Asked, "control flow")]
)
def test_a_buffer_that_is_assigned_needs_example_inputs(kind: type[nn.Module], told: str) -> None:
    model = kind()
    table = model.get_buffer("table")

    with pytest.raises(TraceError, match=rf"{told}[\s\S]*Try: example inputs"):
        trace(model)

    assert model.get_buffer("table") is table


class _Noise(_Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x) + torch.randn(4)).mean()


class _NoiseLikeTheInput(_Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x) + torch.randn_like(x)).mean()


def test_a_random_number_that_would_stay_that_of_the_trace_is_refused() -> None:
    torch.manual_seed(0)
    with pytest.raises(TraceError, match=r"randn.default draws random numbers that depend on no input"):
        trace(_Noise(), (torch.randn(4, 4),), tracer="fx")
    x = torch.randn(4, 4)
    pipe = pd2bw_fx.split(_NoiseLikeTheInput(), (x,), cluster=1, costs="analytic", tracer="fx")
    stage = pipe.stages[0].module
    assert not torch.equal(stage(x), stage(x))


def test_symbolic_tracing_on_request_computes_what_the_model_does() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.relu = nn.ReLU(inplace=True)
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor, *, times: int = 2) -> Tensor:
            with torch.no_grad():
                shift = self.scale * 3
            return (self.relu(self.norm(x)) * self.scale * times + shift).view(x.shape[0], -1).sum()

    model, x = Net(), torch.randn(6, 4)
    traced = trace(model, (x,), {"times": 3}, tracer="fx")
    graph = normalise(traced)

    assert traced.report.tracer == "fx"
    assert graph.loss == "loss"
    assert graph.operators["norm"].writes_buffers == (
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    )
    assert graph.operators["relu"].memory_group == graph.operators["norm"].memory_group
    assert graph.fx is not None
    graph.fx(x)[0].backward()
    found = model.scale.grad
    model.scale.grad = None
    model(x, times=3).backward()
    assert torch.equal(found, model.scale.grad)


def test_symbolic_tracing_knows_the_authors_lines() -> None:
    graph = normalise(trace(_Masks(), (torch.randn(4, 4),), tracer="fx"))

    lines = [operator.source_line or "" for operator in graph.operators.values()]
    assert {line.partition(":")[0] for line in lines} == {"test_symbolic.py"}


class _Scaled(_Layers):
    def __init__(self, read: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor([0.5, 2.0]))
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        return (self.last(self.first(x)) * self.read(self.scale)).square().mean()


@pytest.mark.parametrize(
    "read",
    [
        lambda scale: math.exp(float(scale[0])),
        lambda scale: int(scale.sum()),
        lambda scale: 2 if scale.max() > 1 and int(scale[1]) else 1,
    ],
)
@pytest.mark.parametrize("tracer", ["auto", "fx"])
def test_a_number_that_a_buffer_holds_is_in_no_stage(read: Callable[[Tensor], Any], tracer: str) -> None:
    with pytest.raises(TraceError, match="makes a Python number of a tensor's values"):
        pd2bw_fx.split(_Scaled(read), torch.randn(4, 4), cluster=2, costs="analytic", tracer=tracer)


@pytest.mark.parametrize(
    "read",
    [
        lambda scale: scale.exp()[0],
        lambda scale: sum(row for row in scale) * len(scale),
        lambda scale: scale.shape[0] + scale.dim(),
        lambda scale: 3 if scale.max() > 1 else 4,
    ],
)
def test_what_follows_from_a_buffer_follows_other_weights(read: Callable[[Tensor], Any]) -> None:
    x, other = torch.randn(4, 4), _Scaled(read)
    other.scale = torch.tensor([1.5, 3.0])
    pipe = pd2bw_fx.split(_Scaled(read), x, cluster=2, costs="analytic", tracer="fx")

    pipe.load_state_dict(other.state_dict())

    torch.testing.assert_close(pipe.run(x)["loss"], other(x))
