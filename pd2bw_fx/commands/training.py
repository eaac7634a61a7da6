"""The commands that train."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pd2bw_fx.commands.common import check_folder, check_pipeline, check_writable, command, model_command
from pd2bw_fx.errors import UsageError
from pd2bw_fx.optimizer_names import OPTIMIZER_NAMES, check_optimizer

REGISTERED_BY = "--registered-by"  # the model whose code knows what a rank's stages call


def add(commands: Any) -> None:
    """demo, train"""
    demo = command(
        commands,
        "demo",
        "plan, read, train and export a small GPT",
        "pd2bw-fx demo -o demo_out",
    )
    demo.add_argument("-o", "--output", type=Path, default=Path("demo_out"), help="folder for the pictures")
    demo.add_argument("--updates", type=int, default=200, help="training updates (default 200)")
    demo.set_defaults(run=_demo)

    train = model_command(
        commands,
        "train",
        "train with one process for each rank, started here or by torchrun",
        "pd2bw-fx train gpt --cluster 2 --updates 300 --lr 3e-4 --checkpoint gpt_run",
        runs=True,
    )
    train.add_argument(
        "--data", help="module:callable that gives an iterable of batches (default: real text)"
    )
    train.add_argument("--optimizer", default="adamw", help=f"{OPTIMIZER_NAMES}, or module:callable (adamw)")
    train.add_argument("--lr", type=float, help="learning rate (default: torch's)")
    train.add_argument("--updates", type=int, default=300, help="updates in all (default 300)")
    train.add_argument(
        "--seed", type=int, default=0, help="seed of fresh weights, dropout and the text's order (default 0)"
    )
    train.add_argument("--replicas", type=int, help="processes for each stage (default 1)")
    train.add_argument("--precision", choices=("bf16", "fp16"), help="compute under autocast")
    train.add_argument("--compile", action="store_true", help="compile the stages (torch.compile)")
    train.add_argument(
        "--checkpoint",
        type=Path,
        help="folder for checkpoints, also at the end; if it has one, training goes on from it, with its "
        "optimizer and learning rate",
    )
    train.add_argument("--every", type=int, default=100, help="updates between checkpoints (default 100)")
    train.add_argument("--json", action="store_true", help="print a line of JSON for each report")
    train.add_argument(
        "--metrics",
        type=Path,
        help="file to write losses and times to, for report (default: metrics.json in MODEL or --checkpoint)",
    )
    train.add_argument(
        "--trace",
        type=Path,
        help="file for the timeline of the last updates, all ranks on one clock: .json, .svg or .png",
    )
    train.add_argument(
        "--record", type=int, default=8, help="updates in the trace and in the metrics (default 8)"
    )
    train.add_argument("-o", "--output", type=Path, help="file for the trained weights (.safetensors)")
    train.add_argument(REGISTERED_BY, dest="registered_by", help=argparse.SUPPRESS)
    train.set_defaults(run=_train)


def _demo(options: argparse.Namespace) -> int:
    if options.updates < 1:
        raise UsageError(f"--updates is {options.updates}; at least one is needed")
    from pd2bw_fx.commands.work import demo, seeded

    return seeded(demo.demo, options)


def _train(options: argparse.Namespace) -> int:
    for name in ("updates", "every", "record", "microbatches", "replicas"):
        given = getattr(options, name)
        if given is not None and given < 1:
            raise UsageError(f"--{name} is {given}; at least 1 was expected")
    if options.lr is not None and not options.lr >= 0:
        raise UsageError(f"--lr is {options.lr}; 0 or more was expected")
    if options.trace is not None and options.trace.suffix not in (".json", ".svg", ".png"):
        raise UsageError(
            f"--trace is {options.trace}; a name that ends with .json, .svg or .png was expected"
        )
    if options.output is not None and options.output.suffix != ".safetensors":
        raise UsageError(f"--output is {options.output}; a name that ends with .safetensors was expected")
    for path in (options.trace, options.output):
        check_writable(path)
    check_folder(options.checkpoint)
    check_optimizer(options.optimizer, options.lr)
    check_pipeline(options)
    from pd2bw_fx.commands.work import seeded, training

    return seeded(training.train, options)
