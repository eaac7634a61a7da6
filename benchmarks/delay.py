"""What an optimizer loses to gradients that are one update late: 2BW and synchronous after equal updates.

    python benchmarks/delay.py [--lr 3e-3] [--updates 300] [--seeds 3] [-o delay.json] [--plot docs/delay.png]

A GPT of 4 layers on real text, in one process by the rules of `runtime/reference.py`, which the engine
equals. All optimizers have one learning rate (`--search` tries three of them) and warm up over 20 updates.
The last loss is the mean of the last 20 updates. Losses do not depend on the load of the machine; a run that
was stopped goes on from the runs that its output file has.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from torch.optim.lr_scheduler import LinearLR

from pd2bw_fx.models.gpt import GPT, GPTConfig
from pd2bw_fx.models.text import byte_batches
from pd2bw_fx.optim import MuonWithAdamW, nadamw
from pd2bw_fx.runtime.reference import train_reference

mpl.use("Agg")
import matplotlib.pyplot as plt

CONFIG = GPTConfig(vocab_size=256, sequence_length=64, num_layers=4, num_heads=4, width=128, dropout=0.0)
MICROBATCHES, MICROBATCH = 4, 8
WARM_UP, LAST = 20, 20
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "AdamW": torch.optim.AdamW,
    "NAdamW": nadamw,
    "Muon": MuonWithAdamW,
}
RATES = (3e-4, 1e-3, 3e-3)
Run = tuple[str, str, int]  # optimizer, method, seed


def trained(name: str, lr: float, method: str, seed: int, num_updates: int) -> list[float]:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = GPT.from_config(CONFIG)
    batches: Iterable[Any] = byte_batches(
        batch_size=MICROBATCHES * MICROBATCH,
        sequence_length=CONFIG.sequence_length,
        seed=seed,
        num_batches=num_updates,
    )
    result = train_reference(
        model,
        batches,
        optimizer=functools.partial(OPTIMIZERS[name], lr=lr),
        lr_scheduler=functools.partial(LinearLR, start_factor=1 / WARM_UP, total_iters=WARM_UP),
        parameter_options=heads_to_adamw if name == "Muon" else None,
        microbatches_per_update=MICROBATCHES,
        method=method,
    )
    return list(result.losses)


def heads_to_adamw(name: str, parameter: torch.nn.Parameter) -> dict[str, str]:
    return {"kind": "muon" if name.startswith("blocks.") else "adamw"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--updates", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--search", action="store_true", help="losses of seed 0 for several learning rates")
    parser.add_argument("--processes", type=int, help="runs at a time (default: one for each core)")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    with ProcessPoolExecutor(options.processes) as pool:
        if options.search:
            search(pool, options.updates)
            return
        losses = all_runs(pool, options)
    print_table(losses)
    if options.plot:
        draw(losses, options.plot)


def all_runs(pool: ProcessPoolExecutor, options: argparse.Namespace) -> dict[Run, list[float]]:
    """Losses by optimizer, method and seed; written to the output file, if there is one, as they come."""
    path: Path | None = options.output
    there = json.loads(path.read_text()) if path is not None and path.exists() else {}
    wanted = {
        f"{name}/{method}/{seed}/{options.updates}/{options.lr:g}": (name, options.lr, method, seed)
        for seed in range(options.seeds)
        for name in OPTIMIZERS
        for method in ("synchronous", "2bw")
    }
    runs = {
        pool.submit(trained, *run, options.updates): key for key, run in wanted.items() if key not in there
    }
    for done in as_completed(runs):
        there[runs[done]] = done.result()
        if path is not None:
            path.write_text(json.dumps(there))
    return {(name, method, seed): there[key] for key, (name, _, method, seed) in wanted.items()}


def search(pool: ProcessPoolExecutor, num_updates: int) -> None:
    runs = {
        (name, lr, method): pool.submit(trained, name, lr, method, 0, num_updates)
        for name in OPTIMIZERS
        for lr in RATES
        for method in ("synchronous", "2bw")
    }
    for (name, lr, method), run in runs.items():
        print(f"{name:8} {lr:.0e}  {method:12} {statistics.mean(run.result()[-LAST:]):.3f}", flush=True)


def print_table(losses: dict[Run, list[float]]) -> None:
    print("| optimizer | synchronous | 2BW | 2BW over synchronous |")
    print("|---|---|---|---|")
    for name in OPTIMIZERS:
        last = {
            method: [
                statistics.mean(c[-LAST:]) for (n, m, _), c in losses.items() if (n, m) == (name, method)
            ]
            for method in ("synchronous", "2bw")
        }
        ratios = [late / now - 1 for late, now in zip(last["2bw"], last["synchronous"], strict=True)]
        cells = [f"{statistics.mean(v):.3f} ({min(v):.3f} to {max(v):.3f})" for v in last.values()]
        over = f"{statistics.mean(ratios):+.1%} ({min(ratios):+.1%} to {max(ratios):+.1%})"
        print(f"| {name} | {cells[0]} | {cells[1]} | {over} |")


def draw(losses: dict[Run, list[float]], path: Path) -> None:
    figure, axes = plt.subplots(1, len(OPTIMIZERS), figsize=(12, 4), sharey=True, layout="constrained")
    colours = {"synchronous": "#e8612c", "2bw": "#2474d5"}
    for axis, name in zip(axes, OPTIMIZERS, strict=True):
        for (n, method, seed), curve in losses.items():
            if n == name:
                smooth = [statistics.mean(curve[max(0, i - 9) : i + 1]) for i in range(len(curve))]
                label = method if seed == 0 else None
                axis.plot(smooth, color=colours[method], linewidth=1.2, label=label)
        axis.set_title(name)
        axis.set_xlabel("update")
        axis.grid(color="#dddddd")
    axes[0].set_ylabel("loss (mean of 10 updates)")
    axes[0].legend()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
