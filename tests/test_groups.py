"""Nodes that go with their only neighbour: the optimum stays that of all placements."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest

from pd2bw_fx.errors import InfeasibleError
from pd2bw_fx.passes.partition import plan_workload
from pd2bw_fx.passes.partition.bounds.dominance import join_dominated_pairs
from pd2bw_fx.passes.partition.groups import groups_of, tensors_between
from pd2bw_fx.workload import Workload, workload_from_json

NUM_NODES = 8


def drawn(seed: int) -> dict[str, Any]:
    """Five nodes in a row with a skip, and two chains at the rim: one that is read, one that ends.

    Every second one is a training graph: each node has a backward node of its colour, and the edges again
    the other way round. Every third has a CPU, which takes no time for some of what is at the rim.
    """
    draw = random.Random(seed)
    edges = [(0, 1), (1, 2), (2, 3), (3, 4), (draw.randrange(2), draw.randrange(2, 5))]
    edges += [(5, 6), (6, draw.randrange(1, 5)), (draw.randrange(4), 7)]
    pairs = sorted(set(edges))
    if seed % 2:
        pairs += [(v + NUM_NODES, u + NUM_NODES) for u, v in pairs]
    cost = [draw.choice((0.05, 0.5, 2.0)) for _ in range(2 * NUM_NODES)]
    nodes = [
        {
            "id": at,
            "supportedOnFpga": True,
            "cpuLatency": 9.0 if at % NUM_NODES < 5 else draw.choice((0.0, 0.5)),
            "fpgaLatency": draw.uniform(0.5, 3.0) if at % NUM_NODES < 5 else draw.choice((0.1, 0.6, 3.0)),
            "size": draw.uniform(1.0, 3.0) if at % NUM_NODES < 5 else draw.choice((0.0, 1.0)),
            "isBackwardNode": at >= NUM_NODES,
            "colorClass": at % NUM_NODES,
        }
        for at in range(NUM_NODES * (1 + seed % 2))
    ]
    return {
        "maxFPGAs": 3 if seed % 3 else 2,
        "maxCPUs": int(seed % 3 == 0),
        "maxSizePerFPGA": draw.choice((8.0, 12.0, 100.0)),
        "nodes": nodes,
        "edges": [{"sourceId": u, "destId": v, "cost": cost[u]} for u, v in pairs],
    }


def best_of_all(data: dict[str, Any]) -> float:
    """Returns the optimum, by trying every device for every colour and every place for the CPU."""
    nodes, edges = data["nodes"], [(e["sourceId"], e["destId"], e["cost"]) for e in data["edges"]]
    read = {u: ([v for source, v, _ in edges if source == u], cost) for u, _, cost in edges}
    num_devices = data["maxFPGAs"] + data["maxCPUs"]
    best = float("inf")
    for devices in itertools.product(range(num_devices), repeat=NUM_NODES):
        if any(devices[u] > devices[v] for u, v, _ in edges if u < NUM_NODES):
            continue
        for cpu in range(num_devices) if data["maxCPUs"] else (-1,):
            loads, sizes = [0.0] * num_devices, [0.0] * num_devices
            for node in nodes:
                device = devices[node["colorClass"]]
                loads[device] += node["cpuLatency" if device == cpu else "fpgaLatency"]
                sizes[device] += 0.0 if device == cpu else node["size"]
            for source, (readers, cost) in read.items():
                ends = {devices[at % NUM_NODES] for at in (source, *readers)}
                for device in ends - {cpu} if len(ends) > 1 else ():
                    loads[device] += cost
            if max(sizes) <= data["maxSizePerFPGA"]:
                best = min(best, max(loads))
    return best


@pytest.mark.parametrize("seed", range(18))
def test_the_optimum_is_that_of_all_placements(seed: int) -> None:
    data = drawn(seed)
    best = best_of_all(data)
    workload = workload_from_json(data, name="drawn")
    if best == float("inf"):
        with pytest.raises(InfeasibleError):
            plan_workload(workload)
        return

    placement = plan_workload(workload)

    assert placement.objective == pytest.approx(best, rel=1e-5)
    assert placement.bound <= best * (1 + 1e-9)
    assert set(placement.assignment) == {node["id"] for node in data["nodes"]}


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
    groups = join_dominated_pairs(workload, groups_of(workload), with_cpus=False)

    assert len(groups.members) == left
    assert sorted(node for nodes in groups.members for node in nodes) == [0, 1, 2, 3, 4]


def test_beside_a_cpu_a_node_goes_with_its_neighbour_only_if_it_takes_the_cpu_no_time() -> None:
    workload = chain(work=0.5, cost=1.0)
    free = replace(workload, nodes=tuple(replace(node, cpu_time=0.0) for node in workload.nodes))

    assert len(join_dominated_pairs(workload, groups_of(workload), with_cpus=True).members) == 5
    assert len(join_dominated_pairs(free, groups_of(free), with_cpus=True).members) == 3


def test_a_tensor_that_the_neighbour_has_a_part_of_too_is_no_obstacle() -> None:
    """0 -> 2 <- 1, and one gradient that goes from 2 to both."""
    data = {
        "maxFPGAs": 2,
        "maxCPUs": 0,
        "maxSizePerFPGA": 10.0,
        "nodes": [
            {"id": at, "supportedOnFpga": True, "cpuLatency": 1.0, "size": 1.0}
            | {"isBackwardNode": at >= 3, "colorClass": at % 3}
            | {"fpgaLatency": 0.2 if at % 3 == 1 else 3.0}
            for at in range(6)
        ],
        "edges": [{"sourceId": u, "destId": v, "cost": 1.0} for u, v in ((0, 2), (1, 2), (5, 3), (5, 4))],
    }
    workload = workload_from_json(data, name="tied")

    groups = join_dominated_pairs(workload, groups_of(workload), with_cpus=False)

    assert tensors_between(workload, groups_of(workload)) == {(0, 2): 1.0, (1, 2): 1.0, (0, 1, 2): 1.0}
    assert sorted(groups.members) == [(0, 3), (1, 4, 2, 5)]
    assert list(tensors_between(workload, groups).values()) == [2.0]
