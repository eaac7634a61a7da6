"""What an optimizer loses to gradients that are one update late: 2BW and synchronous after equal updates.

    python benchmarks/delay.py [--lr 3e-3] [--updates 300] [--seeds 3] [-o delay.json] [--plot docs/delay.png]
    python benchmarks/delay.py --steps small --plot docs/delay_small_steps.png
    python benchmarks/delay.py --steps momentum --plot docs/delay_momentum.png

A GPT on real text, in one process by the rules of `runtime/reference.py`, which the engine equals. With
large steps, 4 layers and three optimizers at one learning rate (`--search` tries three of them), after a
warm-up; with small ones, 2 layers and AdamW at a twentieth of that rate, which falls to zero along a cosine,
or SGD with momentum 0.9 at such a rate.
The last loss is the mean of the last 20 updates, or 500 small ones. Losses do not depend on the load of the
machine; a run that was stopped goes on from the runs that its output file has.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from torch.optim.lr_scheduler import LambdaLR

from pd2bw_fx.models.gpt import GPT, GPTConfig
from pd2bw_fx.models.text import byte_batches
from pd2bw_fx.optim import MuonWithAdamW, nadamw
from pd2bw_fx.runtime.reference import train_reference

mpl.use("Agg")
import matplotlib.pyplot as plt

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "AdamW": torch.optim.AdamW,
    "NAdamW": nadamw,
    "Muon": MuonWithAdamW,
    "SGD": functools.partial(torch.optim.SGD, momentum=0.9),
}
RATES = (3e-4, 1e-3, 3e-3)
Run = tuple[str, str, int]  # optimizer, method, seed


@dataclass(frozen=True, slots=True)
class Setting:
    """`last`: updates at the end whose mean loss counts; the plot has means of half as many."""

    config: GPTConfig
    microbatches: int
    microbatch: int
    lr: float
    updates: int
    warm_up: int
    last: int
    falls: bool
    optimizers: tuple[str, ...]


SETTINGS = {
    "large": Setting(
        GPTConfig(256, sequence_length=64, num_layers=4, num_heads=4, width=128, dropout=0.0),
        microbatches=4,
        microbatch=8,
        lr=3e-3,
        updates=300,
        warm_up=20,
        last=20,
        falls=False,
        optimizers=("AdamW", "NAdamW", "Muon"),
    ),
    "small": Setting(
        GPTConfig(256, sequence_length=64, num_layers=2, num_heads=4, width=64, dropout=0.0),
        microbatches=2,
        microbatch=2,
        lr=1.5e-4,
        updates=12_000,
        warm_up=600,
        last=500,
        falls=True,
        optimizers=("AdamW",),
    ),
}
SETTINGS["momentum"] = replace(SETTINGS["small"], lr=2e-3, updates=8_000, warm_up=400, optimizers=("SGD",))


def trained(setting: Setting, name: str, lr: float, method: str, seed: int, num_updates: int) -> list[float]:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = GPT.from_config(setting.config)
    batches: Iterable[Any] = byte_batches(
        batch_size=setting.microbatches * setting.microbatch,
        sequence_length=setting.config.sequence_length,
        seed=seed,
        num_batches=num_updates,
    )
    result = train_reference(
        model,
        batches,
        optimizer=functools.partial(OPTIMIZERS[name], lr=lr),
        lr_scheduler=functools.partial(
            LambdaLR, lr_lambda=functools.partial(rate_at, setting=setting, num_updates=num_updates)
        ),
        parameter_options=heads_to_adamw if name == "Muon" else None,
        microbatches_per_update=setting.microbatches,
        method=method,
    )
    return list(result.losses)


def rate_at(update: int, *, setting: Setting, num_updates: int) -> float:
    """The share of the learning rate: a line up, then all of it, or a cosine down to zero."""
    first = 1 / setting.warm_up
    warm = min(1.0, first + (1 - first) * update / setting.warm_up)
    return warm * (0.5 * (1.0 + math.cos(math.pi * update / num_updates)) if setting.falls else 1.0)


def heads_to_adamw(name: str, parameter: torch.nn.Parameter) -> dict[str, str]:
    return {"kind": "muon" if name.startswith("blocks.") else "adamw"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", choices=SETTINGS, default="large")
    parser.add_argument("--lr", type=float, help="default: 3e-3, 1.5e-4 for small steps, 2e-3 for momentum")
    parser.add_argument("--updates", type=int, help="default: 300, 12,000 small ones, or 8,000 of momentum")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--search", action="store_true", help="losses of seed 0 for several learning rates")
    parser.add_argument("--processes", type=int, help="runs at a time (default: one for each core)")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    setting = SETTINGS[options.steps]
    setting = replace(setting, lr=options.lr or setting.lr, updates=options.updates or setting.updates)
    with ProcessPoolExecutor(options.processes) as pool:
        if options.search:
            search(pool, setting)
            return
        losses = all_runs(pool, setting, options.seeds, options.output)
    print_table(losses, setting)
    if options.plot:
        draw(losses, setting, options.plot)


def all_runs(
    pool: ProcessPoolExecutor, setting: Setting, num_seeds: int, path: Path | None
) -> dict[Run, list[float]]:
    """Losses by optimizer, method and seed; written to the output file, if there is one, as they come."""
    there = json.loads(path.read_text()) if path is not None and path.exists() else {}
    of = f"{setting.config.num_layers}/{setting.updates}/{setting.lr:g}"
    wanted = {
        f"{name}/{method}/{seed}/{of}": (name, method, seed)
        for seed in range(num_seeds)
        for name in setting.optimizers
        for method in ("synchronous", "2bw")
    }
    runs = {
        pool.submit(trained, setting, name, setting.lr, method, seed, setting.updates): key
        for key, (name, method, seed) in wanted.items()
        if key not in there
    }
    for done in as_completed(runs):
        there[runs[done]] = done.result()
        if path is not None:
            path.write_text(json.dumps(there))
    return {run: there[key] for key, run in wanted.items()}


def search(pool: ProcessPoolExecutor, setting: Setting) -> None:
    runs = {
        (name, lr, method): pool.submit(trained, setting, name, lr, method, 0, setting.updates)
        for name in setting.optimizers
        for lr in RATES
        for method in ("synchronous", "2bw")
    }
    for (name, lr, method), run in runs.items():
        mean = statistics.mean(run.result()[-setting.last :])
        print(f"{name:8} {lr:.0e}  {method:12} {mean:.3f}", flush=True)


def print_table(losses: dict[Run, list[float]], setting: Setting) -> None:
    print("| optimizer | synchronous | 2BW | 2BW over synchronous |")
    print("|---|---|---|---|")
    for name in setting.optimizers:
        last = {
            method: [
                statistics.mean(curve[-setting.last :])
                for (n, m, _), curve in losses.items()
                if (n, m) == (name, method)
            ]
            for method in ("synchronous", "2bw")
        }
        ratios = [late / now - 1 for late, now in zip(last["2bw"], last["synchronous"], strict=True)]
        cells = [f"{statistics.mean(v):.3f} ({min(v):.3f} to {max(v):.3f})" for v in last.values()]
        over = f"{statistics.mean(ratios):+.1%} ({min(ratios):+.1%} to {max(ratios):+.1%})"
        print(f"| {name} | {cells[0]} | {cells[1]} | {over} |")


def draw(losses: dict[Run, list[float]], setting: Setting, path: Path) -> None:
    count, width = len(setting.optimizers), setting.last // 2
    size = (12, 4) if count > 1 else (7, 4)
    figure, axes = plt.subplots(1, count, figsize=size, sharey=True, squeeze=False, layout="constrained")
    colours = {"synchronous": "#e8612c", "2bw": "#2474d5"}
    for axis, name in zip(axes[0], setting.optimizers, strict=True):
        for (n, method, seed), curve in losses.items():
            if n == name:
                means = [statistics.fmean(curve[at : at + width]) for at in range(0, len(curve), width)]
                places = range(width // 2, len(curve) + width // 2, width)
                label = method if seed == 0 else None
                axis.plot(places[: len(means)], means, color=colours[method], linewidth=1.2, label=label)
        axis.set_title(name)
        axis.set_xlabel("update")
        axis.grid(color="#dddddd")
    axes[0][0].set_ylabel(f"loss (mean of {width} updates)")
    axes[0][0].legend()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
