"""What a second call of the forward does otherwise is refused: by chance, or by what the first one set."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pd2bw_fx
from pd2bw_fx.errors import TraceError
from pd2bw_fx.passes.trace import trace
from pd2bw_fx.passes.trace.checks.second_call import _is_same_result


class _Counting(nn.Module):
    def __init__(self, *, uses_count: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.calls = 0
        self.uses_count = uses_count

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x).sum() * (self.calls if self.uses_count else 1)


@pytest.mark.parametrize("tracer", ["auto", "fx"])
def test_a_python_counter_is_refused_where_it_changes_the_program_and_noted_where_not(tracer: str) -> None:
    with pytest.raises(TraceError, match="attribute calls \\(0 before the forward, 1 after\\)"):
        trace(_Counting(uses_count=True), (torch.randn(3, 2),), tracer=tracer)

    model = _Counting(uses_count=False)
    traced = trace(model, (torch.randn(3, 2),), tracer=tracer)

    assert any("attribute calls" in note for note in traced.report.notes)
    assert model.calls == 0


@pytest.mark.parametrize("tracer", ["auto", "fx"])
def test_a_tensor_that_the_forward_keeps_is_noted_and_no_fake_one_is_left_behind(tracer: str) -> None:
    class Keeping(nn.Linear):
        last: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            self.last = super().forward(x)
            return self.last.sum()

    model = Keeping(2, 2)
    traced = trace(model, (torch.randn(3, 2),), tracer=tracer)

    assert any("assigns a tensor to last" in note for note in traced.report.notes)
    assert model.last is None


NOT_A_NUMBER = torch.nan


def test_what_is_no_number_before_and_after_the_forward_has_not_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Unset(nn.Linear):
        scale, table = NOT_A_NUMBER, np.array([torch.nan, 1.0])

    exports: list[object] = []
    export = torch.export.export
    monkeypatch.setattr(torch.export, "export", lambda *a, **k: exports.append(a) or export(*a, **k))
    model = Unset(2, 2)
    model.loss = NOT_A_NUMBER

    assert trace(model, (torch.randn(3, 2),)).report.notes == ()
    assert len(exports) == 1


class Angles(nn.Module):
    """A table that is made in the first call of a length, as rotary embeddings have it."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.when = when
        self.length: int | None = None
        self.is_made = False
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        is_new = {
            "length": length != self.length,
            "flag": not self.is_made,
            "longer": length > (self.length or 0),
        }
        if is_new[self.when]:
            self.length, self.is_made = length, True
            self.table = (
                torch.arange(length, dtype=x.dtype).outer(torch.ones(x.shape[2], dtype=x.dtype)).cos()
            )
        assert self.table is not None
        return x * self.table[:length]


@pytest.mark.parametrize("when", ["length", "flag", "longer"])
def test_what_a_first_call_keeps_in_attributes_is_a_constant(when: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.angles, self.second = nn.Linear(4, 4), Angles(when), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.angles(self.first(x))).square().mean()

    model = Model()
    pipe = pd2bw_fx.split(model, torch.randn(4, 6, 4), cluster=2, num_stages=2, costs="analytic")
    assert pipe.trace_report is not None
    assert pipe.trace_report.tracer == "export"
    assert any("after its first call, which sets attribute angles." in n for n in pipe.trace_report.notes)
    assert 'self.register_buffer("table", ' in "".join(stage.source for stage in pipe.stages)
    assert (model.angles.length, model.angles.is_made, model.angles.table) == (None, False, None)
    pipe.verify(example={"x": torch.randn(7, 6, 4)})


def test_a_first_call_that_writes_parameters_is_for_the_user_to_make() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.shift, self.is_made = nn.Linear(4, 4), nn.Parameter(torch.zeros(4)), False

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.layer(x)
            if not self.is_made:
                with torch.no_grad():
                    self.shift.copy_(-hidden.mean(0))
                self.is_made = True
            return (hidden + self.shift).square().mean()

    model, x = Normed(), torch.randn(4, 4)
    with pytest.raises(TraceError, match=r"attribute is_made .* run the model once, then split it$"):
        pd2bw_fx.split(model, x, cluster=1, costs="analytic")
    assert not model.shift.any()
    model(x)
    pd2bw_fx.split(model, x, cluster=1, costs="analytic").verify(example={"x": torch.randn(6, 4)})


class _MakesLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.last: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        if self.last is None:
            self.last = nn.Linear(hidden.shape[-1], 1)
        if not hasattr(self, "scale"):
            self.scale = nn.Parameter(torch.ones(1))
        return (self.last(hidden) * self.scale).square().mean()


@pytest.mark.parametrize("tracer", ["auto", "export"])
def test_layers_that_a_first_call_makes_are_asked_for(tracer: str) -> None:
    model, x = _MakesLayers(), torch.randn(4, 8)

    with pytest.raises(TraceError, match=r"makes the parameter '(scale|last.weight)' .* run the model once"):
        pd2bw_fx.split(model, x, cluster=2, costs="analytic", tracer=tracer)
    assert model.last is None
    assert [name for name, _ in model.named_parameters()] == ["first.weight", "first.bias"]

    model(x)
    assert pd2bw_fx.split(model, x, cluster=2, costs="analytic", tracer=tracer).verify().exact


