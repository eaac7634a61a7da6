"""Enumeration and integer program, which share nothing but the numbers, find the same."""

from __future__ import annotations

import math
import random
import time
from dataclasses import replace
from typing import Any

import pytest

from pd2bw_fx.passes.partition import placement
from pd2bw_fx.passes.partition.bounds import downsets
from pd2bw_fx.passes.partition.bounds.downsets import (
    DeviceKind,
    DownSets,
    OutOfTime,
    down_sets,
    has_few_down_sets,
)
from pd2bw_fx.passes.partition.bounds.relaxation import is_refuted
from pd2bw_fx.passes.partition.choices import Answer, Choices, Deadline
from pd2bw_fx.passes.partition.search import search, search_state
from pd2bw_fx.passes.partition.search.intervals import best_cut
from pd2bw_fx.passes.solver import Status
from pd2bw_fx.workload import Workload, workload_from_json
from tests.drawn_workloads import choices_of, drawn_workload


@pytest.mark.parametrize("seed", range(60))
def test_enumeration_finds_the_optimum_of_the_programs(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = drawn_workload(seed)
    by_programs = placement.plan_workload(workload)
    # No time at all for programs: all that is proven is proven by enumeration.
    monkeypatch.setattr(search, "_FIRST_SHARE_OF_WORKLOADS", 0.0)
    by_enumeration = placement.plan_workload(workload)
    assert by_enumeration.objective == pytest.approx(by_programs.objective, rel=1.1e-5)
    assert by_enumeration.gap <= 1e-5
    assert by_enumeration.bound <= by_programs.objective * (1 + 1e-9)


def test_each_order_of_the_devices_is_cut_however_little_time_programs_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workload = replace(drawn_workload(3), num_accelerators=3, num_cpus=1)
    seen_s: list[float] = []

    def slow_cut(*args: Any) -> Any:
        time.sleep(0.02)
        return best_cut(*args)

    monkeypatch.setattr(search_state, "best_cut", slow_cut)
    monkeypatch.setattr(search, "_FIRST_SHARE_OF_WORKLOADS", 1e-4)  # 6 ms
    monkeypatch.setattr(
        search_state.SearchState, "ask_least_loads", lambda state, gap: seen_s.extend(state.seen_s)
    )

    placement.plan_workload(workload)

    assert max(seen_s[:4]) < float("inf")  # a CPU in each of four places


@pytest.mark.parametrize("seed", range(20))
def test_no_order_of_the_devices_is_refuted_that_is_as_fast(seed: int) -> None:
    choices, _ = choices_of(drawn_workload(seed))
    sets = DownSets.of([DeviceKind(choices[0], 0, 1)], max_sets=10**5)
    assert sets is not None
    for choice in range(len(choices)):
        own = Choices(1, lambda _, choice=choice: choices[choice])  # type: ignore[misc]
        found = search.search(own, solver="highs", max_gap=1e-6, deadline=Deadline(30.0))
        assert found is None or not is_refuted(choices[choice], sets, found.bottleneck_s, Deadline(30.0))


def test_stages_that_must_have_a_node_each_have_more_to_pay() -> None:
    nodes = [{"id": at, "fpgaLatency": 1.0, "cpuLatency": 1.0, "size": 0.0} for at in range(3)]
    edges = [{"sourceId": at, "destId": at + 1, "cost": cost} for at, cost in enumerate([5.0, 0.0])]
    data = {"nodes": nodes, "edges": edges, "maxFPGAs": 3, "maxCPUs": 0, "maxSizePerFPGA": 1.0}
    instance = replace(choices_of(workload_from_json(data, name="row"))[0][0], may_be_empty=True)
    sets = DownSets.of([DeviceKind(instance, 0, 3)], max_sets=100)
    assert sets is not None

    assert not is_refuted(instance, sets, 2.0, Deadline(30.0))  # the first two nodes on one stage
    each_one = replace(instance, may_be_empty=False)
    assert is_refuted(each_one, sets, 5.9, Deadline(30.0))
    assert not is_refuted(each_one, sets, 6.0, Deadline(30.0))


def _down_sets(workload: Workload, max_sets: int) -> Any:
    choices, orders = choices_of(workload)
    return DownSets.of(placement._Enumeration(choices, orders).kinds(), max_sets=max_sets)


def test_too_many_down_sets_are_not_enumerated() -> None:
    nodes = [{"id": at, "fpgaLatency": 1, "cpuLatency": 1, "size": 0} for at in range(12)]
    data = {"nodes": nodes, "edges": [], "maxFPGAs": 2, "maxCPUs": 0, "maxSizePerFPGA": 1}
    workload = workload_from_json(data, name="")
    assert _down_sets(workload, 1000) is None
    assert len(_down_sets(workload, 2**12)) == 2**12


@pytest.mark.parametrize("seed", range(60))
def test_down_sets_are_told_to_be_too_many_exactly_where_they_are(seed: int) -> None:
    draw = random.Random(seed)
    n, density = draw.randint(0, 9), draw.choice((0.1, 0.2, 0.5))
    edges = [(u, v) for v in range(n) for u in range(v) if draw.random() < density]
    expected = {
        members for members in range(2**n) if all(members >> u & 1 or not members >> v & 1 for u, v in edges)
    }

    found = down_sets(n, edges, len(expected))

    assert found is not None
    assert len(found) == len(expected)
    assert set(found) == expected
    assert down_sets(n, edges, len(expected) - 1) is None
    assert has_few_down_sets(n, edges, len(expected))
    assert not has_few_down_sets(n, edges, len(expected) - 1)


def test_no_down_set_is_listed_where_they_are_too_many() -> None:
    """The cells of a recurrent network of 8 layers and 40 steps, which have C(48, 8) down-sets."""
    grid = [(at, at + 8) for at in range(312)] + [(at, at + 1) for at in range(320) if at % 8 < 7]
    no_time = Deadline(0.0)

    assert down_sets(320, grid, math.comb(48, 8) - 1, no_time) is None
    with pytest.raises(OutOfTime):
        down_sets(320, grid, math.comb(48, 8), no_time)


@pytest.mark.parametrize("pairs_at_once", [1, 10**6])
@pytest.mark.parametrize("seed", range(40))
def test_what_is_left_out_where_a_larger_set_is_no_worse_changes_no_answer(
    seed: int, pairs_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downsets, "_PAIRS_AT_ONCE", pairs_at_once)
    sets = _down_sets(drawn_workload(seed), 10**5)
    everything = _down_sets(drawn_workload(seed), 10**5)
    monkeypatch.setattr(everything._dominating, "of", lambda at: ())
    deadline = Deadline(30.0)
    low_s, high_s = 0.0, float(sum(table.work_s[-1] for table in sets.tables))

    while high_s - low_s > 1e-9 * high_s:
        middle_s = (low_s + high_s) / 2
        found = everything.chain_within(middle_s, deadline)
        assert (sets.chain_within(middle_s, deadline) is None) == (found is None)
        low_s, high_s = (middle_s, high_s) if found is None else (low_s, middle_s)


def test_a_cut_before_a_tensor_that_is_dearer_than_its_work_is_not_left_out() -> None:
    # a =1=> b =2.5=> c on two devices: 3 and 7 with b on the second, 5.5 and 7.5 with b on the first.
    nodes = [
        {"id": at, "fpgaLatency": work, "cpuLatency": 1.0, "size": 0.0} for at, work in enumerate([2, 1, 5])
    ]
    edges = [{"sourceId": at, "destId": at + 1, "cost": cost} for at, cost in enumerate([1.0, 2.5])]
    data = {"nodes": nodes, "edges": edges, "maxFPGAs": 2, "maxCPUs": 0, "maxSizePerFPGA": 1.0}
    sets = _down_sets(workload_from_json(data, name="row"), 100)

    found = sets.chain_within(7.0, Deadline(30.0))

    assert found is not None
    assert found.stage_of.tolist() == [0, 1, 1]


def test_enumeration_stops_at_the_deadline() -> None:
    with pytest.raises(OutOfTime):
        _down_sets(drawn_workload(3), 10**5).chain_within(1.0, Deadline(0.0))


def test_no_down_sets_are_made_after_the_deadline() -> None:
    choices, orders = choices_of(drawn_workload(3))
    with pytest.raises(OutOfTime):
        DownSets.of(placement._Enumeration(choices, orders).kinds(), max_sets=100, deadline=Deadline(0.0))


@pytest.mark.parametrize("count", range(20, 40))
def test_a_set_comes_behind_all_within_it_whatever_the_last_digits_of_their_sums(count: int) -> None:
    """Weights take bytes and no time: a set without them has as much work, and may add up to more."""
    draw = random.Random(count)
    times = [*(draw.uniform(1.0, 12.0) for _ in range(count)), 0.0, 0.0]
    nodes = [{"id": at, "fpgaLatency": s, "cpuLatency": s, "size": 1.0} for at, s in enumerate(times)]
    ends = [*((at, at + 1) for at in range(count - 1)), (count - 1, count), (count - 1, count + 1)]
    edges = [{"sourceId": u, "destId": v, "cost": 0.0} for u, v in ends]
    data = {"nodes": nodes, "edges": edges, "maxFPGAs": 2, "maxCPUs": 0, "maxSizePerFPGA": 25.0}

    sets = DownSets.of(
        [DeviceKind(choices_of(workload_from_json(data, name="row"))[0][0], 0, 2)], max_sets=1000
    )

    assert sets is not None
    for at, member in enumerate(sets.member):
        within = (sets.member <= member).all(axis=1)
        assert within[: at + 1].sum() == within.sum()


@pytest.mark.parametrize("seed", [1, 4])
@pytest.mark.parametrize("never_s", [1e12, 1e18, 1e30])
def test_a_time_that_means_never_changes_no_answer(seed: int, never_s: float) -> None:
    """Sums with it have no digits left for the others."""
    draw = random.Random(seed)
    nodes = [
        {"id": at, "fpgaLatency": draw.uniform(1, 2), "cpuLatency": draw.uniform(5, 10), "size": 1}
        for at in range(12)
    ]
    for node in draw.sample(nodes, 3):
        node["cpuLatency"] = 1e3
    never = [node | {"cpuLatency": never_s} if node["cpuLatency"] == 1e3 else node for node in nodes]
    edges = [{"sourceId": at, "destId": at + 1, "cost": 0.1} for at in range(11)]
    data = {"edges": edges, "maxFPGAs": 2, "maxCPUs": 1, "maxSizePerFPGA": 100}

    real = placement.plan_workload(workload_from_json(data | {"nodes": nodes}, name=""))
    found = placement.plan_workload(workload_from_json(data | {"nodes": never}, name=""))

    assert found.objective == pytest.approx(real.objective, rel=1e-5)
    assert found.bound == pytest.approx(real.objective, rel=1e-5)


def test_no_bound_is_looked_for_that_says_nothing() -> None:
    choices, _ = choices_of(drawn_workload(1))
    state = search_state.SearchState(choices, solver="highs", deadline=Deadline(30.0), report=None, kinds=())
    state.first_assignments()
    state.floor_s = 0.0
    asked_s: list[float] = []

    def knows_nothing(target_s: float, _: Deadline) -> Answer:
        asked_s.append(target_s)
        return Answer(Status.UNKNOWN)

    state.enumerate(knows_nothing, 1e-6)

    assert len(asked_s) < 30
    assert min(asked_s) > 0
