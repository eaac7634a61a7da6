"""The planner against an exhaustive search, on small problems that are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pd2bw_fx.cluster import Cluster
from pd2bw_fx.costs import Kept, MemoryModel
from pd2bw_fx.device import Device
from pd2bw_fx.errors import InfeasibleError
from pd2bw_fx.passes.partition import baselines, partition
from pd2bw_fx.passes.partition.search import search, search_state
from pd2bw_fx.plan import Plan
from pd2bw_fx.problem import Block, ParameterSize, Problem, Value
from tests.brute_force import brute_force


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


def keepings_of(num_stages: int) -> Any:
    """What 2BW keeps (two versions everywhere, as many in flight as stages from there on), and anything."""
    of_2bw = tuple(Kept(2, num_stages - stage) for stage in range(num_stages))
    of_a_stage = st.one_of(
        st.builds(Kept, st.integers(1, 3), st.integers(1, 4)),
        st.builds(Kept, st.integers(1, 3), st.integers(1, 4), flushes=st.just(True)),
        st.builds(Kept, st.integers(1, 3), st.integers(2, 4), st.just(True), flushes=st.booleans()),
        st.builds(Kept, st.integers(1, 3), st.integers(1, 4), st.just(True), st.just(True)),
    )
    return st.one_of(st.just(of_2bw), st.tuples(*[of_a_stage] * num_stages))


def with_momentum(problem: Problem, cluster: Cluster, kept: Sequence[Kept], **setting: Any) -> Plan:
    return partition(
        problem,
        cluster,
        num_stages=len(kept),
        memory_model=MemoryModel(optimizer_copies=1),
        kept=lambda _: tuple(kept),
        **setting,
    )


def is_handed_on(plan: Plan) -> bool:
    """A value is sent by a stage that did not make it, which the exhaustive search does not try."""
    return len({(t.value, t.source) for t in plan.transfers}) > len({t.value for t in plan.transfers})


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(case=cases(), data=st.data(), overlap=st.booleans(), recompute=st.sampled_from([False, True, "auto"]))
def test_plan_is_as_fast_as_the_best_of_all_assignments(
    case: Any, data: Any, overlap: bool, recompute: Any
) -> None:
    problem, cluster, num_stages = case
    kept = data.draw(keepings_of(num_stages))
    max_gap = data.draw(st.sampled_from([1e-4, 0.0]))
    best = brute_force(problem, cluster, kept, overlap=overlap, recompute=recompute)

    setting = {"overlap": overlap, "recompute": recompute, "max_gap": max_gap}
    if best is None:
        with pytest.raises(InfeasibleError):
            with_momentum(problem, cluster, kept, **setting)
        return
    with pytest.MonkeyPatch.context() as patch:
        # Without time for programs at first, other orders and least loads come before them.
        patch.setattr(search, "_FIRST_SHARE", data.draw(st.sampled_from([0.0, search._FIRST_SHARE])))
        found = with_momentum(problem, cluster, kept, **setting)
    assert found.bottleneck_s <= best * (1 + 1.01e-4)
    assert is_handed_on(found) or found.bottleneck_s == pytest.approx(best, rel=1.01e-4)
    assert found.bound_s <= best * (1 + 1e-12)
    assert found.gap <= max(max_gap, 3e-6) * 1.01
    assert found.bottleneck_s == pytest.approx(max(stage.load_s for stage in found.stages), rel=1e-9)
    assert all(stage.memory.total_bytes <= stage.memory_limit_bytes for stage in found.stages)
    assert sorted(name for stage in found.stages for name in stage.operators) == sorted(
        name for block in problem.blocks for name in block.operators
    )


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    case=cases(max_blocks=8),
    data=st.data(),
    overlap=st.booleans(),
    recompute=st.sampled_from([False, True, "auto"]),
)
def test_what_large_problems_are_refuted_by_is_right_on_small_ones(
    case: Any, data: Any, overlap: bool, recompute: Any
) -> None:
    problem, cluster, num_stages = case
    kept = data.draw(keepings_of(num_stages))
    best = brute_force(problem, cluster, kept, overlap=overlap, recompute=recompute)
    if best is None:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search_state, "_SMALL", 0)
        plan = with_momentum(problem, cluster, kept, overlap=overlap, recompute=recompute)
    assert plan.bottleneck_s <= best * (1 + 1.01e-4)
    assert is_handed_on(plan) or plan.bottleneck_s == pytest.approx(best, rel=1.01e-4)
    assert plan.bound_s <= best * (1 + 1e-12)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    case=cases(max_blocks=7),
    data=st.data(),
    never_s=st.sampled_from([1e12, 1e15, 1e18]),
    recompute=st.sampled_from([False, True]),
)
def test_a_time_or_a_link_that_means_never_loses_no_other_digits(
    case: Any, data: Any, never_s: float, recompute: bool
) -> None:
    problem, cluster, num_stages = case
    device = st.integers(0, len(cluster) - 1)
    blocks = list(problem.blocks)
    for at in data.draw(st.sets(st.integers(0, len(blocks) - 1), min_size=1, max_size=4)):
        # Thousandths: sums of whole numbers would lose less.
        forward_s = [(seconds + 1.1) / 1e3 for seconds in blocks[at].forward_s]
        forward_s[data.draw(device)] = never_s
        blocks[at] = replace(blocks[at], forward_s=tuple(forward_s))
    problem = replace(problem, blocks=tuple(blocks))
    rates = [list(row) for row in cluster.bytes_per_s]
    rates[data.draw(device)][data.draw(device)] = 1 / never_s
    cluster = replace(cluster, bytes_per_s=tuple(map(tuple, rates)))
    kept = tuple(Kept(2, num_stages - stage) for stage in range(num_stages))

    best = brute_force(problem, cluster, kept, overlap=False, recompute=recompute)
    if best is None:
        return
    found = with_momentum(problem, cluster, kept, recompute=recompute)

    assert found.bottleneck_s <= best * (1 + 1.01e-4)
    assert is_handed_on(found) or found.bottleneck_s == pytest.approx(best, rel=1.01e-4)
    assert found.bound_s <= best * (1 + 1e-12)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(case=cases(max_blocks=8), overlap=st.booleans())
def test_no_other_planner_is_better(case: Any, overlap: bool) -> None:
    problem, cluster, num_stages = case
    others = baselines(problem, cluster, num_stages=num_stages, overlap=overlap, recompute="auto")
    fitting = [other.bottleneck_s for other in others if other.fits]
    if not fitting:
        return
    plan = partition(problem, cluster, num_stages=num_stages, overlap=overlap, recompute="auto")
    assert plan.bottleneck_s <= min(fitting) * (1 + 1.01e-4)
