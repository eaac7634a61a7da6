"""What a stage does to a microbatch, without links to other ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import pd2bw_fx
from pd2bw_fx.actions import Action, Kind, RunRequest
from pd2bw_fx.constraints import Constraints
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


def test_weights_that_are_sent_are_those_of_the_forward_whenever_they_leave() -> None:
    x = torch.randn(2, 4)
    at = Constraints(stage_of={"first": 0, "last": 1})
    pipe = pd2bw_fx.split(HandedOn(), (x,), cluster=2, constraints=at, costs="analytic", check=False)
    job = jobs(pipe, work_for(pipe, RunRequest(microbatches_per_update=1, method="pb")))[0]
    program, module = pipe.programs[0], pipe.stages[0].module
    values = tuple(sorted(port.value for port in program.outputs))
    sent = Handover()  # as a link on which nothing has gone out yet
    links = Links((), (Link(values, 1, job, {job.rank_of(1, 0): sent}),), (), ())
    runner = StageRunner(
        job,
        program,
        links,
        OneVersion(module),  # type: ignore[arg-type]
        device=torch.device("cpu"),
        precision=None,
        on_output=lambda *_: None,
    )

    runner.add(0, Microbatch.of({"x": x}))
    for kind in (Kind.FORWARD, Kind.SEND_ACTIVATION):
        runner.perform(Action(kind, 0, 0, 0))
    with torch.no_grad():
        module.rows.zero_()  # type: ignore[operator, union-attr]

    (rows,) = [tensor for tensor in sent.take(0) if tensor is not None and tensor.shape == (4, 4)]
    assert rows.tolist() == torch.ones(4, 4).tolist()
