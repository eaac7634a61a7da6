"""Draws small workloads at random, and makes their instances for each order of the devices."""

from __future__ import annotations

import random
from typing import Any

from pd2bw_fx.passes.partition import groups, placement
from pd2bw_fx.passes.partition.choices import Choices
from pd2bw_fx.workload import Workload, workload_from_json

PROVEN_WITHIN_S = 240.0  # a time limit for what takes seconds here, and must be proven on any machine


def drawn_workload(seed: int) -> Workload:
    draw = random.Random(seed)
    count = draw.randint(4, 12)
    nodes = [
        {
            "id": at,
            "supportedOnFpga": int(draw.random() < 0.9),
            "fpgaLatency": draw.randint(0, 9),
            "cpuLatency": draw.randint(0, 30),
            "size": draw.randint(0, 5),
            "isBackwardNode": 0,
            "colorClass": draw.choice([None, None, None, 1]),
        }
        for at in range(count)
    ]
    edges = []
    for source in range(count - 1):
        cost = draw.randint(0, 4)
        for target in draw.sample(range(source + 1, count), min(draw.randint(0, 2), count - source - 1)):
            edges.append({"sourceId": source, "destId": target, "cost": cost})
    data = {"nodes": nodes, "edges": edges, "maxSizePerFPGA": draw.choice([8, 20, 1000])}
    return workload_from_json(data | {"maxFPGAs": draw.randint(1, 3), "maxCPUs": draw.randint(1, 2)}, name="")


def choices_of(workload: Workload) -> tuple[Choices, Any]:
    found = groups.groups_of(workload)
    orders = list(placement._device_orders(workload.num_accelerators, workload.num_cpus))
    return placement._choices(workload, found, orders), orders
