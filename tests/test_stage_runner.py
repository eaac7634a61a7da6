"""What a stage does to a microbatch, without links to other ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pd2bw_fx
from pd2bw_fx.actions import Action, Kind, RunRequest
from pd2bw_fx.constraints import Constraints
from pd2bw_fx.pipeline import Pipeline
from pd2bw_fx.runtime.job import jobs, work_for
from pd2bw_fx.runtime.links import Handover, Link, Links
from pd2bw_fx.runtime.stage_runner import Microbatch, StageRunner


class HandedOn(nn.Module):
    """A part of the first stage's weight is used by the second one, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.rows = nn.Parameter(torch.ones(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.rows[:4]
        return (self.last(self.first(x @ rows)) @ rows).square().mean()


@dataclass
class OneVersion:
    """Weights of one module, which updates change in place."""

    module: nn.Module

    def begin_forward(self, *_: int, **__: Any) -> nn.Module:
        return self.module


def _of_first_stage(
    pipe: Pipeline, on_output: Callable[[int, str, Tensor], None] = lambda *_: None
) -> tuple[StageRunner, Handover]:
    """Makes a runner, and what it sends to the second stage, on a link on which nothing has gone out yet."""
    job = jobs(pipe, work_for(pipe, RunRequest(microbatches_per_update=1, method="pb")))[0]
    program, sent = pipe.programs[0], Handover()
    values = tuple(sorted(port.value for port in program.outputs))
    after = (Link(values, 1, job, {job.rank_of(1, 0): sent}),) if len(pipe.programs) > 1 else ()
    weights: Any = OneVersion(pipe.stages[0].module)
    cpu = torch.device("cpu")
    links = Links((), after, (), ())
    return StageRunner(job, program, links, weights, device=cpu, precision=None, on_output=on_output), sent


def test_weights_that_are_sent_are_those_of_the_forward_whenever_they_leave() -> None:
    x = torch.randn(2, 4)
    at = Constraints(stage_of={"first": 0, "last": 1})
    pipe = pd2bw_fx.split(HandedOn(), (x,), cluster=2, constraints=at, costs="analytic", check=False)
    runner, sent = _of_first_stage(pipe)
    module = pipe.stages[0].module

    runner.add(0, Microbatch.of({"x": x}))
    for kind in (Kind.FORWARD, Kind.SEND_ACTIVATION):
        runner.perform(Action(kind, 0, 0, 0))
    with torch.no_grad():
        module.rows.zero_()  # type: ignore[operator, union-attr]

    (rows,) = [tensor for tensor in sent.take(0) if tensor is not None and tensor.shape == (4, 4)]
    assert rows.tolist() == torch.ones(4, 4).tolist()


def test_attention_takes_no_fast_path_in_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attn(x, x, x, need_weights=False)[0].square().mean()  # type: ignore[no-any-return]

    taken: list[str] = []
    fast = torch._native_multi_head_attention
    monkeypatch.setattr(
        torch, "_native_multi_head_attention", lambda *given: taken.append("fast") or fast(*given)
    )
    model, x = Reader(), torch.randn(2, 3, 8)
    pipe = pd2bw_fx.split(model, (x,), cluster=1, costs="analytic")
    assert "nn.MultiheadAttention(8, 2, batch_first=True)" in pipe.stages[0].source
    taken.clear()  # the model itself is asked whether it makes a difference
    seen: list[Tensor] = []
    runner, _ = _of_first_stage(pipe, on_output=lambda microbatch, name, tensor: seen.append(tensor))
    runner.training = False
    pipe.stages[0].module.eval()
    runner.add(0, Microbatch.of({"x": x}))
    runner.perform(Action(Kind.FORWARD, 0, 0, 0))
    assert not taken

    assert torch.equal(seen[0], model(x))
    with torch.no_grad():
        model.eval()(x)
    assert taken  # by the model itself
