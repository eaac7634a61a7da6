"""What a call keeps of the weights, which are others in the next one: in attributes, or on parameters."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import pd2bw_fx
from pd2bw_fx.errors import TraceError
from pd2bw_fx.passes.trace import trace
from tests.test_parameters_elsewhere import Double
from tests.trained import assert_trained_by_the_rule

X = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Anchored(Double):
    """Weights are pulled to what they were in the first call, as in L2-SP (arXiv 1802.01483)."""

    def __init__(self, kind: str, *, has_norm: bool = False) -> None:
        super().__init__()
        self.kind = kind
        self.norm = nn.BatchNorm1d(8, dtype=torch.float64) if has_norm else nn.Identity()
        self.anchor: Tensor | None = None
        self.anchors: list[Tensor] = []
        self.store = SimpleNamespace(anchors=None)

    def kept(self) -> list[Tensor]:
        now = [parameter.detach().clone() for parameter in self.first.parameters()]
        if self.kind == "tensor":
            if self.anchor is None:
                self.anchor = now[0]
            return [self.anchor]
        if self.kind == "list":
            if not self.anchors:
                self.anchors.extend(now)
            return self.anchors
        if self.kind == "object":
            if self.store.anchors is None:
                self.store.anchors = now
            return self.store.anchors
        if not hasattr(self, "start"):
            self.register_buffer("start", now[0])
        return [self.start]

    def forward(self, x: Tensor) -> Tensor:
        pairs = zip(self.first.parameters(), self.kept(), strict=False)
        return super().forward(self.norm(x)) + sum((weight - was).square().sum() for weight, was in pairs)


@pytest.mark.parametrize("tracer", ["auto", "fx"])
@pytest.mark.parametrize("kind", ["tensor", "list", "object"])
def test_weights_that_a_first_call_keeps_are_a_constant(kind: str, tracer: str) -> None:
    traced = trace(Anchored(kind), (X,), tracer=tracer)

    assert any("after its first call, which sets attribute" in note for note in traced.report.notes)


def test_weights_are_pulled_to_what_they_were_in_the_first_call() -> None:
    torch.manual_seed(0)
    model = Anchored("list")
    pipe = pd2bw_fx.split(model, X, cluster=2, num_stages=2, costs="analytic")

    assert_trained_by_the_rule(model, pipe, [X, 2 * X, 3 * X])


@pytest.mark.parametrize("model", [Anchored("buffer"), Anchored("tensor", has_norm=True)])
def test_a_first_call_that_keeps_weights_and_makes_or_writes_buffers_is_for_the_user_to_make(
    model: Anchored,
) -> None:
    with pytest.raises(TraceError, match=r"leaves in the attribute (start|anchor); .* run the model once"):
        trace(model, (X,))
    model(X)
    trace(model, (X,))


class CentredByTheFirstBatch(Double):
    mean: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.mean is None:
            self.mean = x.mean(0)
        return super().forward(x - self.mean)


def test_what_a_first_call_keeps_of_its_batch_is_refused() -> None:
    with pytest.raises(
        TraceError, match=r"leaves in the attribute mean; .* run the model once, then split it"
    ):
        trace(CentredByTheFirstBatch(), (X,))


class Dragging(Double):
    """Weights are pulled to those of the call before, which one of its layers or parameters has."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def forward(self, x: Tensor) -> Tensor:
        holder = self.first if self.where == "layer" else self.first.weight
        now = self.first.weight.detach().clone()
        drag = (self.first.weight - getattr(holder, "previous", now)).square().sum()
        holder.previous = now  # type: ignore[union-attr]
        return super().forward(x) + drag


class Binary(Double):
    """Keeps the real-valued weights as an attribute of the binary ones, as BinaryNet does."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.first.weight
        if not hasattr(weight, "org"):
            weight.org = weight.data.clone()  # type: ignore[attr-defined]
        weight.data = weight.org.sign()  # type: ignore[attr-defined]
        return super().forward(x)


@pytest.mark.parametrize("run_before", [False, True])
@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lambda: Dragging("layer"), r"leaves in the attribute first\.previous;"),
        (lambda: Dragging("parameter"), r"'previous', which is an attribute of 'first\.weight' itself;"),
        (Binary, r"'org', which is an attribute of 'first\.weight' itself;"),
    ],
)
def test_weights_that_go_from_call_to_call_are_refused(
    model: type[nn.Module], said: str, run_before: bool
) -> None:
    own = model()
    if run_before:
        own(X)
    before = vars(own.first.weight).copy(), vars(own.first).copy()
    with pytest.raises(TraceError, match=said):
        trace(own, (X,))
    assert (vars(own.first.weight), vars(own.first)) == before


class Marked(Double):
    """Numbers on parameters are read, and what is only kept there changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first.weight.times = 3.0  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        weight = self.first.weight
        weight.norm_now = weight.detach().norm()  # type: ignore[attr-defined]
        self.second.bias.calls = getattr(self.second.bias, "calls", 0) + 1  # type: ignore[attr-defined]
        return functional.linear(x, weight * getattr(weight, "times", 1.0)).square().mean()


def test_numbers_on_parameters_are_constants_and_what_is_kept_there_for_nobody_is_left_out() -> None:
    model = Marked()
    pipe = pd2bw_fx.split(model, X, cluster=1, costs="analytic")

    assert vars(model.first.weight) == {"times": 3.0}
    assert "3.0" in pipe.stages[0].source
    assert pipe.run(X)["loss"] == model(X)


class KeptForEvaluation(Double):
    """What follows from trained weights is computed once there, and from frozen ones once at all."""

    def __init__(self) -> None:
        super().__init__()
        self.third = nn.Linear(8, 8, dtype=torch.float64).requires_grad_(False)
        self.tables: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if "frozen" not in self.tables:
            self.tables["frozen"] = self.third.weight.exp()
        squared = self.first.weight.square() if self.training else self.tables.get("squared")
        if squared is None:
            squared = self.tables["squared"] = self.first.weight.square()
        return (x @ squared @ self.tables["frozen"]).square().mean()


@pytest.mark.parametrize("training", [True, False])
def test_what_is_kept_of_weights_that_stay_is_computed_in_the_stages(training: bool) -> None:
    model = KeptForEvaluation().train(training)
    pipe = pd2bw_fx.split(model, X, cluster=1, costs="analytic")

    assert not model.tables
    assert pipe.verify().exact
