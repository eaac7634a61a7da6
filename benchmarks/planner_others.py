"""How much slower are the stages that other planners choose, on the same costs?

    python benchmarks/planner_others.py [CASE ...]

Models of `models/` with estimated costs and the published inference workloads, each on equal devices and on
unlike ones: half as fast from the second on, and a quarter of the bandwidth where the first has no part. A
cell is how much slower the slowest stage is than the plan's. Exits with 1 if a rule beats the plan.
"""

from __future__ import annotations

import itertools
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from pd2bw_fx.cluster import Cluster
from pd2bw_fx.device import Device
from pd2bw_fx.models import MODELS, build
from pd2bw_fx.passes.coarsen import coarsen
from pd2bw_fx.passes.normalise import normalise
from pd2bw_fx.passes.partition import baselines, partition
from pd2bw_fx.passes.profile import profile
from pd2bw_fx.passes.trace import trace
from pd2bw_fx.problem import Block, ParameterSize, Problem, Value
from pd2bw_fx.workload import read_workload

RULES = {"equal": "equal layers", "parameters": "parameters", "time": "torchgpipe", "pipedream": "PipeDream"}
WORKLOADS = Path(__file__).parent / "workloads"
MAX_GAP = 1e-3
DEVICE = Device("cpu:0", memory_bytes=2**34, flops_per_s=50e9, memory_bytes_per_s=10e9)


def clusters(num_devices: int, bytes_per_s: float) -> Iterator[tuple[str, Cluster]]:
    alike = Cluster.uniform(num_devices, memory_bytes=2**44, bytes_per_s=bytes_per_s, latency_s=0.0)
    yield "alike", alike
    devices = tuple(replace(device, speed=1.0 if at == 0 else 0.5) for at, device in enumerate(alike.devices))
    rates = tuple(
        tuple(rate if 0 in (a, b) else rate / 4 for b, rate in enumerate(row))
        for a, row in enumerate(alike.bytes_per_s)
    )
    yield "unlike", replace(alike, devices=devices, bytes_per_s=rates)


def model_cases() -> Iterator[tuple[str, Problem, Cluster]]:
    for name in sorted(MODELS):
        torch.manual_seed(0)
        model = build(name)
        traced = trace(model, model.example_inputs(), {})  # type: ignore[operator]
        graph = normalise(traced)
        costs = profile(graph, traced.examples, device=DEVICE, method="analytic")
        for kind, cluster in clusters(3, 2e9):
            yield f"{name}, 3 {kind}", coarsen(graph, costs, cluster), cluster


def workload_cases() -> Iterator[tuple[str, Problem, Cluster]]:
    for path in sorted(WORKLOADS.glob("*_inference.json")):
        workload = read_workload(path)
        for kind, cluster in clusters(workload.num_accelerators, 1e9):
            speeds = [device.speed for device in cluster.devices]
            blocks = tuple(
                Block(
                    str(node.id),
                    (str(node.id),),
                    tuple(node.accelerator_time / speed for speed in speeds),
                    (0.0,) * len(speeds),
                    (str(node.id),),
                )
                for node in workload.nodes
            )
            readers: dict[tuple[int, float], list[str]] = defaultdict(list)
            for edge in workload.edges:
                readers[edge.source, edge.cost].append(str(edge.target))
            values = tuple(
                Value(f"{source}/{at}", str(source), tuple(targets), int(cost * 1e9))
                for at, ((source, cost), targets) in enumerate(readers.items())
            )
            sizes = {str(node.id): ParameterSize(int(node.num_bytes)) for node in workload.nodes}
            yield f"{path.stem}, {len(speeds)} {kind}", Problem(blocks, values, sizes), cluster


def main() -> int:
    table = Table("case", "bottleneck", *RULES.values())
    is_beaten = False
    for name, problem, cluster in itertools.chain(model_cases(), workload_cases()):
        if sys.argv[1:] and not name.startswith(tuple(sys.argv[1:])):
            continue
        plan = partition(problem, cluster, max_gap=MAX_GAP, time_limit_s=30.0)
        cells = []
        for other in baselines(problem, cluster):
            is_beaten |= other.bottleneck_s < plan.bottleneck_s * (1 - MAX_GAP)
            slower = other.bottleneck_s / plan.bottleneck_s - 1
            cells.append(f"{slower:+.0%}")
        table.add_row(name, f"{plan.bottleneck_s:.4g}", *cells)
    Console(width=130).print(table)
    return int(is_beaten)


if __name__ == "__main__":
    sys.exit(main())
