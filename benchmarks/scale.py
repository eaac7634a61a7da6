"""Large clusters: a plan for a GPT of 175 billion parameters on 1,024 devices, and 4,096 devices simulated.

    python benchmarks/scale.py                 # both
    python benchmarks/scale.py plan            # benchmarks/scale_cluster.toml: 128 nodes of 8 devices
    python benchmarks/scale.py simulate        # 4,096 stages, 1,024 microbatches an update

The model is never allocated (meta tensors) and its costs are analytic. The pipeline has 64 stages, one for
every second node, and 16 copies of it fill the cluster.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

from pd2bw_fx.actions import Shape
from pd2bw_fx.cluster import Cluster
from pd2bw_fx.costs import MemoryModel
from pd2bw_fx.models.gpt import GPT, GPTConfig
from pd2bw_fx.passes.coarsen import coarsen
from pd2bw_fx.passes.normalise import normalise
from pd2bw_fx.passes.partition import partition
from pd2bw_fx.passes.profile import profile
from pd2bw_fx.passes.schedule import METHODS, schedule_of
from pd2bw_fx.passes.simulate import Durations, simulate, simulate_totals
from pd2bw_fx.passes.trace import trace
from pd2bw_fx.units import format_bytes, format_seconds

CLUSTER = Path(__file__).with_name("scale_cluster.toml")
GPT_175B = GPTConfig(50257, sequence_length=2048, num_layers=96, num_heads=96, width=12288, dropout=0.0)
STAGES, COPIES, MICROBATCHES = 64, 16, 128  # microbatches of one copy and update
# In units of a half-precision weight: two versions, a gradient; the master copy and Adam's two, in float32.
MIXED_PRECISION = MemoryModel(weight_versions=2, gradient_copies=1, optimizer_copies=6)


def plan_175b() -> None:
    began = time.perf_counter()
    cluster = Cluster.from_toml(CLUSTER)
    every = len(cluster) // STAGES
    of_copy = cluster.only(range(0, len(cluster), every))  # all copies have devices and links like these
    with torch.device("meta"):
        model = GPT(GPT_175B).half()
        tokens = torch.zeros((1, GPT_175B.sequence_length), dtype=torch.long)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    graph_began = time.perf_counter()
    traced = trace(model, (tokens, tokens), {})
    graph = normalise(traced)
    costs = profile(graph, traced.examples, device=of_copy.devices[0], method="analytic")
    problem = coarsen(graph, costs, of_copy)
    planning_began = time.perf_counter()
    plan = partition(
        problem,
        of_copy,
        num_stages=STAGES,
        microbatches_per_update=MICROBATCHES,
        memory_model=MIXED_PRECISION,
        recompute=True,
        max_gap=0.05,
        time_limit_s=30.0,
    )
    simulating_began = time.perf_counter()
    most = max(stage.memory.total_bytes for stage in plan.stages)
    print(
        f"{parameters / 1e9:.1f} billion parameters, {len(graph.operators)} operators, {len(cluster)} devices"
    )
    print(f"{STAGES} stages, {COPIES} copies, at most {format_bytes(most)} on a device; gap {plan.gap:.1%}")
    for method in ("2bw", "1f1b"):
        shape = Shape(STAGES, MICROBATCHES * COPIES, replicas=(COPIES,) * STAGES)
        schedule = schedule_of(method, shape, updates=range(1), drain=True)
        timeline = simulate(schedule, plan, of_copy)
        print(
            f"{method}: {sum(map(len, schedule.ranks))} actions, an update in "
            f"{format_seconds(timeline.span_s)} from empty to empty, idle {timeline.bubble:.1%}"
        )
    end = time.perf_counter()
    print(
        f"seconds: trace and costs {planning_began - graph_began:.1f}, plan "
        f"{simulating_began - planning_began:.1f}, simulations {end - simulating_began:.1f}, "
        f"all {end - began:.1f}"
    )


def simulate_4096() -> None:
    d, m = 4096, 1024
    for method in ("1f1b", "zb-h1"):
        began = time.perf_counter()
        shape = Shape(d, m)
        chosen = METHODS[method]
        lists = (chosen.order(shape, rank, range(1), drain=True, empty_before=0) for rank in range(d))
        chain = Durations.chain([1.0] * d, [1.0] * d, weight_backward_s=[1.0] * d)
        totals = simulate_totals(lists, chain)
        print(
            f"{method}: {d} devices, {m} microbatches, {totals.num_computations} computations: "
            f"span {totals.span_s:.0f} (1F1B: (m + d - 1)(F + B) = {3 * (m + d - 1)}), "
            f"bubble {totals.bubble:.4f}, in {time.perf_counter() - began:.1f} s"
        )


if __name__ == "__main__":
    wanted = sys.argv[1:] or ["plan", "simulate"]
    if "plan" in wanted:
        plan_175b()
    if "simulate" in wanted:
        simulate_4096()
