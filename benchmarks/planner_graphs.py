"""Plan large operator graphs: a GPT traced on the meta device, and branchy graphs with drawn costs.

    python benchmarks/planner_graphs.py                   # GPT of 24 layers, and the branchy graphs
    python benchmarks/planner_graphs.py gpt24 gpt96       # by name
    python benchmarks/planner_graphs.py 2bw               # recompute per stage, unlike devices and links
    python benchmarks/planner_graphs.py tight             # memory that leaves no room for equal stages

`others` is the best of the rules in `partition/baselines.py` that fits; `equal` is equal blocks with one
recompute flag, as in the 2BW paper. Seconds are of planning alone, tracing and profiling not counted:
`planned` until there is a plan as good as the last one, to the gap that is asked for, `proven` all of them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from planner_drawn import BRANCHY
from rich.console import Console
from rich.table import Table
from torch import nn

from pd2bw_fx.cluster import Cluster
from pd2bw_fx.costs import Costs
from pd2bw_fx.device import Device
from pd2bw_fx.graph import OperatorGraph
from pd2bw_fx.models.gpt import GPT, GPTConfig
from pd2bw_fx.passes.coarsen import coarsen
from pd2bw_fx.passes.normalise import normalise
from pd2bw_fx.passes.partition import baselines, partition
from pd2bw_fx.passes.profile import profile
from pd2bw_fx.passes.trace import trace
from pd2bw_fx.plan import Progress
from pd2bw_fx.problem import Problem

GIB = 2**30
GPU = Device("cuda:0", memory_bytes=80 * GIB, kind="cuda", flops_per_s=60e12, memory_bytes_per_s=800e9)


@dataclass(frozen=True, slots=True)
class Case:
    """A problem, and what is asked of the plan: proven to `max_gap` in `seconds`, at hand in `planned_s`."""

    name: str
    problem: Problem
    cluster: Cluster
    max_gap: float
    seconds: float
    recompute: bool | Literal["auto"] = False
    layers: tuple[tuple[str, ...], ...] | None = None
    planned_s: float | None = None


def uniform(num_devices: int, memory_gib: int = 80) -> Cluster:
    return Cluster.uniform(
        num_devices, memory_bytes=memory_gib * GIB, bytes_per_s=12e9, latency_s=10e-6, kind="cuda"
    )


def unlike(num_devices: int) -> Cluster:
    """Two hosts: fast devices with 24 GiB, slow ones with 16 GiB, and half the bandwidth between."""
    half = num_devices // 2
    devices = tuple(
        replace(device, speed=1.0 if at < half else 0.6, memory_bytes=(24 if at < half else 16) * GIB)
        for at, device in enumerate(uniform(num_devices).devices)
    )
    rates = tuple(
        tuple(0.0 if a == b else (12e9 if (a < half) == (b < half) else 6e9) for b in range(num_devices))
        for a in range(num_devices)
    )
    return replace(uniform(num_devices), devices=devices, bytes_per_s=rates)


def gpt(num_layers: int, microbatch_size: int = 4) -> tuple[OperatorGraph, Costs]:
    """The GPT of the 2BW paper's width, without its weights."""
    config = replace(GPTConfig.paper(), num_layers=num_layers)
    with torch.device("meta"):
        model = GPT(config)
        tokens = torch.zeros((microbatch_size, config.sequence_length), dtype=torch.long)
    traced = trace(model, (tokens, tokens), {})
    graph = normalise(traced)
    return graph, profile(graph, traced.examples, device=GPU, method="analytic")


def layers_of(graph: OperatorGraph, problem: Problem) -> tuple[tuple[str, ...], ...]:
    layers: dict[str, list[str]] = {}
    for block in problem.blocks:
        kind, _, rest = graph.operators[block.operators[0]].module_path.partition(".")
        if kind == "blocks":
            layers.setdefault(rest.partition(".")[0], []).append(block.name)
    return tuple(tuple(names) for names in layers.values())


def gpt_cases(num_layers: int) -> Iterator[Case]:
    graph, costs = gpt(num_layers)
    for num_devices in (4, 8) if num_layers < 96 else (8, 16):
        problem = coarsen(graph, costs, uniform(num_devices, 160))
        yield Case(
            f"gpt, {num_layers} layers, {len(graph.operators)} operators, {num_devices} devices",
            problem,
            uniform(num_devices, 160),
            max_gap=0.01,
            seconds=5 if num_devices < 16 else 30,
            layers=layers_of(graph, problem),
            planned_s=0.5 if num_layers < 96 else 3,
        )


def two_bw_cases() -> Iterator[Case]:
    """The settings of a published comparison: 16 GiB devices, and unlike ones."""
    graph, costs = gpt(24)
    settings = [("16 GiB", uniform(4, 16)), ("16 GiB", uniform(8, 16))]
    settings += [("unlike devices and links", unlike(4)), ("unlike devices and links", unlike(8))]
    for name, cluster in settings:
        problem = coarsen(graph, costs, cluster)
        yield Case(
            f"2bw, gpt 24 layers, {len(cluster)} devices, {name}",
            problem,
            cluster,
            max_gap=0.01,
            seconds=5,
            recompute="auto",
            layers=layers_of(graph, problem),
        )
    graph, costs = gpt(96)
    problem = coarsen(graph, costs, uniform(16, 32))
    layers = layers_of(graph, problem)
    yield Case("2bw, gpt 96 layers, 16 devices, 32 GiB", problem, uniform(16, 32), 0.01, 30, "auto", layers)


