"""Listing the cuts near a target finds what going through all assignments finds, and leaves nothing out."""

from __future__ import annotations

import functools
import itertools
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pd2bw_fx.passes.partition import placement
from pd2bw_fx.passes.partition.bounds.charges import charges_within
from pd2bw_fx.passes.partition.bounds.closures import Closures, Potential
from pd2bw_fx.passes.partition.bounds.cut_graph import CutGraph
from pd2bw_fx.passes.partition.bounds.downsets import DeviceKind, DownSets
from pd2bw_fx.passes.partition.bounds.near_cuts import Listed, NearCuts
from pd2bw_fx.passes.partition.bounds.windows import Reach
from pd2bw_fx.passes.partition.choices import Deadline
from pd2bw_fx.passes.partition.instance import Instance, Net, evaluate, respects_edges
from pd2bw_fx.passes.partition.search import search
from pd2bw_fx.passes.partition.search.search_state import SearchState
from pd2bw_fx.workload import Workload, workload_from_json
from tests.drawn_workloads import PROVEN_WITHIN_S, choices_of


@functools.cache
def drawn(seed: int) -> Instance:
    """Up to seven nodes on up to four devices. Some tensors have no end that comes before or behind all."""
    draw = random.Random(seed)
    count, num_devices = draw.randint(3, 7), draw.randint(2, 4)
    nodes = [
        {
            "id": at,
            "fpgaLatency": draw.choice([0, 1, 3 * draw.random()]),
            "cpuLatency": 0,
            "size": draw.randint(0, 5),
        }
        for at in range(count)
    ]
    edges = [
        {"sourceId": source, "destId": reader, "cost": cost}
        for source in range(count - 1)
        for cost in [draw.choice([0.1, 1, 3]) * draw.random()]
        for reader in draw.sample(range(source + 1, count), min(count - 1 - source, draw.randint(0, 3)))
    ]
    tight = sum(node["size"] for node in nodes) * 1.3 / num_devices + 3
    data = {"nodes": nodes, "edges": edges, "maxFPGAs": num_devices, "maxCPUs": 0}
    limit = draw.choice([1000.0, tight])
    choices, _ = choices_of(workload_from_json(data | {"maxSizePerFPGA": limit}, name=""))
    beside = [Net(*_ends(draw.sample(range(count), 3))) for _ in range(draw.randint(0, 2))]
    costs = np.full((len(beside), num_devices, num_devices), draw.random())
    instance = replace(choices[0], num_stages=num_devices)
    return replace(instance, nets=(*instance.nets, *beside), cost_s=np.concatenate((instance.cost_s, costs)))


def _ends(nodes: list[int]) -> tuple[int, tuple[int, ...]]:
    first, *others = sorted(nodes)
    return first, tuple(others)


@functools.cache
def in_order(seed: int) -> list[Any]:
    """All assignments that respect the edges."""
    instance = drawn(seed)
    every = itertools.product(range(instance.num_stages), repeat=instance.num_nodes)
    return [stage_of for stage_of in map(np.array, every) if respects_edges(instance, stage_of)]


@functools.cache
def fastest(seed: int) -> tuple[float, list[Any]]:
    """The least bottleneck of all assignments, and every assignment that has it."""
    best_s, found = np.inf, []
    for stage_of in in_order(seed):
        loads = evaluate(drawn(seed), stage_of)
        if loads.fits and loads.bottleneck_s <= best_s * (1 + 1e-12):
            found = [*(found if loads.bottleneck_s >= best_s * (1 - 1e-12) else []), stage_of]
            best_s = min(best_s, loads.bottleneck_s)
    return best_s, found


def ask(instance: Instance, target_s: float) -> tuple[Listed | None, Any]:
    kind = DeviceKind(instance, 0, instance.num_stages)
    graph = CutGraph(kind, Reach(instance.num_nodes, instance.edges))
    listed = NearCuts(graph, instance.num_stages, target_s).listed(10**5, Deadline(30.0))
    sets = None if listed is None else DownSets([kind], listed.member)
    return listed, None if sets is None else sets.chain_within(target_s, Deadline(30.0))


