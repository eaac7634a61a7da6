"""Every number of an explanation is that of a plan that was really made."""

from __future__ import annotations

import dataclasses
import itertools
import random
import re

import pytest
import torch
from torch import nn

import pd2bw_fx
from pd2bw_fx.cluster import Cluster
from pd2bw_fx.errors import InputError, PlanMismatchError
from pd2bw_fx.passes.partition import check_plan, explain, partition, partition_replicated
from pd2bw_fx.problem import Block, ParameterSize, Problem, Value


def drawn(seed: int, num_blocks: int = 7) -> Problem:
    draw = random.Random(seed)
    blocks = tuple(
        Block(f"b{at}", (f"op{at}",), (draw.uniform(1, 4),) * 2, (draw.uniform(1, 4),) * 2)
        for at in range(num_blocks)
    )
    reads = [(draw.randrange(at), at) for at in range(1, num_blocks)] + [(0, num_blocks - 1)]
    values = tuple(
        Value(f"v{u}_{v}", f"b{u}", (f"b{v}",), draw.randint(1, 9), draw.choice([0, 3])) for u, v in reads
    )
    return Problem(blocks, values, {})


def bottleneck(problem: Problem, stages: tuple[int, ...]) -> float:
    """Two stages: the larger share of the work, and all that crosses on both."""
    place = {block.name: stage for block, stage in zip(problem.blocks, stages, strict=True)}
    load = [0.0, 0.0]
    for block in problem.blocks:
        load[place[block.name]] += block.forward_s[0] + block.backward_s[0]
    crossing = 0.0
    for value in problem.values:
        if place[value.producer] != place[value.consumers[0]]:
            crossing += (
                0.1 + value.bytes / 10 + (0.1 + value.gradient_bytes / 10) * bool(value.gradient_bytes)
            )
    return max(load) + crossing


@pytest.mark.parametrize("seed", range(8))
def test_next_best_cut_is_the_second_of_all_assignments(seed: int) -> None:
    problem = drawn(seed)
    cluster = Cluster.uniform(2, memory_bytes=10**9, bytes_per_s=10.0, latency_s=0.1)
    plan = partition(problem, cluster, max_gap=1e-6)
    names = [block.name for block in problem.blocks]
    possible = [
        stages
        for stages in itertools.product(range(2), repeat=len(names))
        if len(set(stages)) == 2
        and all(
            stages[names.index(v.producer)] <= stages[names.index(v.consumers[0])] for v in problem.values
        )
    ]
    planned = tuple(plan.stage_of[block.operators[0]] for block in problem.blocks)
    second = min(bottleneck(problem, stages) for stages in possible if stages != planned)
    cut = explain(plan, problem, cluster, max_gap=1e-6).cuts[0]
    assert cut.next_best_s == pytest.approx(second, rel=2e-6)
    moved = {*cut.moved_later, *cut.moved_earlier}
    other = tuple(stage ^ (name in moved) for name, stage in zip(names, planned, strict=True))
    assert bottleneck(problem, other) == pytest.approx(second, rel=2e-6)
    assert {t.value for t in cut.crossing} == {
        v.name
        for v in problem.values
        if planned[names.index(v.producer)] != planned[names.index(v.consumers[0])]
    }


def with_copies_by_hand(problem: Problem, stages: tuple[int, ...], copies: tuple[int, ...]) -> float:
    """Values of ten seconds each go straight from their maker to every stage that reads them."""
    load = [0.0] * len(copies)
    for block, stage in zip(problem.blocks, stages, strict=True):
        load[stage] += block.forward_s[0] + block.backward_s[0]
    place = {block.name: stage for block, stage in zip(problem.blocks, stages, strict=True)}
    for value in problem.values:
        for reader in {place[name] for name in value.consumers} - {place[value.producer]}:
            load[place[value.producer]] += 10.0
            load[reader] += 10.0
    return max(seconds / count for seconds, count in zip(load, copies, strict=True))


@pytest.mark.parametrize("copies", [(1, 1, 2), (1, 2, 1)])
def test_next_best_cut_of_stages_with_copies_sends_values_straight(copies: tuple[int, ...]) -> None:
    work_s = (4.0, 3.0, 6.0, 9.0, 7.0)
    blocks = tuple(Block(f"b{at}", (f"op{at}",), (s,) * 4, (s,) * 4) for at, s in enumerate(work_s))
    reads = {"b0": ("b1", "b2", "b3", "b4"), "b1": ("b2",), "b2": ("b3",), "b3": ("b4",)}
    values = tuple(Value(f"v{name}", name, readers, 10, 0) for name, readers in reads.items())
    problem = Problem(blocks, values, {})
    cluster = Cluster.uniform(4, memory_bytes=10**9, bytes_per_s=1.0, latency_s=0.0)

    plan = partition_replicated(problem, cluster, replicas=copies, max_gap=1e-6)
    explained = explain(plan, problem, cluster, max_gap=1e-6)

    planned = tuple(plan.stage_of[f"op{at}"] for at in range(5))
    rising = itertools.combinations_with_replacement(range(3), 5)
    possible = [stages for stages in rising if len(set(stages)) == 3]
    for cut in explained.cuts:
        others = [
            stages
            for stages in possible
            if any((a <= cut.stage) != (b <= cut.stage) for a, b in zip(stages, planned, strict=True))
        ]
        best_s = min(with_copies_by_hand(problem, stages, copies) for stages in others)
        assert cut.next_best_s == pytest.approx(best_s, rel=2e-6)


