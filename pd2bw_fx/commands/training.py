"""The commands that train."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from pd2bw_fx.actions import RunRequest
from pd2bw_fx.commands.common import (
    called,
    check_folder,
    check_writable,
    command,
    loaded,
    model_command,
    model_named,
    named_pipeline,
    saved_folder,
)
from pd2bw_fx.demo import run_demo
from pd2bw_fx.errors import UsageError
from pd2bw_fx.metrics import FILE
from pd2bw_fx.pipeline import Pipeline
from pd2bw_fx.runtime.job import work_for
from pd2bw_fx.source_check import NAMESPACES_OF_TORCH, operators_called
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

_OF_A_RANK = (
    "data", "optimizer", "lr", "updates", "seed", "method", "microbatches", "replicas", "precision",
    "checkpoint", "every", "metrics", "trace", "record", "output",
)  # fmt: skip
_REGISTERED_BY = "--registered-by"  # the model whose code knows what a rank's stages call


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
    train.add_argument(_REGISTERED_BY, dest="registered_by", help=argparse.SUPPRESS)
    train.set_defaults(run=_train)


def _demo(options: argparse.Namespace) -> int:
    if options.updates < 1:
        raise UsageError(f"--updates is {options.updates}; at least one is needed")
    run_demo(options.output, num_updates=options.updates, console=Console())
    return 0


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
    optimizer = optimizer_named(options.optimizer, options.lr, loaded)
    folder = None if options.started_here else saved_folder(options) or options.checkpoint
    if options.metrics is None and folder is not None:
        options.metrics = folder / FILE
    if not is_under_torchrun():
        return _train_here(options)
    is_first = int(os.environ["RANK"]) == 0
    pipe = named_pipeline(options)
    if options.registered_by is not None:
        _register(options.registered_by, pipe)
    if options.data:
        batches = called(options.data, loaded(options.data))
        if not isinstance(batches, Iterable):
            kind = type(batches).__name__
            raise UsageError(f"{options.data!r} gives a {kind}; an iterable of batches was expected")
    else:
        batches = text_batches(pipe, options.updates, seed=options.seed)
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
            trace=options.trace,
            record=options.record,
            replicas=options.replicas,
            precision=options.precision,
        ),
        console=Console(quiet=not is_first),
    )
    return 0


def _train_here(options: argparse.Namespace) -> int:
    """Splits once, and lets torchrun's launcher start one process for each rank."""
    pipe = named_pipeline(options)
    request = RunRequest(options.method, options.microbatches, "auto", options.replicas)
    num_ranks = work_for(pipe, request).num_ranks
    with tempfile.TemporaryDirectory(prefix="pd2bw_fx_") as folder:
        pipe.save(Path(folder) / "pipeline")
        words = _words(options, Path(folder) / "pipeline")
        if _custom_operators(pipe) and ":" in str(options.model):
            words.append(f"{_REGISTERED_BY}={options.model}")
        start_processes(num_ranks, words)
    return 0


def _custom_operators(pipe: Pipeline) -> set[tuple[str, str]]:
    """Returns the operators that the stages call and that exist only where somebody has defined them."""
    called = {operator for program in pipe.programs for operator in operators_called(program.source)}
    return {(namespace, name) for namespace, name in called if namespace not in NAMESPACES_OF_TORCH}


def _register(model: str, pipe: Pipeline) -> None:
    """Runs the code that defines the stages' operators: the model's file, or the making of the model."""
    loaded(model)
    if not all(hasattr(getattr(torch.ops, namespace), name) for namespace, name in _custom_operators(pipe)):
        with torch.random.fork_rng(devices=[]):
            model_named(model)


def _words(options: argparse.Namespace, folder: Path) -> list[str]:
    """Returns the command of a rank: with these options, for the pipeline in this folder."""
    given = {name: getattr(options, name) for name in _OF_A_RANK}
    words = [f"--{name}={value}" for name, value in given.items() if value is not None]
    return ["train", str(folder), *words, *(["--json"] if options.json else [])]