def tight_cases() -> Iterator[Case]:
    """A Llama of 70 and a ViT of 22 billion parameters. Activations are so large that stages cannot be equal:
    the first ones, with most microbatches in flight, have to be short, unless they compute them again."""
    from transformers import LlamaConfig, LlamaForCausalLM, ViTConfig, ViTForImageClassification

    llama = LlamaConfig(
        vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80,
        num_attention_heads=64, num_key_value_heads=8,
    )  # fmt: skip
    vit = ViTConfig(
        hidden_size=6144, num_hidden_layers=48, num_attention_heads=48, intermediate_size=24576,
        image_size=224, patch_size=14,
    )  # fmt: skip
    with torch.device("meta"):
        llama_model = LlamaForCausalLM(llama).to(torch.bfloat16)
        tokens = torch.zeros((1, 4096), dtype=torch.long)
        vit_model = ViTForImageClassification(vit)
        images, labels = torch.zeros(8, 3, 224, 224), torch.zeros(8, dtype=torch.long)
    problem = traced_problem(llama_model, {"input_ids": tokens, "labels": tokens}, 16)
    settings: tuple[tuple[int, bool | Literal["auto"], float], ...]
    settings = ((300, False, 0.01), (400, False, 0.03), (141, "auto", 0.02))
    for memory_gib, recompute, max_gap in settings:
        name = f"tight, Llama of 80 layers, 16 devices, {memory_gib} GiB{', recompute' if recompute else ''}"
        yield Case(name, problem, uniform(16, memory_gib), max_gap, 30, recompute)
    problem = traced_problem(vit_model, {"pixel_values": images, "labels": labels}, 8)
    yield Case("tight, ViT of 48 layers, 8 devices, 75 GiB", problem, uniform(8, 75), 0.01, 60)


def traced_problem(model: nn.Module, kwargs: dict[str, torch.Tensor], num_devices: int) -> Problem:
    traced = trace(model, (), kwargs)
    graph = normalise(traced)
    costs = profile(graph, traced.examples, device=GPU, method="analytic")
    return coarsen(graph, costs, uniform(num_devices))


def branchy_cases() -> Iterator[Case]:
    for name, make in BRANCHY.items():
        drawn = make()
        for num_devices in (4, 8):
            yield Case(
                f"{name}, {len(drawn.blocks)} operators, {num_devices} devices",
                drawn.problem(num_devices),
                uniform(num_devices),
                max_gap=0.03,
                seconds=90,
            )


SUITES = {
    "gpt24": lambda: gpt_cases(24),
    "gpt96": lambda: gpt_cases(96),
    "2bw": two_bw_cases,
    "tight": tight_cases,
    "branchy": branchy_cases,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"of {', '.join(SUITES)}")
    parser.add_argument("--solver", default="highs")
    options = parser.parse_args()
    unknown = [name for name in options.suites if name not in SUITES]
    if unknown:
        parser.error(f"{unknown[0]!r} is unknown; known are {', '.join(SUITES)}")
    table = Table("case", "bottleneck", "gap", "planned", "proven", "allowed", "equal", "others", "")
    failed = 0
    for suite in options.suites or ("gpt24", "branchy"):
        for case in SUITES[suite]():
            row, good = measure(case, options.solver)
            table.add_row(*row)
            failed += not good
    Console(width=130).print(table)
    return int(failed > 0)


def measure(case: Case, solver: str) -> tuple[list[str], bool]:
    steps: list[Progress] = []
    plan = partition(
        case.problem,
        case.cluster,
        recompute=case.recompute,
        max_gap=case.max_gap,
        time_limit_s=case.seconds,
        solver=solver,
        progress=steps.append,
    )
    as_good = plan.bottleneck_s * (1 + case.max_gap)
    planned_s = next((step.elapsed_s for step in steps if step.incumbent_s <= as_good), plan.planning_s)
    others = baselines(case.problem, case.cluster, recompute=case.recompute, layers=case.layers)
    fitting = [other.bottleneck_s for other in others if other.fits]
    good = plan.gap <= case.max_gap * 1.001 and plan.planning_s <= case.seconds
    good &= case.planned_s is None or planned_s <= case.planned_s
    good &= plan.bottleneck_s <= min(fitting, default=float("inf")) * (1 + case.max_gap)

    def compared(seconds: float) -> str:
        return f"{seconds * 1e3:.1f} ({seconds / plan.bottleneck_s - 1:+.0%})"

    equal = next(other for other in others if other.rule == "equal")
    row = [
        case.name,
        f"{plan.bottleneck_s * 1e3:.2f} ms",
        f"{plan.gap:.2%}",
        f"{planned_s:.2f}",
        f"{plan.planning_s:.2f}",
        f"{case.seconds:g}" if case.planned_s is None else f"{case.planned_s:g}, {case.seconds:g}",
        compared(equal.bottleneck_s) if equal.fits else "does not fit",
        compared(min(fitting)) if fitting else "none fits",
        "ok" if good else "FAILED",
    ]
    return row, good


if __name__ == "__main__":
    sys.exit(main())
