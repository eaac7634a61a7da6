"""The bound from single nodes, and the orders that bring an assignment down to it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from pd2bw_fx.cluster import Cluster
from pd2bw_fx.passes.partition import partition, placement
from pd2bw_fx.passes.partition.bounds.downsets import DeviceKind
from pd2bw_fx.passes.partition.bounds.least_load import LeastLoads
from pd2bw_fx.passes.partition.bounds.windows import Reach
from pd2bw_fx.passes.partition.choices import Deadline
from pd2bw_fx.passes.partition.instance import Instance, evaluate, respects_edges
from pd2bw_fx.passes.partition.memory_kept import kept_by
from pd2bw_fx.passes.partition.search.intervals import best_cut
from pd2bw_fx.passes.partition.search.orders import Shuffler, topological_orders
from pd2bw_fx.passes.partition.search.search_state import SearchState
from pd2bw_fx.problem import Block, Problem, Value
from pd2bw_fx.workload import Workload, workload_from_json
from tests.brute_force import brute_force
from tests.drawn_workloads import choices_of, drawn_workload


def kinds_of(workload: Workload) -> tuple[DeviceKind, ...]:
    choices, orders = choices_of(workload)
    return tuple(placement._Enumeration(choices, orders).kinds())


def least_by_hand(kind: DeviceKind) -> np.ndarray:
    """Returns each node's least load of a stage that holds it, and every node between two that it holds."""
    instance, stage = kind.instance, kind.stage
    n = instance.num_nodes
    cost_s = instance.cost_s[:, stage, 1 if stage == 0 else 0]
    before = np.zeros((n, n), dtype=bool)
    for u, v in sorted(instance.edges, key=lambda edge: edge[1]):  # nodes are in topological order
        before[v] |= before[u]
        before[v, u] = True
    least = np.full(n, np.inf)
    for flags in itertools.product([False, True], repeat=n):
        held = np.array(flags)
        is_whole = not (before[:, held].any(axis=1) & before[held].any(axis=0) & ~held).any()
        if not is_whole or (instance.forbidden is not None and instance.forbidden[stage][held].any()):
            continue
        load_s = instance.work_s[stage][held].sum()
        for net, price in zip(instance.nets, cost_s, strict=True):
            parts = held[list(net.members)]
            load_s += price if parts.any() and not parts.all() else 0.0
        least[held] = np.minimum(least[held], load_s)
    return least


@pytest.mark.parametrize("seed", [seed for seed in range(60) if len(drawn_workload(seed).nodes) <= 8])
def test_bound_is_at_most_what_any_stage_of_the_node_has_to_do(seed: int) -> None:
    workload = drawn_workload(seed)
    kinds = kinds_of(workload)
    if kinds[0].instance.num_stages == 1:
        return
    floor_s = float(np.min([least_by_hand(kind) for kind in kinds], axis=0).max())
    least_loads = LeastLoads(kinds, Reach(kinds[0].instance.num_nodes, kinds[0].instance.edges))
    for target_s in (0.6 * floor_s, floor_s, 1.2 * floor_s, 3.0 * floor_s):
        if 0 < target_s < np.inf:
            assert least_loads.floor_s(target_s, Deadline(30.0)) <= min(target_s, floor_s) * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(40))
def test_bound_is_at_most_the_optimum(seed: int) -> None:
    workload = drawn_workload(seed)
    optimum = placement.plan_workload(workload).objective
    kinds = kinds_of(workload)
    least_loads = LeastLoads(kinds, Reach(kinds[0].instance.num_nodes, kinds[0].instance.edges))
    for target_s in (optimum, 1.1 * optimum, 2.0 * optimum):
        assert least_loads.floor_s(target_s, Deadline(30.0)) <= optimum * (1 + 1e-5)


def row(work_s: list[float], cost_s: list[float], num_stages: int) -> Instance:
    """Nodes one after another on devices that are alike."""
    nodes = [{"id": at, "fpgaLatency": s, "cpuLatency": s, "size": 0.0} for at, s in enumerate(work_s)]
    edges = [{"sourceId": at, "destId": at + 1, "cost": cost} for at, cost in enumerate(cost_s)]
    data = {"nodes": nodes, "edges": edges, "maxFPGAs": num_stages, "maxCPUs": 0, "maxSizePerFPGA": 1.0}
    choices, _ = choices_of(workload_from_json(data, name="row"))
    return choices[0]


def test_a_node_between_dear_tensors_drags_its_neighbours_along_or_pays_for_them() -> None:
    def floor_s(cost_s: list[float], target_s: float) -> float:
        instance = row([1.0, 1.0, 5.0, 1.0, 1.0], cost_s, 5)
        least_loads = LeastLoads([DeviceKind(instance, 0, 5)], Reach(5, instance.edges))
        return least_loads.floor_s(target_s, Deadline(30.0))

    assert floor_s([9.0, 0.25, 0.25, 9.0], 8.0) == pytest.approx(5.5)  # alone, with both tensors
    assert floor_s([9.0, 9.0, 9.0, 9.0], 10.0) == pytest.approx(9.0)  # with all the others
    assert floor_s([0.5, 9.0, 0.25, 9.0], 8.0) == pytest.approx(6.75)  # with the one before
    assert floor_s([9.0, 9.0, 9.0, 9.0], 7.0) == pytest.approx(7.0)  # told as the target


