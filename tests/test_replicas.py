"""Copies of single stages against every assignment and every way to share the devices out."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pd2bw_fx import load, split
from pd2bw_fx.cluster import Cluster
from pd2bw_fx.costs import MemoryModel
from pd2bw_fx.device import Device
from pd2bw_fx.errors import InfeasibleError, InputError, PlanMismatchError
from pd2bw_fx.models.mlp import MLP, MLPConfig
from pd2bw_fx.passes.coarsen import coarsen
from pd2bw_fx.passes.partition import check_plan, partition_replicated, sweep
from pd2bw_fx.plan import Plan
from pd2bw_fx.problem import Block, ParameterSize, Problem, Value
from pd2bw_fx.report.loads import loads_svg
from pd2bw_fx.report.memory import memory_svg
from tests.programs.delayed_reference import DelayedReference
from tests.programs.equals_reference import difference

BUCKET_BYTES = 5  # messages of this size carry gradients
LATENCY_S = 0.25
PLAIN = MemoryModel(optimizer_copies=0)


def by_hand(problem: Problem, num_devices: int, memory_bytes: int, microbatches_per_update: int) -> float:
    """Returns the least load of the busiest copy, on links of 2 bytes a second and a latency."""
    best = math.inf
    for num_stages in range(1, min(num_devices, len(problem.blocks)) + 1):
        possible = list(assignments(problem, num_stages))
        for replicas in itertools.product(range(1, num_devices + 1), repeat=num_stages):
            if sum(replicas) > num_devices or any(microbatches_per_update % count for count in replicas):
                continue
            for assigned in possible:
                loads = [
                    load_s(problem, assigned, stage, replicas, memory_bytes, microbatches_per_update)
                    for stage in range(num_stages)
                ]
                best = min(best, max(loads))
    return best


def assignments(problem: Problem, num_stages: int) -> Iterator[dict[str, int]]:
    """Yields the stage of each block: no stage is empty, and no value goes back."""
    names = [block.name for block in problem.blocks]
    for stages in itertools.product(range(num_stages), repeat=len(names)):
        stage_of = dict(zip(names, stages, strict=True))
        goes_back = any(stage_of[v.producer] > stage_of[c] for v in problem.values for c in v.consumers)
        if len(set(stages)) == num_stages and not goes_back:
            yield stage_of


def load_s(
    problem: Problem,
    stage_of: Mapping[str, int],
    stage: int,
    replicas: Sequence[int],
    memory_bytes: int,
    microbatches_per_update: int,
) -> float:
    """Returns the seconds a microbatch of one copy of a stage, infinite if it does not fit in memory."""
    copies, own = replicas[stage], [block for block in problem.blocks if stage_of[block.name] == stage]
    links_s, crossing_bytes = crossings(problem, stage_of, stage)
    weights = sum(problem.parameters[name].trainable_bytes for block in own for name in block.parameters)
    needed_bytes = memory(
        weights,
        sum(block.saved_bytes for block in own) + crossing_bytes,
        in_flight=math.ceil(sum(replicas[stage:]) / copies),
        microbatches_per_update=microbatches_per_update // copies,
    )
    if needed_bytes > memory_bytes:
        return math.inf
    work_s = sum(block.forward_s[0] + block.backward_s[0] for block in own)
    all_weights = sum(size.trainable_bytes for size in problem.parameters.values())
    buckets = min(1, all_weights) if all_weights <= BUCKET_BYTES else 1 + weights / BUCKET_BYTES
    ring_s = 2 * (copies - 1) * (LATENCY_S * buckets + weights / copies / 2)
    return (work_s + links_s) / copies + ring_s / microbatches_per_update


def crossings(problem: Problem, stage_of: Mapping[str, int], stage: int) -> tuple[float, int]:
    """Returns the seconds a microbatch on a stage's links, and the bytes of the values that cross them."""
    links_s, num_bytes = 0.0, 0
    for value in problem.values:
        source = stage_of[value.producer]
        targets = {stage_of[name] for name in value.consumers} - {source}
        times = len(targets) if source == stage else int(stage in targets)
        ways = 2 if value.gradient_bytes else 1
        links_s += times * (ways * LATENCY_S + (value.bytes + value.gradient_bytes) / 2)
        num_bytes += value.bytes * bool(times)
    return links_s, num_bytes


