"""Trains: by one process for each rank, started here or by torchrun."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from rich.console import Console

from pd2bw_fx.actions import RunRequest
from pd2bw_fx.commands.common import saved_folder
from pd2bw_fx.commands.training import REGISTERED_BY
from pd2bw_fx.commands.work.models import called, loaded, model_named, named_pipeline
from pd2bw_fx.errors import UsageError
from pd2bw_fx.metrics import FILE
from pd2bw_fx.optimizer_names import groups_named, optimizer_named
from pd2bw_fx.pipeline import Pipeline
from pd2bw_fx.rank_processes import start_processes
from pd2bw_fx.runtime.job import work_for
from pd2bw_fx.runtime.launcher import is_under_torchrun
from pd2bw_fx.source_check import NAMESPACES_OF_TORCH, operators_called
from pd2bw_fx.train import TrainOptions, run_training, text_batches

_OF_A_RANK = (
    "data", "optimizer", "lr", "updates", "seed", "method", "microbatches", "replicas", "precision",
    "checkpoint", "every", "metrics", "trace", "record", "output",
)  # fmt: skip
_SWITCHES_OF_A_RANK = ("compile", "json")


def train(options: argparse.Namespace) -> int:
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
            compile=options.compile,
        ),
        console=Console(quiet=not is_first),
    )
    return 0


def _train_here(options: argparse.Namespace) -> int:
    """Splits once, and lets torchrun's launcher start one process for each rank."""
    pipe = named_pipeline(options)
    request = RunRequest(options.method, options.microbatches, "auto", options.replicas)
    num_ranks = work_for(pipe, request).num_ranks
    if not options.data:
        text_batches(pipe, options.updates)  # refuses a model of anything but text before ranks are started
    with tempfile.TemporaryDirectory(prefix="pd2bw_fx_") as folder:
        pipe.save(Path(folder) / "pipeline")
        words = _words(options, Path(folder) / "pipeline")
        if _custom_operators(pipe) and ":" in str(options.model):
            words.append(f"{REGISTERED_BY}={options.model}")
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
    words += [f"--{name}" for name in _SWITCHES_OF_A_RANK if getattr(options, name)]
    return ["train", str(folder), *words]