@pytest.mark.parametrize("seed", range(40))
def test_a_bound_that_is_known_leaves_out_only_what_does_not_exceed_it(seed: int) -> None:
    kinds = kinds_of(drawn_workload(seed))
    reach = Reach(kinds[0].instance.num_nodes, kinds[0].instance.edges)
    largest_s = max(float(kind.instance.work_s[kind.stage].max()) for kind in kinds)
    for target_s in (1.1 * largest_s, 2.0 * largest_s, 4.0 * largest_s):
        if not 0 < target_s < np.inf:
            continue
        floor_s = LeastLoads(kinds, reach).floor_s(target_s, Deadline(30.0))
        for known_s in (0.5 * target_s, 0.999 * floor_s, floor_s, 0.9 * target_s):
            found_s = LeastLoads(kinds, reach).floor_s(target_s, Deadline(30.0), known_s=known_s)
            assert max(found_s, known_s) == pytest.approx(max(floor_s, known_s), rel=1e-9)


def test_a_block_between_dear_values_proves_a_plan_before_anything_else_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work_s, dear, cheap = (1.0, 1.0, 1.0, 5.0, 1.0, 1.0, 1.0), 3000, 100
    blocks = tuple(Block(f"b{at}", (), (s,) * 4, (0.0,) * 4) for at, s in enumerate(work_s))
    values = tuple(
        Value(f"v{at}", f"b{at}", (f"b{at + 1}",), dear if at in (2, 3) else cheap) for at in range(6)
    )
    problem = Problem(blocks, values, {})
    cluster = Cluster.uniform(4, memory_bytes=2**30, bytes_per_s=1e3, latency_s=0.0)
    optimum = brute_force(problem, cluster, kept_by("2bw", 4, 8), overlap=False, recompute=False)
    for step in ("ask_programs", "ask_relaxed_bound", "shuffle"):
        monkeypatch.setattr(SearchState, step, lambda state, gap, **_: assert_proven(state, gap))

    plan = partition(problem, cluster)

    assert optimum == pytest.approx(7.2)
    assert plan.bottleneck_s == pytest.approx(optimum)
    assert plan.gap <= 1e-4


def assert_proven(state: SearchState, gap: float) -> None:
    assert state.is_proven(gap)


def test_what_is_too_far_away_for_one_stage_does_not_save_a_transfer() -> None:
    # Node 0 has a dear tensor that nodes 1 and 5 read. On one stage with 5 it takes all between them along.
    nodes = [{"id": at, "fpgaLatency": 2.0, "cpuLatency": 2.0, "size": 0.0} for at in range(6)]
    edges = [{"sourceId": at, "destId": at + 1, "cost": 6.0 if at == 0 else 0.5} for at in range(5)]
    edges.append({"sourceId": 0, "destId": 5, "cost": 6.0})
    data = {"nodes": nodes, "edges": edges, "maxFPGAs": 3, "maxCPUs": 0, "maxSizePerFPGA": 1.0}
    choices, _ = choices_of(workload_from_json(data, name="far"))
    instance = choices[0]
    least_loads = LeastLoads([DeviceKind(instance, 0, 3)], Reach(instance.num_nodes, instance.edges))
    # All six nodes within the target: of nodes 0, 1 and 5 each may count on the other two.
    assert least_loads.floor_s(12.0, Deadline(30.0)) == pytest.approx(7.0)
    # Not within it: 1 and 5 have the tensor to pay, and one of 0.5.
    assert least_loads.floor_s(9.5, Deadline(30.0)) == pytest.approx(8.5)


@pytest.mark.parametrize("seed", range(10))
def test_shuffled_orders_are_topological_and_no_worse_where_stages_stay_together(seed: int) -> None:
    choices, _ = choices_of(drawn_workload(seed))
    instance = choices[0]
    first = best_cut(instance, topological_orders(instance)[0])
    if first is None:
        return
    shuffler = Shuffler(instance.num_nodes, instance.edges)
    before_s = evaluate(instance, first).bottleneck_s
    together = 0
    for _ in range(30):
        order = shuffler.order(first)
        place = np.argsort(order)
        assert sorted(order) == list(range(instance.num_nodes))
        assert all(place[u] < place[v] for u, v in instance.edges)
        if (np.diff(first[order]) >= 0).all():
            together += 1
            stage_of = best_cut(instance, order)
            assert stage_of is not None
            assert respects_edges(instance, stage_of)
            assert evaluate(instance, stage_of).bottleneck_s <= before_s * (1 + 1e-12)
    assert together > 0
