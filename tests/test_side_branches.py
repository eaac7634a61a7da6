"""Small branches: left out of a workload's down-sets, and placed afterwards."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from pd2bw_fx.passes.partition import placement
from pd2bw_fx.passes.partition.bounds.downsets import down_sets
from pd2bw_fx.passes.partition.bounds.side_branches import join_side_branches, moved_ahead
from pd2bw_fx.passes.partition.choices import Deadline
from pd2bw_fx.passes.partition.groups import groups_of
from pd2bw_fx.passes.partition.instance import evaluate
from pd2bw_fx.passes.partition.search import search
from pd2bw_fx.passes.partition.search.by_cuts import ByCuts
from pd2bw_fx.passes.partition.search.search_state import SearchState
from pd2bw_fx.passes.solver import Status
from pd2bw_fx.workload import Workload, WorkloadEdge, WorkloadNode
from tests.drawn_workloads import PROVEN_WITHIN_S
from tests.slow import slow


def fed(seed: int, *, num_cpus: int) -> Workload:
    """A row of six, into which trees of one to three nodes lead, some as large as a node of the row."""
    draw = random.Random(seed)
    nodes: list[WorkloadNode] = []
    edges: list[WorkloadEdge] = []

    def add(*reads: int, little: bool) -> int:
        at = len(nodes)
        time = draw.choice((0.0, 0.1, 0.3, 1.0)) if little else draw.choice((0.5, 1.0, 2.0))
        nodes.append(WorkloadNode(at, time, draw.choice((2, 5)) * time, draw.choice((0, 0, 1))))
        edges.extend(WorkloadEdge(read, at, cost[read]) for read in reads)
        cost.append(draw.choice((0.02, 0.1, 0.4)) if little else draw.choice((0.1, 0.5, 1.0)))
        return at

    cost: list[float] = []
    last = add(little=False)
    for _ in range(5):
        reads = [last]
        for _ in range(draw.randint(0, 2)):
            reads.append(add(*(add(little=True) for _ in range(draw.randint(0, 2))), little=True))
        if draw.random() < 0.3 and last > 0:
            reads.append(0)
        last = add(*reads, little=False)
    num_accelerators = draw.randint(2, 3)
    just_enough = math.ceil(sum(node.num_bytes for node in nodes) / num_accelerators)
    num_bytes = draw.choice((just_enough, 100))
    return Workload("fed", num_accelerators, num_cpus, num_bytes, tuple(nodes), tuple(edges))


def tables(num_layers: int, *, num_cpus: int = 0) -> Workload:
    """A row of layers, each with a table of two small nodes of its own."""
    nodes, edges = [WorkloadNode(0, 1.0, 10.0, 0.0)], []
    last = 0
    for _ in range(num_layers):
        table, seen, layer = range(len(nodes), len(nodes) + 3)
        nodes += [WorkloadNode(at, 0.03, 0.3, 0.0) for at in (table, seen)]
        nodes.append(WorkloadNode(layer, 1.0, 10.0, 0.0))
        edges += [WorkloadEdge(table, seen, 0.01), WorkloadEdge(seen, layer, 0.01)]
        edges.append(WorkloadEdge(last, layer, 0.5))
        last = layer
    return Workload("tables", 4, num_cpus, 1.0, tuple(nodes), tuple(edges))


@pytest.mark.parametrize("num_cpus", [0, 1, 2])
@pytest.mark.parametrize("seed", [*range(25), *slow(range(25, 40))])
def test_what_is_left_out_never_excludes_what_there_is(seed: int, num_cpus: int) -> None:
    workload = fed(seed, num_cpus=num_cpus)
    expected = placement.plan_workload(workload, time_limit_s=PROVEN_WITHIN_S)
    assert expected.gap <= 1e-5
    found = join_side_branches(workload, groups_of(workload), most_of_a_device=np.inf)
    orders = list(placement._device_orders(workload.num_accelerators, num_cpus))
    relaxed = placement._choices(workload, found.groups, orders, found.asked)

    status, *_ = placement._Enumeration(relaxed, orders)(expected.objective * (1 + 1e-9), Deadline(60.0))

    assert status is Status.FEASIBLE


@pytest.mark.parametrize("num_cpus", [0, 1])
@pytest.mark.parametrize("seed", [*range(12), *slow(range(12, 20))])
def test_with_little_left_out_the_optimum_is_that_of_all_placements(
    seed: int, num_cpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = fed(seed, num_cpus=num_cpus)
    expected = placement.plan_workload(workload, time_limit_s=PROVEN_WITHIN_S)

    # No time for programs, and more down-sets than few as long as nothing is left out.
    monkeypatch.setattr(search, "_FIRST_SHARE_OF_WORKLOADS", 0.0)
    all_groups = len(groups_of(workload).members)
    monkeypatch.setattr(
        placement, "_has_few_down_sets", lambda groups, few: len(groups.members) < all_groups - 1
    )
    monkeypatch.setattr(placement, "_SHARES_LEFT_OUT", (np.inf,))
    found = placement.plan_workload(workload, time_limit_s=PROVEN_WITHIN_S)

    assert found.objective == pytest.approx(expected.objective, rel=1.1e-5)
    assert found.gap <= 1e-5


def test_tables_of_layers_leave_as_many_down_sets_as_a_row_has() -> None:
    workload = tables(20)
    groups = groups_of(workload)
    assert down_sets(len(groups.members), groups.edges, 20_000) is None

    found = join_side_branches(workload, groups, most_of_a_device=0.15)

    assert len(down_sets(len(found.groups.members), found.groups.edges, 400_000) or []) == 22
    assert len(found.trees) == 40
    # Of each layer's tables the least is asked for: what comes from elsewhere.
    assert found.asked.accelerator_time.tolist() == pytest.approx([1.0, *[1.01] * 20])


@pytest.mark.parametrize("num_cpus", [0, 1])
def test_tables_are_on_earlier_devices_where_these_have_the_time(
    num_cpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes no program to prove it, nor the cuts near a target, as it does where nothing is left out."""
    monkeypatch.setattr(search, "_FIRST_SHARE_OF_WORKLOADS", 0.0)
    monkeypatch.setattr(SearchState, "ask_programs", lambda *_: None)
    monkeypatch.setattr(ByCuts, "__call__", lambda *_, **__: None)
    workload = tables(30, num_cpus=num_cpus)

    found = placement.plan_workload(workload, time_limit_s=PROVEN_WITHIN_S)

    assert found.gap <= 1e-5
    layers = {layer: found.assignment[layer] for layer in range(3, 91, 3)}
    assert any(found.assignment[layer - 1] != device for layer, device in layers.items())