@pytest.mark.parametrize("seed", range(12))
def test_the_cuts_of_all_fastest_assignments_are_listed_and_no_faster_one_is_found(seed: int) -> None:
    instance = drawn(seed)
    best_s, assignments = fastest(seed)
    if not 0 < best_s < np.inf:
        return

    for target_s in (best_s * (1 + 1e-9), 1.2 * best_s):
        listed, chain = ask(instance, target_s)
        assert listed is not None
        assert listed.are_all
        assert evaluate(instance, chain.stage_of).bottleneck_s >= best_s * (1 - 1e-12)
        rows = {row.tobytes() for row in listed.member}
        for stage_of in assignments:
            assert all((stage_of < stage).tobytes() in rows for stage in range(1, instance.num_stages))
    assert evaluate(instance, ask(instance, best_s * (1 + 1e-9))[1].stage_of).bottleneck_s == pytest.approx(
        best_s
    )
    assert ask(instance, best_s * (1 - 1e-6))[1] is None


@pytest.mark.parametrize("seed", range(8))
def test_one_half_has_the_cuts_of_each_fastest_assignment_and_none_is_left_below(seed: int) -> None:
    instance = drawn(seed)
    best_s, assignments = fastest(seed)
    if not 0 < best_s < np.inf:
        return
    kind = DeviceKind(instance, 0, instance.num_stages)
    graph = CutGraph(kind, Reach(instance.num_nodes, instance.edges))
    stages = range(1, instance.num_stages)

    def leaves(target_s: float) -> list[NearCuts]:
        found, left = [], [NearCuts(graph, instance.num_stages, target_s)]
        while left:
            cuts = left.pop()
            if not cuts.is_refuted(Deadline(30.0)):
                found += [] if cuts.num_open > 7 else [cuts]
                left += cuts.halves() if cuts.num_open > 7 else []
        return found

    listed = [leaf.listed(10**5, Deadline(30.0)) for leaf in leaves(best_s * (1 + 1e-9))]
    sets = [{row.tobytes() for row in leaf.member} for leaf in listed if leaf is not None]
    for stage_of in assignments:
        assert any(all((stage_of < stage).tobytes() in rows for stage in stages) for rows in sets)
    for leaf in leaves(best_s * (1 - 1e-6)):
        few = leaf.listed(10**5, Deadline(30.0))
        if few is not None:
            assert DownSets([kind], few.member).chain_within(best_s * (1 - 1e-6), Deadline(30.0)) is None


def sets_of(graph: CutGraph, stage_of: Any, num_stages: int) -> Any:
    """The down-sets D[0] .. D[k] of an assignment, with the nodes that the graph has for tensors."""
    can, must = (
        np.ones((num_stages + 1, graph.size), dtype=bool),
        np.zeros((num_stages + 1, graph.size), dtype=bool),
    )
    can[:, graph.node] = must[:, graph.node] = stage_of < np.arange(num_stages + 1)[:, None]
    graph.close(can, must)
    return must