def memory(weights: int, microbatch: int, *, in_flight: int, microbatches_per_update: int) -> int:
    """Returns the bytes of one copy: `weights` for each version, `microbatch` for each one in flight.

    Both counts are the copy's own. Weights are stashed once for all microbatches in flight of one update.
    """
    versions = math.ceil((in_flight - 1) / microbatches_per_update) + 1
    before_the_gradients = versions * weights + in_flight * microbatch
    if microbatches_per_update > 1:
        return before_the_gradients + weights
    # Each backward ends an update: gradients and the last microbatch are not there at once.
    return max(before_the_gradients, before_the_gradients + weights - microbatch)


@st.composite
def problems(draw: Any, num_devices: int) -> Problem:
    n = draw(st.integers(2, 5))
    blocks = tuple(
        Block(
            f"b{v}",
            (f"op{v}",),
            (float(draw(st.integers(0, 9))),) * num_devices,
            (float(draw(st.integers(1, 9))),) * num_devices,
            (f"w{v}",),
            draw(st.integers(0, 9)),
        )
        for v in range(n)
    )
    values = tuple(
        Value(f"v{v}", f"b{draw(st.integers(0, v - 1))}", (f"b{v}",), draw(st.integers(0, 9)), 1)
        for v in range(1, n)
    )
    most_bytes = draw(st.sampled_from([0, 1, 12, 12]))
    sizes = {f"w{v}": ParameterSize(draw(st.integers(0, most_bytes))) for v in range(n)}
    return Problem(blocks, values, sizes)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_copies_are_shared_out_as_well_as_in_the_best_of_all_plans(data: Any) -> None:
    num_devices = data.draw(st.integers(1, 4))
    problem = data.draw(problems(num_devices))
    memory_bytes = data.draw(st.sampled_from([30, 60, 10**6]))
    microbatches_per_update = data.draw(st.integers(1, 5))
    expected = by_hand(problem, num_devices, memory_bytes, microbatches_per_update)
    cluster = Cluster.uniform(num_devices, memory_bytes=memory_bytes, bytes_per_s=2.0, latency_s=LATENCY_S)
    setting: dict[str, Any] = {
        "microbatches_per_update": microbatches_per_update,
        "memory_model": PLAIN,
        "max_gap": 1e-6,
    }
    if math.isinf(expected):
        with pytest.raises(InfeasibleError, match="no assignment fits"):
            partition_replicated(problem, cluster, **setting)
        return
    with patch("pd2bw_fx.passes.partition.gradient_sums.GRADIENT_BUCKET_BYTES", BUCKET_BYTES):
        found = partition_replicated(problem, cluster, **setting)
    assert found.bottleneck_s == pytest.approx(expected, rel=3e-6)
    assert found.bound_s <= expected * (1 + 1e-9)
    assert sum(stage.replicas for stage in found.stages) <= num_devices
    assert found.bottleneck_s == pytest.approx(max(stage.load_s for stage in found.stages))
    assert sorted(name for stage in found.stages for name in stage.operators) == sorted(
        name for block in problem.blocks for name in block.operators
    )


def test_the_heavy_stage_gets_the_spare_devices() -> None:
    blocks = tuple(Block(f"b{v}", (f"b{v}",), (w,) * 4, (w,) * 4) for v, w in enumerate((3.0, 1.0)))
    problem = Problem(blocks, (Value("v", "b0", ("b1",), 0, 0),), {})
    cluster = Cluster.uniform(4, memory_bytes=10**6, bytes_per_s=1.0, latency_s=0.0)

    found = partition_replicated(problem, cluster, num_stages=(2,))

    assert found.replicas == (3, 1)
    assert [stage.device for stage in found.stages] == [0, 3]
    assert found.microbatches_per_update == 3
    assert found.bottleneck_s == pytest.approx(2.0)
    assert check_plan(Plan.loads(found.dumps()), problem, cluster) == found


def test_latencies_of_adding_up_few_gradients_are_planned_as_they_are_simulated() -> None:
    model = MLP(MLPConfig(num_layers=4))
    cluster = Cluster.uniform(4, memory_bytes="1 GiB", bytes_per_s=1e9, latency_s=1e-3)
    options: dict[str, Any] = {"cluster": cluster, "check": False, "costs": "analytic"}
    one = split(model, model.example_inputs(batch_size=2), num_stages=1, method="1f1b", **options)
    options["microbatches_per_update"] = 4

    copied = split(one, method="1f1b", num_stages=1, replicas=4, **options)
    chosen = split(one, method="pipedream", replicas="auto", **options)
    swept = sweep(
        {2: coarsen(one.graph, one.costs, cluster)},
        cluster,
        batch_size=8,
        num_stages=(1,),
        num_replicas=(1, 4),
        method="1f1b",
        max_gap=0.0,
    )

    assert copied.plan.update_s > 2 * 3 * 1e-3
    assert copied.plan.update_s == pytest.approx(4 / copied.simulate(num_updates=8).throughput)
    assert copied.check_plan(copied.plan) == copied.plan
    assert chosen.plan.replicas is None
    assert swept.best.num_replicas == 1
    assert swept.best.update_s == pytest.approx(4 * one.plan.bottleneck_s)


