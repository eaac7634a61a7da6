"""`pd2bw-fx train`: one process a stage, under torchrun or started here."""

from __future__ import annotations

import functools
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import save_file
from torch import Tensor

from pd2bw_fx.errors import InputError
from pd2bw_fx.models.text import byte_batches
from pd2bw_fx.pipeline import Pipeline
from pd2bw_fx.runtime.engine import Engine

_OPTIMIZERS = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}
_REPORTS_A_RUN = 20


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """`checkpoint` is a folder to write to every so many updates and to go on from, if there is one in it."""

    num_updates: int
    method: str | None = None
    microbatches_per_update: int | None = None
    checkpoint: Path | None = None
    checkpoint_every: int = 100
    as_json: bool = False
    output: Path | None = None  # for the trained weights, as safetensors


def is_under_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def start_processes(num_processes: int, arguments: Sequence[str]) -> int:
    """This very command under torchrun, with one process a stage; returns its exit code."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_processes)]
    threads = str(max(1, len(os.sched_getaffinity(0)) // num_processes))
    environment = {"OMP_NUM_THREADS": threads} | os.environ
    return subprocess.run([*command, "-m", "pd2bw_fx", *arguments], env=environment, check=False).returncode


def optimizer_named(name: str, lr: float | None, load: Callable[[str], Any]) -> Callable[[Any], Any]:
    """One of torch's by name, or what `module:callable` gives for parameters."""
    if name in _OPTIMIZERS:
        return functools.partial(_OPTIMIZERS[name], **({} if lr is None else {"lr": lr}))
    if lr is not None:
        raise InputError("--lr goes with adamw, adam or sgd; an optimizer of your own brings its rate itself")
    found: Callable[[Any], Any] = load(name)
    return found


def text_batches(pipe: Pipeline, num_updates: int) -> Iterable[Any]:
    """Real text for a model that takes tokens and targets of the same shape, as bytes."""
    specs = pipe.graph.inputs
    if set(specs) != {"tokens", "targets"}:
        raise InputError(
            f"{pipe.graph.model_name} takes {', '.join(specs)}; name its batches with --data "
            "module:callable, something that gives an iterable of them"
        )
    example = specs["tokens"].example_shape
    assert example is not None
    size = pipe.plan.microbatches_per_update * example[0]
    return byte_batches(batch_size=size, sequence_length=example[1], seed=0, num_batches=num_updates)


def run_training(
    pipe: Pipeline | None,
    batches: Iterable[Any],
    *,
    optimizer: Callable[[Any], Any],
    options: TrainOptions,
    console: Console,
) -> None:
    """Train under torchrun; rank 0 tells the loss and the throughput."""
    engine = Engine.from_pipeline(
        pipe,
        optimizer=optimizer,
        microbatches_per_update=options.microbatches_per_update,
        method=options.method,
    )
    with engine:
        first = 0
        if options.checkpoint is not None and (options.checkpoint / "latest").exists():
            first = engine.load_checkpoint(options.checkpoint)
        with _Reports(engine, first, options, console) as reports:
            for batch in itertools.islice(batches, first, options.num_updates):
                loss = engine.step(batch)
                if options.checkpoint is not None and engine.updates % options.checkpoint_every == 0:
                    engine.save_checkpoint(options.checkpoint)
                # Every rank reads the loss, so that a failure of its source is noticed everywhere.
                if reports.are_due:
                    reports.tell(float(loss))
        if engine.updates == first and first < options.num_updates:
            raise InputError("the data gave no batch; --data must name something that gives an iterable")
        weights = engine.state_dict()
        if options.output is not None and engine.rank == 0:
            save_model_weights(weights, options.output)


def save_model_weights(weights: Mapping[str, Tensor], path: Path) -> None:
    """Under the model's own names. A tied parameter is written under each of them."""
    save_file({name: tensor.contiguous().clone() for name, tensor in weights.items()}, path)


class _Reports:
    """What rank 0 prints: a bar on a terminal, lines elsewhere, JSON lines for machines."""

    def __init__(self, engine: Engine, first: int, options: TrainOptions, console: Console) -> None:
        self._engine = engine
        self._options = options
        self._every = max(1, options.num_updates // _REPORTS_A_RUN)
        self._told = first
        self._began = time.perf_counter()
        columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[told]}"))
        self._bar = Progress(*columns, TimeRemainingColumn(), console=console)
        self._has_bar = engine.rank == 0 and console.is_terminal and not options.as_json
        self._task = self._bar.add_task("training", total=options.num_updates, completed=first, told="")

    def __enter__(self) -> _Reports:
        if self._has_bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._has_bar:
            self._bar.stop()

    @property
    def are_due(self) -> bool:
        return self._engine.updates % self._every == 0 or self._engine.updates == self._options.num_updates

    def tell(self, loss: float) -> None:
        now = time.perf_counter()
        updates = self._engine.updates
        rate = (updates - self._told) * self._engine.job.microbatches_per_update / (now - self._began)
        self._told, self._began = updates, now
        if self._engine.rank != 0:
            return
        if self._options.as_json:
            print(json.dumps({"update": updates, "loss": loss, "microbatches_per_s": rate}), flush=True)
        elif self._has_bar:
            self._bar.update(
                self._task, completed=updates, told=f"loss {loss:.4f}, {rate:.1f} microbatches/s"
            )
        else:
            print(f"update {updates}: loss {loss:.4f}, {rate:.1f} microbatches/s", flush=True)