@pytest.mark.parametrize("seed", range(12))
def test_no_assignment_pays_less_than_it_is_charged(seed: int) -> None:
    instance, draw = drawn(seed), np.random.default_rng(seed)
    k = instance.num_stages
    graph = CutGraph(DeviceKind(instance, 0, k), Reach(instance.num_nodes, instance.edges))
    assignments = in_order(seed)
    one = sets_of(graph, assignments[draw.integers(len(assignments))], k)

    for share in (0.5, 1.0):  # of the nodes that are before a cut or behind it as in one of the assignments
        is_known = draw.random(one.shape) < share
        is_known[[0, k]] = True
        can, must = ~is_known | one, is_known & one
        charges = charges_within(graph, can, must, [[]] * k, 2 * graph.total_s, 30.0)
        for stage_of in assignments:
            sets = sets_of(graph, stage_of, k)
            if (sets & ~can).any() or (must & ~sets).any():
                continue
            paid_s = np.zeros(k)
            for net, cost_s in zip(graph.nets, graph.cost_s, strict=True):
                devices = sorted(set(stage_of[net].tolist()))
                paid_s[devices if len(devices) > 1 else []] += cost_s
            charged_s = (charges.in_all * sets).sum(axis=1)
            assert charged_s.sum() <= paid_s.sum() + 1e-9
            for j in range(1, k):
                assert charged_s[:j].sum() + charges.before[j] @ sets[j] <= paid_s[:j].sum() + 1e-9
                assert charged_s[j + 1 :].sum() + charges.behind[j] @ sets[j] <= paid_s[j:].sum() + 1e-9
            if share == 1.0:
                assert charged_s.sum() == pytest.approx(paid_s.sum(), rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("length", [1, 3, 63, 64, 65, 130])
def test_the_closures_of_two_rows_are_all_listed_however_many_words_their_nodes_fill(length: int) -> None:
    """Two rows side by side, of which the second is one node: a prefix of the first, with and without it."""
    arcs = np.array([(at, at + 1) for at in range(length - 1)], dtype=np.int64).reshape(-1, 2)
    nodes, free = length + 1, np.zeros(length + 1)
    anything = Potential(0.0, 0.0, free, free, np.zeros(len(arcs)))
    closures = Closures(nodes, arcs, np.zeros(nodes, dtype=bool), [])
    count = 2 * (length + 1)

    found, are_all = closures.within([anything], count, Deadline(30.0), or_the_best=False)

    expected = {(*(at < size for at in range(length)), other) for size in range(nodes) for other in (0, 1)}
    assert are_all
    assert len(found) == count
    assert {tuple(taken) for taken in found.tolist()} == expected
    # At one for each node taken and a room of one: nothing, and the first node of either row.
    dear = Potential(0.0, 1.0, np.ones(nodes), free, np.zeros(len(arcs)))
    few, _ = closures.within([dear], count, Deadline(30.0), or_the_best=False)
    assert sorted(few.sum(axis=1).tolist()) == [0, 1, 1]


def grid(rows: int, columns: int) -> Workload:
    """Cells that each read the one above and the one before."""
    draw = random.Random(0)
    nodes = [
        {"id": at, "fpgaLatency": draw.uniform(1, 3), "cpuLatency": 0, "size": 0}
        for at in range(rows * columns)
    ]
    cost = [draw.uniform(0.1, 0.3) for _ in nodes]
    ends = [(at, at + 1) for at in range(len(nodes)) if (at + 1) % columns]
    ends += [(at, at + columns) for at in range(len(nodes) - columns)]
    edges = [{"sourceId": u, "destId": v, "cost": cost[u]} for u, v in ends]
    data = {"nodes": nodes, "edges": edges, "maxFPGAs": 3, "maxCPUs": 0, "maxSizePerFPGA": 1}
    return workload_from_json(data, name="grid")


def test_a_grid_is_proven_by_its_near_cuts_as_by_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    by_all = placement.plan_workload(grid(4, 8))
    assert by_all.gap <= 1e-5

    monkeypatch.setattr(search, "_FIRST_SHARE_OF_WORKLOADS", 0.0)
    monkeypatch.setattr(placement, "_FEW_DOWN_SETS", 10)
    monkeypatch.setattr(placement, "_MAX_DOWN_SETS", 10)
    for step in ("ask_programs", "shuffle"):
        monkeypatch.setattr(SearchState, step, lambda *_, **__: None)
    by_near = placement.plan_workload(grid(4, 8), time_limit_s=PROVEN_WITHIN_S)

    assert by_near.gap <= 1e-5
    assert by_near.objective == pytest.approx(by_all.objective, rel=1e-5)
    assert by_near.bound <= by_all.objective
