"""Checks of values: by functions of torch, at one batch size alone, and checks that only a trace meets."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import pd2bw_fx
from pd2bw_fx.errors import TraceError
from tests.test_conditions import Asserting, inputs, model_of


class Checking(Asserting):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        torch._check_tensor_all(hidden < 50)  # type: ignore[no-untyped-call]
        return self.second(hidden).square().mean()


def test_what_torch_checks_is_asserted_at_every_batch_size() -> None:
    model = model_of(Checking)
    pipe = pd2bw_fx.split(model, inputs(), cluster=2, num_stages=2, costs="analytic")

    assert pipe.trace_report.tracer == "export"
    assert pipe.verify(model, example={"x": inputs(7)[0]}).exact
    with pytest.raises(RuntimeError, match=r"values fail the check at .*_check_tensor_all"):
        pipe.run(inputs(times=1e4))


class CheckingRows(Asserting):
    """Goes through the batch row by row, which fixes its size."""

    def forward(self, x: Tensor) -> Tensor:
        assert not (x > 100).any()
        hidden = torch.stack([self.first(row) for row in x])
        return self.second(hidden).square().mean()


class ChoosingForRows(CheckingRows):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 2 if x.sum() < 100 else x)


@pytest.mark.parametrize(("kind", "tracer"), [(CheckingRows, "auto"), (ChoosingForRows, "export-as-example")])
def test_conditions_are_assumed_at_one_batch_size_too(kind: type[nn.Module], tracer: str) -> None:
    model = model_of(kind)
    pipe = pd2bw_fx.split(model, inputs(), cluster=2, num_stages=2, costs="analytic", tracer=tracer)

    assert pipe.trace_report.tracer == "export-static"
    assert "which the stages assert, at test_checked_values.py:" in str(pipe.trace_report)
    assert pipe.verify(model).exact
    with pytest.raises(RuntimeError, match=r"values (fail the check at|go another way than in the trace)"):
        pipe.run(inputs(times=1e4))


def test_a_choice_at_one_batch_size_is_refused_unless_it_is_allowed() -> None:
    with pytest.raises(TraceError, match=r"for you to allow, at test_checked_values\.py:"):
        pd2bw_fx.split(model_of(ChoosingForRows), inputs(), cluster=2, costs="analytic")


class AskingInATrace(Asserting):
    """Asks for one value in a run, and for another one where it knows that it is compiled."""

    def forward(self, x: Tensor) -> Tensor:
        assert not (x > 100).any()
        hidden = self.first(x)
        if torch.compiler.is_compiling() and (hidden > 9).any().item():
            hidden = hidden / 9
        return self.second(hidden).square().mean()


def test_a_question_that_a_run_does_not_ask_is_told_of() -> None:
    with pytest.raises(TraceError, match="export-as-example: GuardOnDataDependent"):
        pd2bw_fx.split(model_of(AskingInATrace), inputs(), cluster=2, costs="analytic")


class Marking(Asserting):
    """Marks nothing, unless it is told what, and asks whether anything is marked."""

    def forward(self, x: Tensor, marks: Tensor | None = None) -> Tensor:
        marks = torch.zeros_like(x[:, 0]) if marks is None else marks
        hidden = self.first(x)
        if marks.any():
            hidden = hidden * marks[:, None]
        if (torch.ones(x.shape[0]) > 0).all():
            hidden = hidden + 1
        return self.second(hidden).square().mean()


def test_a_condition_that_is_alike_at_all_sizes_needs_no_leave_and_is_asserted() -> None:
    model = model_of(Marking)
    pipe = pd2bw_fx.split(model, inputs(), cluster=2, num_stages=2, costs="analytic")

    assert pipe.trace_report.tracer == "export-as-example"
    assert pipe.verify(model, example={"x": inputs(7)[0]}).exact
    assert "".join(stage.source for stage in pipe.stages).count("torch._assert_async(") == 2
    with pytest.raises(TraceError, match="for you to allow"):
        pd2bw_fx.split(model, (*inputs(), torch.zeros(4)), cluster=2, costs="analytic")


class MarkingByValues(Asserting):
    """What is made in the size of what is selected depends on values after all."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if (torch.arange(x.shape[0]) < len(x[x[:, 0] > 0])).all():
            hidden = hidden + 1
        return self.second(hidden).square().mean()


def test_a_size_that_depends_on_values_needs_leave() -> None:
    with pytest.raises(TraceError, match="for you to allow"):
        pd2bw_fx.split(model_of(MarkingByValues), inputs(), cluster=2, costs="analytic")


class Selecting(Asserting):
    """Goes on with the rows and the entries that it selects, as losses of metric learning do."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        kept = hidden[x[:, 0] > -9]
        if len(kept) > x.shape[0] // 2:
            kept = kept * 2
        rows, columns = torch.where(x > 0)
        if rows.shape[0] == 0:
            return hidden.mean()
        return (self.second(kept).square().mean() + hidden[rows, columns].mean()) / len(rows)


def test_sizes_that_depend_on_values_are_asked_as_values_are() -> None:
    model = model_of(Selecting)
    with pytest.raises(TraceError, match=r"for you to allow, at .*: if len\(kept\) > x.shape\[0\] // 2"):
        pd2bw_fx.split(model, inputs(), cluster=2, costs="analytic")

    pipe = pd2bw_fx.split(
        model, inputs(), cluster=2, num_stages=2, costs="analytic", tracer="export-as-example"
    )
    assert pipe.trace_report.tracer == "export-as-example"
    assert pipe.verify(model, example={"x": inputs(7)[0]}).exact
    for other, line in ((inputs(times=1e3), r"if len\(kept\)"), ((-inputs()[0].abs(),), r"if rows\.shape")):
        with pytest.raises(RuntimeError, match=f"another way than in the trace, at .*{line}"):
            pipe.run(other)


class GoingThrough(Asserting):
    """Goes through what it selects, one by one, as a mixture of experts does."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        for row in (x[:, 0] > -9).nonzero():
            hidden = hidden + self.second(x[row])
        return hidden.mean()


@pytest.mark.parametrize("tracer", ["auto", "export-as-example"])
def test_a_loop_over_what_is_selected_is_refused_with_advice_that_helps(tracer: str) -> None:
    with pytest.raises(TraceError, match=r"Try: all entries, with a weight of 0 for some .*untraced"):
        pd2bw_fx.split(model_of(GoingThrough), inputs(), cluster=2, costs="analytic", tracer=tracer)
