"""Plan models that people have, at the sizes they have them, and say how far each plan is proven.

    python benchmarks/planner_models.py                 # all: half an hour
    python benchmarks/planner_models.py t5 clip         # some
    python benchmarks/planner_models.py dpt --devices 8

Hugging Face architectures, traced without weights, costs estimated for the devices and links of
planner_graphs.py. Each is planned on so many devices that are alike, to 1% (`pipeline`: a sender pays for
each stage that reads a tensor, no stage is empty), and as a workload of the published kind to 1e-5, on
accelerators alone and with a CPU ten times as slow. A minute each.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import transformers as hf
from planner_graphs import GPU, uniform
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from pd2bw_fx.passes.coarsen import coarsen
from pd2bw_fx.passes.normalise import normalise
from pd2bw_fx.passes.partition import partition, plan_workload
from pd2bw_fx.passes.profile import profile
from pd2bw_fx.passes.trace import trace
from pd2bw_fx.problem import Problem
from pd2bw_fx.workload import Workload, WorkloadEdge, WorkloadNode

TIME_LIMIT_S = 60.0
PIPELINE_GAP, WORKLOAD_GAP = 0.01, 1e-5
CPU_SLOWER, LINK_BYTES_PER_S = 10, 12e9

Build = Callable[[], tuple[nn.Module, dict[str, Any]]]


def words(length: int = 512, batch: int = 4) -> Tensor:
    return torch.zeros(batch, length, dtype=torch.int64)


def pictures(size: int = 224, batch: int = 32) -> Tensor:
    return torch.zeros(batch, 3, size, size)


def text(model: nn.Module) -> tuple[nn.Module, dict[str, Any]]:
    return model, {"input_ids": words(), "labels": words()}


def vision(model: nn.Module) -> tuple[nn.Module, dict[str, Any]]:
    return model, {"pixel_values": pictures(), "labels": torch.zeros(32, dtype=torch.int64)}


def t5() -> tuple[nn.Module, dict[str, Any]]:
    sizes = {"d_model": 1024, "d_kv": 64, "d_ff": 4096, "num_layers": 24, "num_heads": 16}
    return text(
        hf.T5ForConditionalGeneration(hf.T5Config(**sizes, use_cache=False, decoder_start_token_id=0))
    )


def whisper() -> tuple[nn.Module, dict[str, Any]]:
    sizes = {"layers": 24, "attention_heads": 16, "ffn_dim": 4096}
    sides = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in sizes.items()}
    model = hf.WhisperForConditionalGeneration(hf.WhisperConfig(d_model=1024, **sides, use_cache=False))
    return model, {"input_features": torch.zeros(4, 80, 3000), "labels": words(128)}


BUILDS: dict[str, Build] = {
    "bart": lambda: text(hf.BartForConditionalGeneration(hf.BartConfig(use_cache=False))),
    "t5": t5,
    "whisper": whisper,
    "llama": lambda: text(hf.LlamaForCausalLM(hf.LlamaConfig(num_hidden_layers=32, use_cache=False))),
    "deberta": lambda: text(hf.DebertaV2ForMaskedLM(hf.DebertaV2Config(num_hidden_layers=24))),
    "wav2vec2": lambda: (
        hf.Wav2Vec2ForSequenceClassification(hf.Wav2Vec2Config(num_hidden_layers=24)).eval(),
        {"input_values": torch.zeros(4, 160_000)},
    ),
    "clip": lambda: (
        hf.CLIPModel(hf.CLIPConfig()),
        {"input_ids": words(77, 32), "pixel_values": pictures(), "return_loss": True},
    ),
    "resnet": lambda: vision(hf.ResNetForImageClassification(hf.ResNetConfig(depths=[3, 8, 36, 3]))),
    "regnet": lambda: vision(hf.RegNetForImageClassification(hf.RegNetConfig())),
    "convnext": lambda: vision(hf.ConvNextForImageClassification(hf.ConvNextConfig(depths=[3, 3, 27, 3]))),
    "efficientnet": lambda: vision(
        hf.EfficientNetForImageClassification(hf.EfficientNetConfig(drop_connect_rate=0.0))
    ),
    "swin": lambda: vision(
        hf.SwinForImageClassification(hf.SwinConfig(depths=[2, 2, 18, 2], drop_path_rate=0.0))
    ),
    "segformer": lambda: (
        hf.SegformerForSemanticSegmentation(hf.SegformerConfig(depths=[3, 6, 40, 3], drop_path_rate=0.0)),
        {"pixel_values": pictures(512, 4)},
    ),
    "dpt": lambda: (hf.DPTForDepthEstimation(hf.DPTConfig()), {"pixel_values": pictures(384, 4)}),
}


def problem_of(build: Build) -> Problem:
    with torch.device("meta"):
        model, inputs = build()
    # A parameter made by torch.Tensor(size), as wav2vec2 has one, is on the CPU all the same.
    model.to("meta")
    traced = trace(model, (), inputs)
    graph = normalise(traced)
    return coarsen(graph, profile(graph, traced.examples, device=GPU, method="analytic"), uniform(1, 640))


def pipeline(problem: Problem, num_devices: int) -> Problem:
    """For so many devices like the first."""
    alike = (
        replace(block, forward_s=block.forward_s * num_devices, backward_s=block.backward_s * num_devices)
        for block in problem.blocks
    )
    return replace(problem, blocks=tuple(alike))


def workload(name: str, problem: Problem, num_accelerators: int) -> Workload:
    """Times in milliseconds, forward and backward in one."""
    number = {block.name: at for at, block in enumerate(problem.blocks)}
    times = [1e3 * (block.forward_s[0] + block.backward_s[0]) for block in problem.blocks]
    cost: dict[str, float] = {}
    for value in problem.values:  # all that a block makes is one tensor here
        cost[value.producer] = cost.get(value.producer, 0.0) + 2e3 * value.bytes / LINK_BYTES_PER_S
    edges = tuple(
        WorkloadEdge(number[value.producer], number[reader], cost[value.producer])
        for value in problem.values
        for reader in value.consumers
    )
    nodes = tuple(WorkloadNode(at, time, CPU_SLOWER * time, 0.0) for at, time in enumerate(times))
    return Workload(name, num_accelerators, 1, 1.0, nodes, edges)


def planned(name: str, problem: Problem, num_devices: int) -> list[tuple[str, bool]]:
    """What to show of each of the three plans, and whether it is proven."""
    given, cluster = pipeline(problem, num_devices), uniform(num_devices, 640)
    published = workload(name, problem, num_devices)
    began_s = time.perf_counter()
    plan = partition(given, cluster, max_gap=PIPELINE_GAP, time_limit_s=TIME_LIMIT_S)
    shown = [told(plan.bottleneck_s * 1e3, plan.gap, PIPELINE_GAP, began_s)]
    for only in (True, False):
        began_s = time.perf_counter()
        found = plan_workload(
            published, accelerators_only=only, max_gap=WORKLOAD_GAP / 2, time_limit_s=TIME_LIMIT_S
        )
        shown.append(told(found.objective, found.gap, WORKLOAD_GAP, began_s))
    return shown


def told(objective_ms: float, gap: float, asked: float, began_s: float) -> tuple[str, bool]:
    is_proven = gap <= asked * 1.001
    rest = "" if is_proven else f", {gap:.1%} open"
    return f"{objective_ms:.2f} ms, {time.perf_counter() - began_s:.1f} s{rest}", is_proven


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="MODEL")
    parser.add_argument("--devices", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--list", action="store_true", help="the names")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in BUILDS]
    if unknown or options.list:
        print(*([f"{unknown[0]!r} is unknown; known are"] if unknown else []), *BUILDS)
        return int(bool(unknown))
    table = Table("model", "nodes", "devices", "pipeline, to 1%", "workload, to 1e-5", "with a CPU")
    num_open = 0
    for name in options.names or BUILDS:
        problem = problem_of(BUILDS[name])
        for num_devices in options.devices:
            shown = planned(name, problem, num_devices)
            num_open += sum(not is_proven for _, is_proven in shown)
            cells = [cell for cell, _ in shown]
            table.add_row(name, f"{len(problem.blocks)}", f"{num_devices}", *cells)
            print(name, num_devices, *cells, sep=" | ", file=sys.stderr, flush=True)
    Console(width=130).print(table)
    print(f"{num_open} not proven within {TIME_LIMIT_S:.0f} s each")
    return 0


if __name__ == "__main__":
    sys.exit(main())
