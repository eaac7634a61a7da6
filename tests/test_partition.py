"""The planner against an exhaustive search written here, and against bad input."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pd2bw_fx.cluster import Cluster, Device
from pd2bw_fx.costs import MemoryModel
from pd2bw_fx.errors import InfeasibleError, InputError, SolverError
from pd2bw_fx.passes.partition import partition
from pd2bw_fx.plan import Plan
from pd2bw_fx.problem import Block, ParameterSize, Problem, Value


def brute_force(
    problem: Problem, cluster: Cluster, num_stages: int, *, copies: int, overlap: bool, recompute: Any
) -> float | None:
    """The least bottleneck over every stage of every block and every device of every stage; None: none fits."""
    names = [block.name for block in problem.blocks]
    grid = np.array(list(itertools.product(range(num_stages), repeat=len(names))))  # (assignments, blocks)
    keep = np.ones(len(grid), dtype=bool)
    for value in problem.values:
        for consumer in value.consumers:
            keep &= grid[:, names.index(value.producer)] <= grid[:, names.index(consumer)]
    for stage in range(num_stages):
        keep &= (grid == stage).any(axis=1)
    grid = grid[keep]
    best = math.inf
    for devices in itertools.permutations(range(len(cluster)), num_stages):
        slowest = np.zeros(len(grid))
        for stage in range(num_stages):
            load = _stage_load(problem, cluster, names, grid, devices, stage, copies, overlap, recompute)
            slowest = np.maximum(slowest, load)
        best = min(best, float(slowest.min(initial=math.inf)))
    return None if math.isinf(best) else best


def _stage_load(
    problem: Problem,
    cluster: Cluster,
    names: list[str],
    grid: Any,
    devices: tuple[int, ...],
    stage: int,
    copies: int,
    overlap: bool,
    recompute: Any,
) -> Any:
    here, device = grid == stage, devices[stage]
    in_flight = len(devices) - stage
    forward = here @ np.array([block.forward_s[device] for block in problem.blocks])
    backward = here @ np.array([block.backward_s[device] for block in problem.blocks])
    links = np.zeros(len(grid))
    memory = (here * np.array([block.workspace_bytes for block in problem.blocks])).max(axis=1)
    for parameter, size in problem.parameters.items():
        users = [at for at, block in enumerate(problem.blocks) if parameter in block.parameters]
        num_bytes = copies * size.trainable_bytes + size.frozen_bytes
        memory = memory + num_bytes * here[:, users].any(axis=1)
    for value in problem.values:
        source = grid[:, names.index(value.producer)]
        readers = grid[:, [names.index(name) for name in value.consumers]]
        crosses = np.zeros(len(grid), dtype=bool)
        for other in range(len(devices)):
            if other == stage:
                continue
            sends = (source == stage) & (readers == other).any(axis=1)
            receives = (source == other) & (readers == stage).any(axis=1)
            links = links + sends * _round_trip(cluster, device, devices[other], value)
            links = links + receives * _round_trip(cluster, devices[other], device, value)
            crosses |= sends | receives
        memory = memory + in_flight * value.bytes * crosses
    saved = here @ np.array([block.saved_bytes for block in problem.blocks])
    limit = cluster.devices[device].memory_bytes
    keeps, repeats = memory + in_flight * saved <= limit, memory + saved <= limit
    if recompute == "auto":
        work = np.where(keeps, forward + backward, np.where(repeats, 2 * forward + backward, math.inf))
    elif recompute:
        work = np.where(repeats, 2 * forward + backward, math.inf)
    else:
        work = np.where(keeps, forward + backward, math.inf)
    return np.maximum(work, links) if overlap else work + links


def _round_trip(cluster: Cluster, source: int, target: int, value: Value) -> float:
    there = cluster.latency_s[source][target] + value.bytes / cluster.bytes_per_s[source][target]
    back = cluster.latency_s[target][source] + value.gradient_bytes / cluster.bytes_per_s[target][source]
    return there + (back if value.gradient_bytes else 0.0)


@st.composite
def clusters(draw: Any, num_devices: int) -> Cluster:
    alike = draw(st.booleans())
    roomy = draw(st.booleans())
    memories = st.just(10**6) if roomy else st.integers(20, 400)
    first = draw(memories)
    devices = tuple(
        Device(f"d{at}", memory_bytes=first if alike else draw(memories)) for at in range(num_devices)
    )
    rates, delays = st.sampled_from([1.0, 2.0, 5.0, 20.0]), st.sampled_from([0.0, 0.5, 2.0])
    rate, delay = draw(rates), draw(delays)

    def matrix(entries: Any, entry: float) -> Any:
        return tuple(
            tuple(entry if alike else draw(entries) for _ in range(num_devices)) for _ in range(num_devices)
        )

    return Cluster(devices, matrix(rates, rate), matrix(delays, delay))


@st.composite
def problems(draw: Any, num_devices: int, max_blocks: int = 9) -> Problem:
    num_blocks = draw(st.integers(max(2, num_devices), max_blocks))
    alike = draw(st.booleans())
    parameters = {
        f"w{at}": ParameterSize(draw(st.integers(0, 9)), draw(st.integers(0, 9)))
        for at in range(draw(st.integers(0, num_blocks)))
    }
    times = st.integers(0, 9).map(float)
    blocks = []
    for at in range(num_blocks):
        forward, backward = draw(times), draw(times)
        blocks.append(
            Block(
                f"b{at}",
                (f"op{at}",),
                tuple(forward if alike else draw(times) for _ in range(num_devices)),
                tuple(backward if alike else draw(times) for _ in range(num_devices)),
                tuple(sorted(draw(st.sets(st.sampled_from(sorted(parameters)), max_size=2))))
                if parameters
                else (),
                draw(st.integers(0, 15)),
                draw(st.integers(0, 5)),
            )
        )
    values = []
    for at in range(num_blocks - 1):
        for number in range(draw(st.integers(0, 2))):
            readers = draw(st.sets(st.integers(at + 1, num_blocks - 1), min_size=1, max_size=3))
            gradient = draw(st.sampled_from([0, 1, 4]))
            names = tuple(f"b{reader}" for reader in sorted(readers))
            values.append(Value(f"v{at}_{number}", f"b{at}", names, draw(st.integers(0, 8)), gradient))
    return Problem(tuple(blocks), tuple(values), parameters)


@st.composite
def cases(draw: Any, max_blocks: int = 9) -> tuple[Problem, Cluster, int]:
    num_devices = draw(st.integers(1, 4))
    num_stages = draw(st.integers(1, num_devices))
    return draw(problems(num_devices, max_blocks)), draw(clusters(num_devices)), num_stages


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(case=cases(), overlap=st.booleans(), recompute=st.sampled_from([False, True, "auto"]))
def test_plan_is_as_fast_as_the_best_of_all_assignments(case: Any, overlap: bool, recompute: Any) -> None:
    problem, cluster, num_stages = case
    memory_model = MemoryModel(weight_versions=2, gradient_copies=1, optimizer_copies=1)
    best = brute_force(problem, cluster, num_stages, copies=4, overlap=overlap, recompute=recompute)

    def plan() -> Plan:
        return partition(
            problem,
            cluster,
            num_stages=num_stages,
            memory_model=memory_model,
            overlap=overlap,
            recompute=recompute,
        )

    if best is None:
        with pytest.raises(InfeasibleError):
            plan()
        return
    found = plan()
    assert found.bottleneck_s == pytest.approx(best, rel=1.01e-4)
    assert found.bound_s <= best * (1 + 1e-12)
    assert found.gap <= 1.01e-4
    assert found.bottleneck_s == pytest.approx(max(stage.load_s for stage in found.stages), rel=1e-9)
    assert all(stage.memory.total_bytes <= stage.memory_limit_bytes for stage in found.stages)
    assert sorted(name for stage in found.stages for name in stage.operators) == sorted(
        name for block in problem.blocks for name in block.operators
    )