class _Averaging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.mean = torch.zeros(6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
        return self.last(hidden - self.mean).square().mean()


class _GoingOn(nn.Module):
    """A state that each call begins with; the first one with none."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(6, 6, batch_first=True)
        self.state: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        out, (hidden, cell) = self.layer(x[None], self.state)
        self.state = hidden.detach(), cell.detach()
        return out.square().mean()


@pytest.mark.parametrize(("kind", "name"), [(_Averaging, "mean"), (_GoingOn, "state")])
def test_tensors_that_go_from_call_to_call_in_attributes_are_refused(
    kind: type[nn.Module], name: str
) -> None:
    with pytest.raises(TraceError, match=rf"from call to call, by what .* the attribute {name}; .*copy_"):
        trace(kind(), (torch.randn(4, 6),))


def test_a_mean_that_is_only_kept_is_noted() -> None:
    class Logging(_Averaging):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
            return self.last(hidden).square().mean()

    traced = trace(Logging(), (torch.randn(4, 6),))
    assert any("assigns a tensor to mean" in note for note in traced.report.notes)


def test_a_table_that_each_call_makes_anew_is_no_state() -> None:
    class Anchored(_Averaging):
        anchors: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.anchors is None or self.anchors.shape[0] != x.shape[1]:
                self.anchors = torch.arange(x.shape[1], dtype=x.dtype)
            return self.last(self.first(x) + self.anchors).square().mean()

    model = Anchored()
    trace(model, (torch.randn(4, 6),))
    assert model.anchors is None


class _Kept(nn.Module):
    """Keeps something in a container that is an attribute."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)
        self.kind = kind
        self.means = {"mean": torch.zeros(())}
        self.calls: list[Tensor] = []
        self.recent: deque[Tensor] = deque(maxlen=4)
        self.tables: dict[int, Tensor] = {}
        self.memory = SimpleNamespace(mean=torch.zeros(()), tables={})

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        if self.kind == "tensor in a dict":
            hidden = hidden - self.means["mean"]
            self.means["mean"] = 0.9 * self.means["mean"] + 0.1 * hidden.detach().mean()
        elif self.kind == "tensor in an object":
            hidden = hidden - self.memory.mean
            self.memory.mean = 0.9 * self.memory.mean + 0.1 * hidden.detach().mean()
        elif self.kind == "table in an object":
            self.memory.tables[8] = torch.arange(8.0)
            hidden = hidden + self.memory.tables[8]
        elif self.kind == "tensors in a list":
            self.calls.append(hidden.detach().mean())
            hidden = hidden - torch.stack(self.calls[-3:]).mean()
        elif self.kind == "queue that is only filled":
            self.recent.append(hidden.detach().mean())
        elif self.kind == "table by size":
            if 8 not in self.tables:
                self.tables[8] = torch.arange(8.0)
            hidden = hidden + self.tables[8]
        return self.last(hidden).square().mean()


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("tensor in a dict", "means"),
        ("tensor in an object", "memory"),
        ("tensors in a list", "calls"),
    ],
)
def test_what_goes_from_call_to_call_in_a_container_is_refused(kind: str, name: str) -> None:
    model = _Kept(kind)
    said = rf"from call to call, by what its forward leaves in the attribute {name}"

    with pytest.raises(TraceError, match=said):
        pd2bw_fx.split(model, torch.randn(4, 8), cluster=2, costs="analytic")

    assert not model.calls
    assert type(model.memory.mean) is Tensor


@pytest.mark.parametrize("kind", ["queue that is only filled", "table by size", "table in an object"])
def test_a_container_that_changes_no_result_is_left_as_it_was(kind: str) -> None:
    model, x = _Kept(kind), torch.randn(4, 8)

    pipe = pd2bw_fx.split(model, x, cluster=2, costs="analytic", check="full")

    assert not model.recent
    assert not model.tables
    assert not model.memory.tables
    assert torch.equal(pipe.run(x)["loss"], model(x))
    assert all(type(value) is Tensor for value in model.recent)


def test_calls_are_compared_by_the_largest_entry() -> None:
    """Sums in another order differ by roundings of what was added up, however little comes out."""
    first = torch.tensor([1.0, 1e-4, torch.nan, torch.inf])

    assert _is_same_result(first, first + torch.tensor([0.0, 1e-7, 0.0, 0.0]))
    assert not _is_same_result(first, first + torch.tensor([0.0, 1e-5, 0.0, 0.0]))
    assert not _is_same_result(torch.tensor([1, 2]), torch.tensor([1, 3]))


class Measured(nn.Module):
    """Notes the sizes that it has seen, as the blocks of many image models do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        self.height, self.width = x.shape[1], 1
        self.dropout.p = 0.2
        return self.dropout(self.linear(x)).relu()  # type: ignore[no-any-return]


def test_what_many_modules_change_is_told_in_one_line() -> None:
    model = nn.Sequential(Measured(), Measured(), Measured())
    pipe = pd2bw_fx.split(model, torch.randn(4, 8), cluster=2, costs="analytic")
    notes = pipe.trace_report.notes  # type: ignore[union-attr]

    assert [note for note in notes if "forward" in note] == [
        "attribute 0.dropout.p (0.1 before the forward, 0.2 after) and 2 more: the stages have them as they "
        "are after the forward",
        "attribute 0.height (None before the forward, 8 after) and 5 more are not in the stages, and the "
        "trace is the same after other calls",
    ]
