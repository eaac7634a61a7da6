"""Python conditions on values of tensors: asserted as they were on the example, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import pd2bw_fx
from pd2bw_fx.errors import TraceError, WorkerError
from pd2bw_fx.passes.trace.patches.asked_places import is_check as is_check_at
from tests.trained import sgd


class Asserting(nn.Module):
    """Asserts a condition on an input and one on a hidden value, one each way round."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        assert not (x > 100).any(), 'no "large" input'
        hidden = self.first(x)
        assert torch.isfinite(hidden).all()
        if (
            hidden.abs().sum() < 0  # whatever it is
        ):
            raise ValueError("less than nothing")
        return self.second(hidden).square().mean()


class Clamping(Asserting):
    def forward(self, x: Tensor) -> Tensor:
        hidden = x
        for layer in (self.first, self.second):
            hidden = layer(hidden)
            if not (hidden.abs() < 50).all():
                hidden = hidden.clamp(-1.0, 1.0)
        return hidden.square().mean()


def inputs(size: int = 4, *, times: float = 1.0) -> tuple[Tensor]:
    generator = torch.Generator().manual_seed(size)
    return (torch.randn(size, 6, generator=generator) * times,)


def model_of(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def test_assertions_are_kept_in_the_stages() -> None:
    model = model_of(Asserting)

    pipe = pd2bw_fx.split(model, inputs(), cluster=2, num_stages=2, costs="analytic")

    assert pipe.trace_report.tracer == "export-as-example"
    assert sum("which the stages assert" in note for note in pipe.trace_report.notes) == 3
    assert pipe.verify(model).exact
    sources = "".join(stage.source for stage in pipe.stages)
    assert sources.count("torch._assert_async(") == 3
    assert "assert not (x > 100).any(), 'no 'large' input'" in sources
    assert pipe.train_local([inputs(8)], optimizer=sgd, microbatches_per_update=2).losses
    with pytest.raises(WorkerError, match=r"values fail the check at test_conditions\.py:\d+: assert not"):
        pipe.train_local([inputs(8, times=1e4)], optimizer=sgd, microbatches_per_update=2)


def test_what_is_asked_by_item_is_a_condition_too() -> None:
    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            if not torch.isfinite(x).all().item():
                raise ValueError("no number")
            return self.second(self.first(x)).square().mean()

    model = model_of(Asking)
    pipe = pd2bw_fx.split(model, inputs(), cluster=2, num_stages=2, costs="analytic")

    assert pipe.verify(model).exact
    with pytest.raises(WorkerError, match=r"values fail the check at test_conditions\.py:\d+: if not"):
        pipe.train_local([inputs(8, times=float("nan"))], optimizer=sgd, microbatches_per_update=2)


class _Unseen(Asserting):
    """A trace's truth value is neither True nor False, and nobody would know that it was asked."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if torch.isnan(x).any().item() is True:
            hidden = torch.nan_to_num(hidden)
        return self.second(hidden).square().mean()


class _AsText(Asserting):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if str((x > 9).any().item()) == "True":
            hidden = hidden / 9
        return self.second(hidden).square().mean()


@pytest.mark.parametrize("kind", [_Unseen, _AsText])
def test_a_truth_value_that_chooses_unseen_is_one_too(kind: type[nn.Module]) -> None:
    with pytest.raises(
        TraceError, match=r"export: UnseenChoiceError: chooses a way by values.*conditions\.py"
    ):
        pd2bw_fx.split(model_of(kind), inputs(), cluster=2, costs="analytic")

    pipe = pd2bw_fx.split(model_of(kind), inputs(), cluster=2, costs="analytic", tracer="export-as-example")
    with pytest.raises(RuntimeError, match="another way than in the trace"):
        pipe.run(inputs(4, times=float("nan") if kind is _Unseen else 1e3)[0])


class _Large(Asserting):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        largest = hidden.abs().max().item()
        if 2 * largest + 1 > 1000 or largest < 0:
            hidden = hidden / largest
        return self.second(hidden / max(0.01, largest)).square().mean()


class _Started(Asserting):
    """Sets its scale in the first call, as ActNorm does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("is_started", torch.tensor(1, dtype=torch.uint8))
        self.register_buffer("scale", torch.full((6,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.is_started.item() == 0:
            self.scale.copy_(hidden.detach().std(0))
            self.is_started.fill_(1)
        return self.second(hidden * self.scale).square().mean()


def test_comparisons_of_numbers_are_conditions_too() -> None:
    model = model_of(_Large)
    pipe = pd2bw_fx.split(model, inputs(), cluster=2, costs="analytic", tracer="export-as-example")

    assert pipe.verify(model).exact
    assert "".join(stage.source for stage in pipe.stages).count("torch._assert_async(") == 3
    pipe.run(inputs(7)[0])
    with pytest.raises(RuntimeError, match=r"another way .*: if 2 \* largest \+ 1 > 1000 or largest < 0:"):
        pipe.run(inputs(4, times=1e5)[0])


def test_a_first_call_that_is_over_is_asserted() -> None:
    model = model_of(_Started)
    pipe = pd2bw_fx.split(model, inputs(), cluster=2, costs="analytic", tracer="export-as-example")

    assert pipe.verify(model).exact
    pipe.load_state_dict({"is_started": torch.tensor(0, dtype=torch.uint8)})
    with pytest.raises(RuntimeError, match=r"another way .*: if self\.is_started"):
        pipe.run(inputs()[0])


def test_a_truth_value_that_chooses_nothing_is_a_number() -> None:
    class Counting(Asserting):
        def forward(self, x: Tensor) -> Tensor:
            self.is_large = (x > 9).any().item()
            return self.second(self.first(x) * (x > 0).any().item()).square().mean()

    pipe = pd2bw_fx.split(model_of(Counting), inputs(), cluster=2, costs="analytic")
    assert pipe.trace_report is not None
    assert pipe.trace_report.tracer == "export"


def test_a_condition_that_chooses_is_refused_unless_it_is_allowed(tmp_path: Path) -> None:
    model = model_of(Clamping)
    with pytest.raises(
        TraceError, match="tracer='export-as-example' if it always goes the same way"
    ) as raised:
        pd2bw_fx.split(model, inputs(), cluster=2, costs="analytic")
    assert "for you to allow, at test_conditions.py:" in str(raised.value)

    pipe = pd2bw_fx.split(
        model, inputs(), cluster=2, num_stages=2, costs="analytic", tracer="export-as-example"
    )

    assert pipe.verify(model).exact
    assert "clamp" not in "".join(stage.source for stage in pipe.stages)
    pipe.export_onnx(tmp_path / "onnx")
    pipe.save(tmp_path / "saved")
    pipe = pd2bw_fx.load(tmp_path / "saved")
    for stage in pipe.stages:
        assert "torch._assert_async(" in stage.source
    with pytest.raises(WorkerError, match=r"if not \(hidden\.abs\(\) < 50\)\.all\(\)"):
        pipe.train_local([inputs(8, times=1e3)], optimizer=sgd, microbatches_per_update=2)


@pytest.mark.parametrize(
    ("condition", "is_check"),
    [
        ("assert first.all() and second.all()", True),
        ("assert first.all() or second.all()", False),  # one is enough, whichever
        ("assert not (first.any() and second.any())", False),
        ("assert x is None or first.all()", True),
        ("if first.any() or second.any():\n    raise ValueError", True),
        ("if first.any() and second.any():\n    raise ValueError", False),
        ("if x is not None and first.any():\n    message = 'no'\n    raise ValueError(message)", True),
        ("if first.any():\n    x = x * 2", False),
        ("assert (first if x.any() else second).all()", False),
    ],
)
def test_only_what_every_good_batch_answers_alike_is_assumed(
    condition: str, is_check: bool, tmp_path: Path
) -> None:
    (tmp_path / "model.py").write_text(f"x = 1\n{condition}\n")

    assert is_check_at(str(tmp_path / "model.py"), 2) is is_check


@pytest.mark.parametrize(
    ("condition", "is_check"),
    [
        ("not no_rows and not no_columns", True),  # pytorch-crf: one is False, the other one a tensor
        ("not no_columns and not no_rows", True),
        ("not no_columns and no_rows", False),  # raises for no batch, whatever no_columns is
        ("not no_columns and not no_columns", False),
    ],
)
def test_an_error_that_plain_values_leave_to_one_tensor_is_a_check(
    condition: str, is_check: bool, tmp_path: Path
) -> None:
    (tmp_path / "model.py").write_text(f"if {condition}:\n    raise ValueError\n")

    known = {"no_rows": False, "no_columns": torch.tensor(True)}
    assert is_check_at(str(tmp_path / "model.py"), 1, known) is is_check


class Comparing(Asserting):
    """Asks by functions of torch that return a Python bool."""

    def forward(self, x: Tensor, again: Tensor) -> Tensor:
        assert torch.allclose(x, again, atol=1e-5), "not the same"
        assert not torch.equal(x, x[:, :3])
        if not x.equal(again):
            raise ValueError("not quite")
        return super().forward(x)


def test_torch_equal_and_allclose_are_conditions_too() -> None:
    model, (x,) = model_of(Comparing), inputs()

    pipe = pd2bw_fx.split(model, (x, x.clone()), cluster=2, num_stages=2, costs="analytic")

    assert pipe.verify(model).exact
    assert "".join(stage.source for stage in pipe.stages).count("torch._assert_async(") == 5
    (x,) = inputs(7)
    assert pipe.verify(model, example_args=(x, x.clone())).exact
    with pytest.raises(RuntimeError, match=r"values fail the check at test_conditions\.py:\d+: if"):
        pipe.stages[0].module(x, x + 1e-7)


def test_the_other_way_is_traced_where_the_example_takes_it() -> None:
    model = model_of(Clamping)

    pipe = pd2bw_fx.split(
        model, inputs(times=1e3), cluster=1, costs="analytic", tracer="export-as-example", check=False
    )

    assert ".clamp(-1.0, 1.0)" in pipe.stages[0].source
    assert ".all().logical_not()," in pipe.stages[0].source


def test_a_model_without_values_to_ask_is_refused_as_before() -> None:
    with torch.device("meta"):
        model, example = Clamping(), (torch.zeros(4, 6),)

    with pytest.raises(TraceError, match="the weights hold no data to run the model with"):
        pd2bw_fx.split(model, example, cluster=1, costs="analytic", tracer="export-as-example")


class Acting(nn.Module):
    """torch.distributions check their arguments and samples in torch's own code."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor, actions: Tensor) -> Tensor:
        chosen = torch.distributions.Categorical(logits=self.last(self.first(x).tanh()))
        return -chosen.log_prob(actions).mean()


def test_what_torch_itself_checks_is_asserted(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch.compile switches the checks of all distributions off, for as long as the process lives.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    model = model_of(Acting)

    pipe = pd2bw_fx.split(model, (*inputs(), torch.tensor([0, 2, 1, 1])), cluster=1, costs="analytic")

    assert pipe.verify(model).exact
    assert pipe.stages[0].source.count(".all()") == 2
    with pytest.raises(
        RuntimeError, match=r"values fail the check at distribution\.py:\d+, from test_conditions"
    ):
        pipe.stages[0].module(*inputs(), torch.tensor([0, 2, 1, 3]))


def test_a_refusal_names_the_line_that_no_answer_gets_past() -> None:
    class Repeating(Asserting):
        def forward(self, x: Tensor) -> Tensor:
            assert torch.isfinite(x).all()
            for _ in range(int((x > 0).sum())):
                x = self.first(x)
            return self.second(x).square().sum()

    with pytest.raises(TraceError, match=r"stopped at test_conditions\.py:\d+: for _ in range"):
        pd2bw_fx.split(model_of(Repeating), inputs(), cluster=2, costs="analytic")


class Flagged(Asserting):
    """Branches on its buffers, and on no input."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("doubling", torch.tensor(True))
        self.register_buffer("rounds", torch.tensor(2))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.doubling:
            hidden = hidden * 2
        if self.rounds > 1:
            hidden = hidden.tanh()
        return self.second(hidden).square().mean()


def test_what_buffers_decide_needs_no_leave_and_is_asserted() -> None:
    pipe = pd2bw_fx.split(model_of(Flagged), inputs(), cluster=2, num_stages=2, costs="analytic")

    assert pipe.trace_report is not None
    assert pipe.trace_report.tracer == "export-as-example"
    assert "which the stages assert" in str(pipe.trace_report)
    pipe.verify(example={"x": inputs(3)[0]})
    pipe.load_state_dict(pipe.state_dict() | {"doubling": torch.tensor(False)})
    with pytest.raises(RuntimeError, match="values go another way than in the trace"):
        pipe.run(inputs())


class Latent(Asserting):
    """A distribution checks what it is given more than once on one line."""

    def forward(self, x: Tensor) -> Tensor:
        found = torch.distributions.Normal(self.first(x), 1.0).log_prob(x)
        drawn = torch.distributions.Categorical(logits=found).sample((2,))
        return self.second(found[drawn[0] % len(found)] + drawn.sum()).mean()


def test_a_line_that_asks_several_times_has_one_note(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch.compile switches the checks of distributions off for the rest of a process.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    pipe = pd2bw_fx.split(model_of(Latent), inputs(), cluster=1, costs="analytic")

    assert pipe.trace_report is not None
    asserted = [note for note in pipe.trace_report.notes if "which the stages assert" in note]
    assert len(asserted) == len(set(asserted)) == 2
