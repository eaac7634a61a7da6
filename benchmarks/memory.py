"""Peak memory of every stage, as planned and as the engine allocates it, for methods with and without
recomputation.

    python benchmarks/memory.py [--processes 2] [--methods 2bw gpipe]
        [--vocabulary 512] [--sequence 128] [--width 256] [-o memory.json]
    python benchmarks/memory.py --device cuda --sequence 512 --width 1024   # ranks may share a GPU
    python benchmarks/memory.py --average   # with a moving average of the weights: one copy more

Each rank records all that torch's allocator gives out, from the making of the engine on, over three updates;
on a GPU cuBLAS's workspaces are there before.
Exits with 1 if a peak is more than 5% from its plan.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from launch import told_under_torchrun
from predictions import most_allocated

import pd2bw_fx
from pd2bw_fx.models.gpt import GPT, GPTConfig

CONFIG = GPTConfig(
    vocab_size=512, sequence_length=128, num_layers=8, num_heads=8, width=256, dropout=0.0, tied=False
)
MICROBATCH, UPDATES = 4, 3
# Microbatches an update of two processes.
METHODS = {"2bw": 4, "1f1b": 4, "gpipe": 4, "pipedream": 1, "pipemare": 1}
OPTIMIZER = functools.partial(torch.optim.AdamW, lr=1e-4)
TOLERANCE = 0.05


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--vocabulary", type=int, default=CONFIG.vocab_size, help="of the GPT")
    parser.add_argument("--sequence", type=int, default=CONFIG.sequence_length)
    parser.add_argument("--width", type=int, default=CONFIG.width)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--average", action="store_true", help="keep a moving average of the weights")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    if "RANK" in os.environ:
        work(options)
        return 0
    rows = told_under_torchrun(__file__, options.processes, options.output)
    print_table(rows)
    return int(any(abs(row["planned"] / row["measured"] - 1) > TOLERANCE for row in rows))


def work(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    config = replace(
        CONFIG, vocab_size=options.vocabulary, sequence_length=options.sequence, width=options.width
    )
    model = GPT.from_config(config)
    rows: list[dict[str, Any]] = []
    for method in options.methods:
        m = METHODS[method]
        m = m if m == 1 else m * dist.get_world_size() // 2
        for recompute in (False, True):
            kept = {"weight_average": 0.999} if options.average else {}
            rows += compared(model, method, m, recompute, torch.device(options.device), kept)
    if dist.get_rank() == 0:
        options.output.write_text(json.dumps(rows, indent=1))
    dist.destroy_process_group()


def compared(
    model: GPT, method: str, m: int, recompute: bool, device: torch.device, kept: dict[str, float]
) -> list[dict[str, Any]]:
    """Returns what was planned and measured of each stage. `kept` are options of the engine."""
    pipe = None
    if dist.get_rank() == 0:
        pipe = pd2bw_fx.split(
            model,
            model.example_inputs(batch_size=MICROBATCH),
            cluster=pd2bw_fx.Cluster.uniform(dist.get_world_size(), kind=device.type, memory_bytes="16 GiB"),
            method=method,
            microbatches_per_update=m,
            recompute=recompute,
            memory_model=pd2bw_fx.MemoryModel(optimizer_copies=2 + len(kept)),
            check=False,
        )
    batch = model.example_inputs(batch_size=MICROBATCH * m)
    engines = []

    def train() -> None:
        engine = pd2bw_fx.Engine.from_pipeline(pipe, optimizer=OPTIMIZER, slack=0.0, device=device, **kept)
        engines.append(engine)
        for _ in range(UPDATES * (1 if m > 1 else 8)):
            engine.step(batch)
        engine.flush()

    if device.type == "cuda":
        layer = torch.nn.Linear(8, 8, device=device)
        layer(torch.randn(8, 8, device=device)).sum().backward()
    most = most_allocated(train, device)
    engine = engines.pop()
    peaks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(peaks, most)
    stage_ranks = engine.job.ranks
    engine.close()
    del engine
    gc.collect()
    if pipe is None:
        return []
    return [
        {
            "method": method,
            "recompute": recompute,
            "stage": stage.stage,
            "planned": stage.memory.total_bytes,
            "measured": peaks[stage_ranks[stage.stage]],
        }
        for stage in pipe.plan.stages
    ]


def print_table(rows: list[dict[str, Any]]) -> None:
    print("| method | recompute | stage | planned MiB | measured MiB | plan over measured |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        planned, measured = row["planned"] / 2**20, row["measured"] / 2**20
        again = "yes" if row["recompute"] else "no"
        print(
            f"| {row['method']} | {again} | {row['stage']} | {planned:.1f} | {measured:.1f} "
            f"| {planned / measured - 1:+.1%} |"
        )


if __name__ == "__main__":
    sys.exit(main())
