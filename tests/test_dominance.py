"""Groups that share a device with another one: no placement is faster for their being apart."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from pd2bw_fx.passes.partition import placement
from pd2bw_fx.passes.partition.bounds.dominance import join_dominated, join_dominated_pairs
from pd2bw_fx.passes.partition.bounds.downsets import down_sets
from pd2bw_fx.passes.partition.choices import Deadline
from pd2bw_fx.passes.partition.groups import groups_of
from pd2bw_fx.passes.partition.search import search
from pd2bw_fx.passes.solver import Status
from pd2bw_fx.workload import Workload, WorkloadEdge, WorkloadNode
from tests.slow import slow


def branchy(seed: int, *, num_cpus: int) -> Workload:
    """Ten nodes, each of which reads one to three; many of them take less time than their tensors."""
    draw = random.Random(seed)
    nodes = tuple(
        WorkloadNode(
            at, draw.choice((0.0, 0.5, 1.0, 4.0)), draw.choice((0.0, 1.0, 6.0)), draw.choice((0, 0, 1))
        )
        for at in range(10)
    )
    cost = [draw.choice((0.1, 0.6, 1.0, 2.0)) for _ in nodes]
    edges = tuple(
        WorkloadEdge(source, target, cost[source])
        for target in range(1, len(nodes))
        for source in draw.sample(range(target), min(target, draw.randint(1, 3)))
    )
    return Workload("branchy", draw.randint(2, 3), num_cpus, draw.choice((3.0, 100.0)), nodes, edges)


def attention(num_layers: int) -> Workload:
    """A decoder's layers, each of which makes two operands of what the first node gives; they take little."""
    nodes, edges = [WorkloadNode(0, 1.0, 10.0, 0.0)], []
    hidden = 0
    for _ in range(num_layers):
        key, value, query, out = range(len(nodes), len(nodes) + 4)
        nodes += [WorkloadNode(at, time, 10 * time, 0.0) for at, time in ((key, 0.2), (value, 0.2))]
        nodes += [WorkloadNode(at, 1.0, 10.0, 0.0) for at in (query, out)]
        edges += [WorkloadEdge(0, key, 0.5), WorkloadEdge(0, value, 0.5), WorkloadEdge(hidden, query, 0.5)]
        edges += [WorkloadEdge(read, out, 0.5) for read in (key, value, query)]
        hidden = out
    return Workload("attention", 4, 1, 1.0, tuple(nodes), tuple(edges))


@pytest.mark.parametrize("num_cpus", [0, 1, 2])
@pytest.mark.parametrize("seed", [*range(25), *slow(range(25, 40))])
def test_joined_by_dominance_the_optimum_is_that_of_all_placements(
    seed: int, num_cpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = branchy(seed, num_cpus=num_cpus)
    expected = placement.plan_workload(workload)  # nothing is joined: there are few down-sets
    assert expected.gap <= 1e-5

    # No time for programs, and every workload has too many down-sets: the proof is over joined groups.
    monkeypatch.setattr(search, "_FIRST_SHARE_OF_WORKLOADS", 0.0)
    monkeypatch.setattr(placement, "_FEW_DOWN_SETS", 0)
    monkeypatch.setattr(placement, "_SHARES_BESIDE", (0,))
    found = placement.plan_workload(workload)

    assert found.objective == pytest.approx(expected.objective, rel=1.1e-5)
    assert found.gap <= 1e-5
    assert found.bound <= expected.objective * (1 + 1e-9)


@pytest.mark.parametrize("num_cpus", [1, 2])
@pytest.mark.parametrize("seed", [*range(25), *slow(range(25, 40))])
def test_joined_groups_never_exclude_a_placement_with_cpus(seed: int, num_cpus: int) -> None:
    workload = branchy(seed, num_cpus=num_cpus)
    objective = placement.plan_workload(workload).objective
    joined = join_dominated(workload, groups_of(workload), Deadline(60.0))
    orders = list(placement._device_orders(workload.num_accelerators, num_cpus))
    relaxed = placement._choices(workload, joined.groups, orders, joined.asked)

    status, *_ = placement._Enumeration(relaxed, orders)(objective * (1 + 1e-9), Deadline(60.0))

    assert status is Status.FEASIBLE


def test_operands_go_with_the_layer_that_reads_them() -> None:
    workload = attention(num_layers=12)
    groups = join_dominated_pairs(workload, groups_of(workload), with_cpus=False)
    assert down_sets(len(groups.members), groups.edges, 100_000) is None

    joined = join_dominated(workload, groups, Deadline(60.0))

    assert len(joined.groups.members) == 1 + 2 * 12  # a layer's query may be elsewhere than the rest of it
    assert len(down_sets(25, joined.groups.edges, 100_000) or []) == 26
    found = placement.plan_workload(replace(workload, num_cpus=0))
    assert found.gap <= 1e-5
    for layer in range(12):
        key, value, _, out = range(1 + 4 * layer, 5 + 4 * layer)
        assert found.assignment[key] == found.assignment[value] == found.assignment[out]


def test_what_is_not_joined_when_the_time_is_up_stays_apart() -> None:
    workload = attention(num_layers=12)
    groups = groups_of(workload)

    joined_in_pairs = join_dominated_pairs(workload, groups, with_cpus=False)

    assert join_dominated(workload, groups, Deadline(0.0)).groups == joined_in_pairs


def test_only_what_many_are_beside_goes_with_another_where_that_is_asked_for() -> None:
    workload = attention(num_layers=12)
    groups = groups_of(workload)

    few = join_dominated(workload, groups, Deadline(60.0), min_beside=40)

    assert len(join_dominated(workload, groups, Deadline(60.0)).groups.members) == 25
    assert 25 < len(few.groups.members) < len(groups.members)


def test_a_cpu_is_asked_for_every_node_that_could_lead_the_group() -> None:
    """Two nodes in a row with a large tensor between them: either would have the other one beside it."""
    nodes = tuple(WorkloadNode(at, 1.0, 7.0 + at, 0.0) for at in range(2))
    pair = Workload("pair", 2, 1, 1.0, nodes, (WorkloadEdge(0, 1, 3.0),))

    assert join_dominated(pair, groups_of(pair), Deadline(60.0)).asked.cpu_time.tolist() == [15.0]
    two_cpus = replace(pair, num_cpus=2)
    assert join_dominated(two_cpus, groups_of(pair), Deadline(60.0)).asked.cpu_time.tolist() == [8.0]


def test_nothing_goes_with_a_node_that_others_may_have_to_be_between() -> None:
    """0 -> 1 -> 2 and 0 -> 2: with 0 and 2 together, 1 has to be with them."""
    nodes = (WorkloadNode(0, 1.0, 1.0, 0.0), WorkloadNode(1, 9.0, 9.0, 0.0), WorkloadNode(2, 1.0, 1.0, 0.0))
    edges = (WorkloadEdge(0, 1, 0.5), WorkloadEdge(0, 2, 0.5), WorkloadEdge(1, 2, 0.1))
    workload = Workload("between", 2, 0, 1.0, nodes, edges)

    assert len(join_dominated(workload, groups_of(workload), Deadline(60.0)).groups.members) == 3