def tight() -> tuple[Problem, Cluster]:
    """Six blocks in a row on three devices, where 1000 saved bytes each make the first two recompute."""
    blocks = tuple(
        Block(f"b{at}", (f"op{at}",), (1.0,) * 3, (2.0,) * 3, (f"w{at}",), 2**30) for at in range(6)
    )
    values = tuple(Value(f"v{at}", f"b{at}", (f"b{at + 1}",), 10, 10) for at in range(5))
    problem = Problem(blocks, values, {f"w{at}": ParameterSize(100) for at in range(6)})
    return problem, Cluster.uniform(3, memory_bytes=3 * 2**30 + 10**5, bytes_per_s=1e3, latency_s=0.0)


def test_each_change_has_the_bottleneck_of_the_plan_made_for_it() -> None:
    problem, cluster = tight()
    plan = partition(problem, cluster, recompute="auto")
    explained = explain(plan, problem, cluster, recompute="auto")
    changes = {change.what: change.bottleneck_s for change in explained.changes}
    devices = list(cluster.devices)
    devices[1] = dataclasses.replace(devices[1], memory_bytes=devices[1].memory_bytes + 2**30)
    larger = partition(problem, dataclasses.replace(cluster, devices=tuple(devices)), recompute="auto")
    expected = larger.bottleneck_s if larger.bottleneck_s < plan.bottleneck_s * 0.998 else None
    assert changes.get("1 GiB more on cpu:1") == pytest.approx(expected)
    assert changes["one stage more, on a further device like cpu:2"] < plan.bottleneck_s
    assert list(changes.values()) == sorted(changes.values())


def test_what_binds_is_the_slowest_stage_and_the_memory_that_forces_recomputation() -> None:
    problem, cluster = tight()
    plan = partition(problem, cluster, recompute="auto")
    explained = explain(plan, problem, cluster, recompute="auto")
    slowest = max(plan.stages, key=lambda stage: stage.load_s)
    binding = [slack.what for slack in explained.binding]
    assert any(what.startswith(f"time of stage {slowest.stage} on") for what in binding)
    again = [stage.device_name for stage in plan.stages if stage.recompute]
    assert again
    assert {f"memory of {name} if nothing is recomputed" for name in again} <= set(binding)
    text = str(explained)
    assert "cut 0 | 1: 20 B cross: v" in text
    assert "what would help:" in text


def test_memory_without_recomputation_is_that_of_the_same_plan_without_it() -> None:
    """Here the optimizer's step takes more than a microbatch that is recomputed, and less than all kept."""
    problem, cluster = tight()
    problem = dataclasses.replace(
        problem, parameters={name: ParameterSize(2**31) for name in problem.parameters}
    )

    def of(memory_bytes: int) -> Cluster:
        devices = (dataclasses.replace(device, memory_bytes=memory_bytes) for device in cluster.devices)
        return dataclasses.replace(cluster, devices=tuple(devices))

    plan = partition(problem, of(20 * 2**30), recompute="auto", method="1f1b")
    stages = tuple(dataclasses.replace(stage, recompute=False) for stage in plan.stages)
    kept = check_plan(dataclasses.replace(plan, stages=stages), problem, of(2**60))

    explained = explain(plan, problem, of(20 * 2**30), recompute="auto")

    told = {slack.what: slack.used for slack in explained.binding if "recomputed" in slack.what}
    assert told == {
        f"memory of {stage.place} if nothing is recomputed": kept.stages[stage.stage].memory.total_bytes
        for stage in plan.stages
        if stage.recompute
    }
    assert told


def test_plan_of_another_problem_is_refused() -> None:
    problem, cluster = tight()
    plan = partition(problem, cluster, recompute="auto")
    renamed = dataclasses.replace(problem.blocks[0], operators=("other",))
    with pytest.raises(PlanMismatchError, match="does not place operator 'other'"):
        explain(plan, dataclasses.replace(problem, blocks=(renamed, *problem.blocks[1:])), cluster)


def test_a_plan_by_itself_says_what_explains_it() -> None:
    plan = partition(drawn(0), Cluster.uniform(2, memory_bytes=10**9, bytes_per_s=10.0, latency_s=0.1))

    with pytest.raises(InputError, match=r"call explain\(\) on its pipeline: pipe\.explain\(\)"):
        plan.explain(time_limit_s=1.0)


def test_operators_are_shown_with_their_modules() -> None:
    layers = [nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)]
    pipe = pd2bw_fx.split(nn.Sequential(*layers), torch.randn(3, 8), cluster=2, costs="analytic")

    told = str(pipe.explain())

    assert re.search(r"cut 0 \| 1: .* cross: \d\.\d:\w+\n", told)
    assert re.search(r"the next best cut: .*: \d\.\d:\w+ (later|earlier)", told)
