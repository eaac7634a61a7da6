"""Copies of single stages against every assignment and every way to share the devices out."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pd2bw_fx.cluster import Cluster, Device
from pd2bw_fx.costs import MemoryModel
from pd2bw_fx.errors import InfeasibleError, InputError
from pd2bw_fx.passes.partition import partition_replicated
from pd2bw_fx.problem import Block, ParameterSize, Problem, Value

PLAIN = MemoryModel(weight_versions=2, gradient_copies=1, optimizer_copies=0)


def by_hand(problem: Problem, num_devices: int, memory_bytes: int, m: int) -> float:
    """The least load of the busiest copy, on links of 2 bytes a second and no latency."""
    best = math.inf
    place = {block.name: at for at, block in enumerate(problem.blocks)}
    n = len(problem.blocks)
    for d in range(1, min(num_devices, n, m) + 1):
        for stage_of in itertools.product(range(d), repeat=n):
            if len(set(stage_of)) < d or any(
                stage_of[place[v.producer]] > stage_of[place[c]] for v in problem.values for c in v.consumers
            ):
                continue
            for r in itertools.product(range(1, num_devices + 1), repeat=d):
                if sum(r) <= num_devices:
                    loads = [_load(problem, stage_of, place, r, s, memory_bytes, m) for s in range(d)]
                    best = min(best, max(loads))
    return best


def _load(
    problem: Problem,
    stage_of: tuple[int, ...],
    place: dict[str, int],
    r: tuple[int, ...],
    s: int,
    memory_bytes: int,
    m: int,
) -> float:
    own = [block for block, stage in zip(problem.blocks, stage_of, strict=True) if stage == s]
    in_flight = math.ceil(sum(r[s:]) / r[s])
    links_s, held = 0.0, 0
    for value in problem.values:
        source = stage_of[place[value.producer]]
        targets = {stage_of[place[name]] for name in value.consumers} - {source}
        crossings = len(targets) if source == s else int(s in targets)
        links_s += crossings * (value.bytes + value.gradient_bytes) / 2
        held += in_flight * value.bytes * bool(crossings)
    weights = sum(problem.parameters[name].trainable_bytes for block in own for name in block.parameters)
    memory = 3 * weights + in_flight * sum(block.saved_bytes for block in own) + held
    if memory > memory_bytes:
        return math.inf
    work_s = sum(block.forward_s[0] + block.backward_s[0] for block in own)
    return (work_s + links_s) / r[s] + 2 * (r[s] - 1) * weights / (r[s] * 2 * m)


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
    return Problem(blocks, values, {f"w{v}": ParameterSize(draw(st.integers(0, 12))) for v in range(n)})


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_copies_are_shared_out_as_well_as_in_the_best_of_all_plans(data: Any) -> None:
    num_devices = data.draw(st.integers(1, 4))
    problem = data.draw(problems(num_devices))
    memory_bytes, m = data.draw(st.sampled_from([30, 60, 10**6])), data.draw(st.integers(1, 5))
    expected = by_hand(problem, num_devices, memory_bytes, m)
    cluster = Cluster.uniform(num_devices, memory_bytes=memory_bytes, bytes_per_s=2.0, latency_s=0.0)
    setting: dict[str, Any] = {"microbatches_per_update": m, "memory_model": PLAIN, "max_gap": 1e-6}
    if math.isinf(expected):
        with pytest.raises(InfeasibleError, match="no assignment fits"):
            partition_replicated(problem, cluster, **setting)
        return
    found = partition_replicated(problem, cluster, **setting)
    assert found.bottleneck_s == pytest.approx(expected, rel=3e-6)
    assert found.bound_s <= expected * (1 + 1e-9)
    assert sum(found.replicas) <= num_devices
    assert sorted(name for stage in found.stages for name in stage) == sorted(
        name for block in problem.blocks for name in block.operators
    )


def test_the_heavy_stage_gets_the_spare_devices() -> None:
    blocks = tuple(Block(f"b{v}", (f"b{v}",), (w,) * 4, (w,) * 4) for v, w in enumerate((3.0, 1.0)))
    problem = Problem(blocks, (Value("v", "b0", ("b1",), 0, 0),), {})
    cluster = Cluster.uniform(4, memory_bytes=10**6, bytes_per_s=1.0, latency_s=0.0)

    found = partition_replicated(problem, cluster, microbatches_per_update=4, num_stages=(2,))

    assert found.replicas == (3, 1)
    assert found.bottleneck_s == pytest.approx(2.0)


def test_unlike_devices_are_refused() -> None:
    cluster = Cluster(
        (Device("a", memory_bytes=9), Device("b", memory_bytes=8)), ((0, 1), (1, 0)), ((0, 0), (0, 0))
    )
    problem = Problem((Block("b", ("b",), (1.0, 1.0), (1.0, 1.0)),), (), {})
    with pytest.raises(InputError, match="devices and links that are alike"):
        partition_replicated(problem, cluster, microbatches_per_update=1)
