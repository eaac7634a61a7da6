"""Parameters and buffers that no operator reads: planned for where they lie, kept once, and not trained."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pd2bw_fx
from pd2bw_fx.actions import RunRequest
from pd2bw_fx.cluster import Cluster
from pd2bw_fx.device import Device
from pd2bw_fx.errors import InfeasibleError
from pd2bw_fx.passes.codegen import generate
from pd2bw_fx.runtime.engine import Engine
from pd2bw_fx.runtime.job import Job, jobs, work_for
from pd2bw_fx.runtime.options import EngineOptions
from pd2bw_fx.runtime.reference import train_reference

ADAMW = functools.partial(torch.optim.AdamW, lr=0.1, weight_decay=0.1)
SPARE_BYTES = 300 * 300 * 4


class Tower(nn.Module):
    def __init__(self, spare: int = 0) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        if spare:
            self.pooler = nn.Linear(spare, spare, bias=False)
            self.register_buffer("table", torch.zeros(spare))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


class TwoTowers(nn.Module):
    """A pooler and a table of its second tower are not read, nor is a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.left = Tower()
        self.right = Tower(spare=300)
        self.spare = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.right(self.left(x)), y)


def split(model: nn.Module, batch: tuple[Tensor, ...], **options: Any) -> pd2bw_fx.Pipeline:
    return pd2bw_fx.split(model, batch, costs="analytic", **options)


def a_batch(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.randn(4, 8, dtype=dtype), torch.randn(4, 8, dtype=dtype)


def job_of(pipe: pd2bw_fx.Pipeline) -> Job:
    return jobs(pipe, work_for(pipe, RunRequest("2bw", 2, 0.0, None, False)))[0]


def test_they_take_memory_once_at_a_stage_that_reads_others_of_their_module() -> None:
    pipe = split(TwoTowers(), a_batch(), cluster=2)

    at = {name: stage for stage in pipe.plan.stages for name in stage.parameters}
    home = at["right.pooler.weight"]
    # Two versions of what is trained, one of the rest.
    specs = pipe.graph.parameters | pipe.graph.buffers
    unread = [name for name in home.parameters if name in pipe.graph.unread()]
    trained = sum(specs[name].spec.num_bytes for name in home.parameters if name not in unread)
    assert home is at["right.table"]
    assert home is at["right.first.weight"]
    assert at["spare"] is pipe.plan.stages[0]
    assert home.memory.weight_bytes == 2 * trained + sum(specs[name].spec.num_bytes for name in unread)
    for stage, program in zip(pipe.plan.stages, pipe.programs, strict=True):
        assert set(stage.parameters) == {*program.parameters, *program.buffers}


@pytest.mark.parametrize("roomy", [0, 1])
def test_they_are_planned_for_the_device_that_has_room(roomy: int) -> None:
    memory = [40_000, 2 * SPARE_BYTES][:: 1 if roomy else -1]
    devices = (Device("d0", memory[0]), Device("d1", memory[1]))
    cluster = Cluster(devices, ((0, 1e9), (1e9, 0)), ((0, 0), (0, 0)))

    pipe = split(TwoTowers(), a_batch(), cluster=cluster, num_stages=2)

    home = next(stage for stage in pipe.plan.stages if "right.pooler.weight" in stage.parameters)
    assert home.device == roomy
    assert "right.pooler.weight" in pipe.programs[home.stage].parameters


def test_a_plan_that_does_not_count_them_leaves_them_beside_others_of_their_module() -> None:
    pipe = split(TwoTowers(), a_batch(), cluster=2)
    older = replace(pipe.plan, stages=tuple(replace(s, parameters=()) for s in pipe.plan.stages))

    held = [set(program.parameters) for program in generate(pipe.graph, older)]

    assert held == [set(program.parameters) for program in pipe.programs]


@pytest.mark.usefixtures("one_rank")
def test_they_are_kept_once_and_not_trained() -> None:
    torch.manual_seed(0)
    model = TwoTowers().double()
    batches = [a_batch(torch.float64) for _ in range(4)]
    pipe = split(model, batches[0], cluster=1)
    expected = train_reference(model, batches, optimizer=ADAMW, microbatches_per_update=2)
    stepped = list[int]()

    def counted(parameters: Any) -> torch.optim.Optimizer:
        given = list(parameters)
        stepped.append(len(given))
        return ADAMW(given)

    with Engine(job_of(pipe), EngineOptions(optimizer=counted)) as engine:
        losses = [float(engine.step(batch)) for batch in batches]
        slots = engine._weights._slots
        spares = [slots.parameters(index)["right.pooler.weight"] for index in range(len(slots))]

    assert losses == pytest.approx(expected.losses, rel=1e-12)
    assert stepped == [8]
    assert len(spares) == 2
    assert len({spare.data_ptr() for spare in spares}) == 1
    assert torch.equal(spares[0], model.right.pooler.weight)


def test_a_device_that_cannot_hold_them_is_told_what_is_too_large() -> None:
    cluster = Cluster.uniform(1, memory_bytes=SPARE_BYTES // 2)

    with pytest.raises(
        InfeasibleError, match=r"alone needs .* \(the largest, 'right\.pooler\.weight', has 352 KiB\)"
    ):
        split(TwoTowers(), a_batch(), cluster=cluster)
