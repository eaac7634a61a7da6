"""Nodes that go with their only neighbour: the optimum stays that of all placements."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from pd2bw_fx.errors import InfeasibleError
from pd2bw_fx.passes.partition import plan_workload
from pd2bw_fx.passes.partition.groups import groups_of, with_followers
from pd2bw_fx.workload import Workload, workload_from_json


def drawn(seed: int) -> dict[str, Any]:
    """Five nodes in a row with a skip, and two chains at the rim: one that is read, one that ends."""
    draw = random.Random(seed)
    edges = [(0, 1), (1, 2), (2, 3), (3, 4), (draw.randrange(2), draw.randrange(2, 5))]
    edges += [(5, 6), (6, draw.randrange(1, 5)), (draw.randrange(4), 7)]
    cost = [draw.choice((0.05, 0.5, 2.0)) for _ in range(8)]
    nodes = [
        {
            "id": at,
            "supportedOnFpga": True,
            "cpuLatency": 9.0,
            "fpgaLatency": draw.uniform(0.5, 3.0) if at < 5 else draw.choice((0.1, 0.6, 3.0)),
            "size": draw.uniform(1.0, 3.0) if at < 5 else draw.choice((0.0, 1.0)),
            "isBackwardNode": False,
        }
        for at in range(8)
    ]
    return {
        "maxFPGAs": 3,
        "maxCPUs": 0,
        "maxSizePerFPGA": draw.choice((6.0, 8.0, 100.0)),
        "nodes": nodes,
        "edges": [{"sourceId": u, "destId": v, "cost": cost[u]} for u, v in sorted(set(edges))],
    }


def best_of_all(data: dict[str, Any]) -> float:
    """By trying every device for every node."""
    nodes, edges = data["nodes"], [(e["sourceId"], e["destId"], e["cost"]) for e in data["edges"]]
    best = float("inf")
    for devices in itertools.product(range(data["maxFPGAs"]), repeat=len(nodes)):
        if any(devices[u] > devices[v] for u, v, _ in edges):
            continue
        loads, sizes = [0.0] * data["maxFPGAs"], [0.0] * data["maxFPGAs"]
        for node, device in zip(nodes, devices, strict=True):
            loads[device] += node["fpgaLatency"]
            sizes[device] += node["size"]
        for source in range(len(nodes)):
            ends = {devices[v] for u, v, _ in edges if u == source} | {devices[source]}
            cost = max((c for u, _, c in edges if u == source), default=0.0)
            for device in ends if len(ends) > 1 else ():
                loads[device] += cost
        if max(sizes) <= data["maxSizePerFPGA"]:
            best = min(best, max(loads))
    return best


@pytest.mark.parametrize("seed", range(12))
def test_the_optimum_is_that_of_all_placements(seed: int) -> None:
    data = drawn(seed)
    best = best_of_all(data)
    workload = workload_from_json(data, name="drawn")
    if best == float("inf"):
        with pytest.raises(InfeasibleError):
            plan_workload(workload, accelerators_only=True)
        return

    placement = plan_workload(workload, accelerators_only=True)

    assert placement.objective == pytest.approx(best, rel=1e-5)
    assert placement.bound <= best * (1 + 1e-9)
    assert set(placement.assignment) == set(range(8))


def chain(work: float, cost: float, size: float = 0.0, limit: float = 10.0) -> Workload:
    """0 -> 1 -> 2 -> 3, and a node 4 that only 2 reads; 3 and 4 take `work` and `size`."""
    times, sizes = (3.0, 3.0, 3.0, work, work), (5.0, 5.0, 0.0, size, size)
    data = {
        "maxFPGAs": 2,
        "maxCPUs": 0,
        "maxSizePerFPGA": limit,
        "nodes": [
            {"id": at, "supportedOnFpga": True, "cpuLatency": 1.0, "fpgaLatency": t, "size": s}
            | {"isBackwardNode": False}
            for at, (t, s) in enumerate(zip(times, sizes, strict=True))
        ],
        "edges": [{"sourceId": u, "destId": v, "cost": cost} for u, v in ((0, 1), (1, 2), (2, 3), (4, 2))],
    }
    return workload_from_json(data, name="chain")


@pytest.mark.parametrize(
    ("workload", "left"),
    [
        (chain(work=0.5, cost=1.0), 3),  # 3 and 4 go with 2
        (chain(work=1.5, cost=1.0), 5),  # each is better off where there is room
        (chain(work=0.5, cost=1.0, size=1.0), 5),  # where memory binds, they may have to be elsewhere
        (chain(work=0.5, cost=1.0, size=1.0, limit=100.0), 3),
        (chain(work=0.5, cost=9.0), 1),  # then 2 with 1, and all of them are one
    ],
)
def test_a_node_at_the_rim_goes_with_its_neighbour_where_nothing_is_lost(
    workload: Workload, left: int
) -> None:
    groups = with_followers(workload, groups_of(workload))

    assert len(groups.members) == left
    assert sorted(node for nodes in groups.members for node in nodes) == [0, 1, 2, 3, 4]