def test_unlike_devices_are_refused() -> None:
    cluster = Cluster(
        (Device("a", memory_bytes=9), Device("b", memory_bytes=8)), ((0, 1), (1, 0)), ((0, 0), (0, 0))
    )
    problem = Problem((Block("b", ("b",), (1.0, 1.0), (1.0, 1.0)),), (), {})
    with pytest.raises(InputError, match="devices and links that are alike"):
        partition_replicated(problem, cluster, microbatches_per_update=1)


def test_plan_with_unequal_copies_is_trained_as_pipedream_has_it(tmp_path: Path) -> None:
    model = MLP(MLPConfig(num_layers=4)).double()
    inputs = model.example_inputs(batch_size=2)
    pipe = split(model, inputs, cluster=3, method="pipedream", replicas=(2, 1), costs="analytic")
    batches = [model.example_inputs(batch_size=4) for _ in range(4)]
    sgd = functools.partial(torch.optim.SGD, lr=0.05)
    held = {name: program.stage for program in pipe.programs for name in program.parameters}
    rule = DelayedReference(copy.deepcopy(model), held, "pipedream", 2, sgd, (2, 1))
    expected = rule.train(batches)

    result = pipe.train_local(batches, optimizer=sgd)

    assert (pipe.plan.replicas, pipe.plan.microbatches_per_update) == ((2, 1), 2)
    assert [stage.device for stage in pipe.plan.stages] == [0, 2]
    assert len(pipe.schedule.ranks) == 3
    assert result.losses == pytest.approx(rule.losses, rel=1e-12)
    assert difference(pipe.state_dict(), expected) <= 1e-12
    pipe.save(tmp_path / "saved")
    assert load(tmp_path / "saved").plan == pipe.plan


def test_table_report_and_explanation_tell_the_copies() -> None:
    model = MLP(MLPConfig(num_layers=4))
    pipe = split(
        model, model.example_inputs(batch_size=2), cluster=3, method="pipedream", replicas=(2, 1), check=False
    )
    explained = str(pipe.explain())

    assert "2 from cpu:0 on" in str(pipe)
    assert "2 from cpu:0 on" in loads_svg(pipe.plan)
    assert "2 from cpu:0 on" in memory_svg(pipe.plan)
    assert "what binds:" in explained
    assert "all links twice as fast" in explained


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "2bw", "replicas": (2, 1)}, "2bw needs as many at every stage"),
        ({"method": "2bw", "replicas": "auto"}, "for 2bw give a number"),
        ({"method": "pipedream", "replicas": (2, 2)}, "add up to at most 3"),
        ({"method": "pipedream", "replicas": (2, 1), "num_stages": 3}, "give one number for each"),
        (
            {"method": "pipedream", "replicas": (2, 1), "microbatches_per_update": 3},
            "cannot be shared equally",
        ),
        ({"method": "chimera", "replicas": 2}, "replicas of chimera are not planned"),
    ],
)
def test_copies_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    model = MLP(MLPConfig(num_layers=4))
    with pytest.raises(InputError, match=message):
        split(model, model.example_inputs(batch_size=2), cluster=3, costs="analytic", check=False, **options)


def test_edited_plan_with_copies_on_one_another_is_refused() -> None:
    blocks = tuple(Block(f"b{v}", (f"b{v}",), (w,) * 3, (w,) * 3) for v, w in enumerate((3.0, 1.0)))
    problem = Problem(blocks, (Value("v", "b0", ("b1",), 0, 0),), {})
    cluster = Cluster.uniform(3, memory_bytes=10**6, bytes_per_s=1.0, latency_s=0.0)
    plan = partition_replicated(problem, cluster, replicas=(2, 1))
    moved = replace(plan, stages=(plan.stages[0], replace(plan.stages[1], device=1)))
    beyond = replace(plan, stages=(replace(plan.stages[0], replicas=4), plan.stages[1]))

    with pytest.raises(PlanMismatchError, match="two stages are on one device"):
        check_plan(moved, problem, cluster)
    with pytest.raises(PlanMismatchError, match="with 4 replicas; there are devices 0 to 2"):
        check_plan(beyond, problem, cluster)
