"""Commands that train."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from pd2bw_fx.commands.common import add_method, command, loaded, model_command, named_pipeline, saved_folder
from pd2bw_fx.demo import run_demo
from pd2bw_fx.errors import InputError
from pd2bw_fx.metrics import FILE
from pd2bw_fx.runtime.job import work_for
from pd2bw_fx.train import (
    OPTIMIZER_NAMES,
    TrainOptions,
    groups_named,
    is_under_torchrun,
    optimizer_named,
    run_training,
    start_processes,
    text_batches,
)


def add(commands: Any) -> None:
    """demo, train"""
    demo = command(
        commands,
        "demo",
        "the whole way through on a small GPT: plan, read, train, export",
        "pd2bw-fx demo -o demo_out",
    )
    demo.add_argument("-o", "--output", type=Path, default=Path("demo_out"), help="folder for the pictures")
    demo.add_argument("--updates", type=int, default=200, help="training updates (default 200)")
    demo.set_defaults(run=_demo)

    train = model_command(
        commands,
        "train",
        "train with one process a stage, started here or by torchrun",
        "pd2bw-fx train gpt --cluster 2 --updates 300 --lr 3e-4 --checkpoint gpt_run",
    )
    train.add_argument(
        "--data", help="module:callable that gives an iterable of batches (default: real text)"
    )
    train.add_argument("--optimizer", default="adamw", help=f"{OPTIMIZER_NAMES}, or module:callable (adamw)")
    train.add_argument("--lr", type=float, help="learning rate (default: torch's)")
    train.add_argument("--updates", type=int, default=300, help="updates in all (default 300)")
    add_method(train)
    train.add_argument("--microbatches", type=int, help="microbatches an update (default: the plan's)")
    train.add_argument("--replicas", type=int, help="processes for each stage (default 1)")
    train.add_argument("--precision", choices=("bf16", "fp16"), help="compute under autocast")
    train.add_argument("--checkpoint", type=Path, help="folder to write to, and to go on from")
    train.add_argument("--every", type=int, default=100, help="updates between checkpoints (default 100)")
    train.add_argument("--json", action="store_true", help="a line of JSON for each report, for machines")
    train.add_argument(
        "--metrics",
        type=Path,
        help="file for losses and times, for report (default: metrics.json in MODEL or --checkpoint)",
    )
    train.add_argument("-o", "--output", type=Path, help="the trained weights, as safetensors")
    train.set_defaults(run=_train)


def _demo(options: argparse.Namespace) -> int:
    if options.updates < 1:
        raise InputError(f"--updates is {options.updates}; at least one is needed")
    run_demo(options.output, num_updates=options.updates, console=Console())
    return 0


def _train(options: argparse.Namespace) -> int:
    if options.updates < 1 or options.every < 1:
        raise InputError("--updates and --every must be 1 or more")
    optimizer = optimizer_named(options.optimizer, options.lr, loaded)
    if options.metrics is None and (folder := saved_folder(options) or options.checkpoint) is not None:
        options.metrics = Path(folder) / FILE
    if not is_under_torchrun():
        return _train_here(options)
    is_first = int(os.environ["RANK"]) == 0
    pipe = named_pipeline(options)
    batches = loaded(options.data)() if options.data else text_batches(pipe, options.updates)
    run_training(
        pipe,
        batches,
        optimizer=optimizer,
        parameter_options=groups_named(options.optimizer, pipe.graph),
        options=TrainOptions(
            num_updates=options.updates,
            method=options.method,
            microbatches_per_update=options.microbatches,
            checkpoint=options.checkpoint,
            checkpoint_every=options.every,
            as_json=options.json,
            output=options.output,
            metrics=options.metrics,
            replicas=options.replicas,
            precision=options.precision,
        ),
        console=Console(quiet=not is_first),
    )
    return 0


def _train_here(options: argparse.Namespace) -> int:
    """Split once, and have torchrun's launcher start one process for each rank."""
    given = sys.argv[1:] if options.arguments is None else list(options.arguments)
    if options.metrics is not None:
        given += ["--metrics", str(options.metrics)]
    with tempfile.TemporaryDirectory(prefix="pd2bw_fx_") as folder:
        pipe = named_pipeline(options)
        pipe.save(Path(folder) / "pipeline")
        if options.cluster is not None:
            at = given.index("--cluster") if "--cluster" in given else None
            given = [g for g in given if not g.startswith("--cluster=")]
            if at is not None:
                del given[at : at + 2]
        given[given.index(options.model)] = str(Path(folder) / "pipeline")
        work = work_for(
            pipe,
            method=options.method,
            microbatches_per_update=options.microbatches,
            replicas=options.replicas,
        )
        start_processes(work.num_ranks, given)
        return 0
