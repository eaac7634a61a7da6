"""Arguments of the planner that cannot be: one line each, by the first that sees them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from pd2bw_fx.cluster import Cluster, Device
from pd2bw_fx.constraints import Constraints
from pd2bw_fx.costs import MemoryModel
from pd2bw_fx.errors import ClusterError, InputError, SolverError
from pd2bw_fx.passes.partition import partition, partition_replicated, plan_workload, sweep
from pd2bw_fx.problem import Block, Problem
from pd2bw_fx.workload import Workload

PROBLEM = Problem(tuple(Block(f"b{at}", (f"o{at}",), (1.0,) * 3, (2.0,) * 3) for at in range(4)), (), {})
CLUSTER = Cluster.uniform(3)
WORKLOAD = Workload("none", 1, 0, 1.0, (), ())


def of(**device: Any) -> Cluster:
    return Cluster((Device(name="a", **device),), ((0.0,),), ((0.0,),))


WRONG: dict[str, tuple[Callable[[], Any], type[Exception]]] = {
    "memory_bytes is 'lots'; it must be a number": (lambda: of(memory_bytes="lots"), ClusterError),
    "memory_bytes is inf": (lambda: of(memory_bytes=math.inf), ClusterError),
    "speed is True": (lambda: of(memory_bytes=1, speed=True), ClusterError),
    "a cluster of '2' devices": (lambda: Cluster.uniform("2"), ClusterError),  # type: ignore[arg-type]
    r"memory_bytes\[0\] is None": (
        lambda: Constraints(memory_bytes={0: None}),  # type: ignore[dict-item]
        InputError,
    ),
    "whole is 'blocks.0'; a tuple": (lambda: Constraints(whole="blocks.0"), InputError),  # type: ignore[arg-type]
    "1 among together or whole": (lambda: Constraints(whole=(1,)), InputError),  # type: ignore[arg-type]
    "2 among together": (lambda: Constraints(together=(("a", 2),)), InputError),  # type: ignore[arg-type]
    "optimizer_copies is -1": (lambda: MemoryModel(optimizer_copies=-1), InputError),
    r"order is \(0, 0\); expected 2 different devices of 0 to 2": (
        lambda: partition(PROBLEM, CLUSTER, num_stages=2, order=(0, 0)),
        InputError,
    ),
    "each microbatch size is 0": (lambda: sweep({0: PROBLEM}, CLUSTER, batch_size=8), InputError),
    "num_replicas is 2; a sequence": (
        lambda: sweep({1: PROBLEM}, CLUSTER, batch_size=8, num_replicas=2),  # type: ignore[arg-type]
        InputError,
    ),
    "before any of 3 settings had a plan": (
        lambda: sweep({1: PROBLEM}, CLUSTER, batch_size=8, time_limit_s=1e-9),
        SolverError,
    ),
    r"replicas is \(2, 1\), and num_stages=\(3,\)": (
        lambda: partition_replicated(PROBLEM, CLUSTER, replicas=(2, 1), num_stages=(3,)),
        InputError,
    ),
    "max_gap is nan": (lambda: plan_workload(WORKLOAD, max_gap=math.nan), InputError),
    "time_limit_s is -3": (lambda: plan_workload(WORKLOAD, time_limit_s=-3), InputError),
}


@pytest.mark.parametrize("message", WRONG)
def test_an_argument_that_cannot_be_is_refused_in_one_line(message: str) -> None:
    call, kind = WRONG[message]

    with pytest.raises(kind, match=message) as refused:
        call()
    assert "\n" not in str(refused.value)


def test_no_more_microbatches_are_in_flight_than_an_update_has() -> None:
    plan = partition(PROBLEM, CLUSTER, method="1f1b", microbatches_per_update=2)

    assert [stage.microbatches_in_flight for stage in plan.stages] == [2, 2, 1]