def test_a_mask_that_takes_a_tenth_of_a_device_is_left_out_where_a_tenth_may_be() -> None:
    """A Swin's layers have masks of their own, each read by its layer alone, in which their tables end."""
    workload = tables(24)
    of_a_device = 24 / workload.num_accelerators
    first, second = 29, 53  # the second nodes of two layers' tables
    nodes = list(workload.nodes)
    for mask, share in ((first, 0.1), (second, 0.2)):
        nodes[mask] = replace(nodes[mask], accelerator_time=share * of_a_device)
    workload = replace(workload, nodes=tuple(nodes))

    trees = join_side_branches(workload, groups_of(workload), most_of_a_device=0.15).trees

    left_out = {node for tree in trees for node in tree}
    assert first in left_out
    assert second not in left_out
    assert placement.plan_workload(workload, time_limit_s=PROVEN_WITHIN_S).gap <= 1e-5


def test_no_larger_branches_are_left_out_than_few_down_sets_ask_for() -> None:
    workload = tables(24)
    nodes = list(workload.nodes)
    for mask in (29, 53):
        nodes[mask] = replace(nodes[mask], accelerator_time=0.12 * 24 / workload.num_accelerators)
    workload = replace(workload, nodes=tuple(nodes))

    relaxed = placement._relaxed_groups(workload, groups_of(workload), Deadline(60.0), with_cpus=False)

    assert relaxed is not None
    assert {2, 26} <= {node for tree in relaxed.trees for node in tree}
    assert not {29, 53} & {node for tree in relaxed.trees for node in tree}


def test_what_leads_to_a_row_alone_is_no_tree_nor_is_what_two_read_nor_what_is_much() -> None:
    nodes = tuple(
        WorkloadNode(at, time, 1.0, 0.0) for at, time in enumerate((0.01, 1.0, 0.01, 0.9, 1.0, 1.0))
    )
    edges = tuple(
        WorkloadEdge(source, target, 0.1)
        for source, target in ((0, 1), (1, 4), (2, 4), (2, 5), (3, 5), (4, 5))
    )
    workload = Workload("row", 2, 0, 1.0, nodes, edges)

    found = join_side_branches(workload, groups_of(workload), most_of_a_device=0.15)

    assert found.trees == ()
    assert found.groups == groups_of(workload)


def test_moved_ahead_is_what_the_target_asks_for_and_the_other_device_has_time_for() -> None:
    """Two layers and three, and their tables: a whole table ahead would be too much, half of one is not."""
    workload = tables(5)
    groups = groups_of(workload)
    trees = join_side_branches(workload, groups, most_of_a_device=0.15).trees
    instance = placement._choices(workload, groups, [(False,) * 2])[0]
    stage_of = np.array([0] * 7 + [1] * 9)
    assert evaluate(instance, stage_of).load_s.tolist() == pytest.approx([3.62, 3.68])

    moved = moved_ahead(instance, stage_of, trees, 3.67)

    assert np.flatnonzero(moved != stage_of).tolist() == [7]
    assert evaluate(instance, moved).load_s.tolist() == pytest.approx([3.66, 3.66])
    assert moved_ahead(instance, stage_of, trees, 3.685).tolist() == stage_of.tolist()
    assert evaluate(instance, moved_ahead(instance, stage_of, trees, 3.65)).load_s.max() > 3.65


def test_what_the_nearest_device_has_no_time_for_is_on_one_before() -> None:
    workload = tables(5)
    nodes = list(workload.nodes)
    nodes[6] = replace(nodes[6], accelerator_time=1.5)
    workload = replace(workload, nodes=tuple(nodes))
    groups = groups_of(workload)
    trees = join_side_branches(workload, groups, most_of_a_device=0.15).trees
    instance = placement._choices(workload, groups, [(False,) * 3])[0]
    stage_of = np.array([0] + [1] * 6 + [2] * 9)
    assert evaluate(instance, stage_of).load_s.tolist() == pytest.approx([1.5, 3.62, 3.68])

    moved = moved_ahead(instance, stage_of, trees, 3.64)

    assert np.flatnonzero(moved != stage_of).tolist() == [7, 8]
    assert moved[7] == moved[8] == 0
