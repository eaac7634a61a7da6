"""`pd2bw-fx train`: what each rank does, under torchrun or started here."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from pd2bw_fx.errors import InputError
from pd2bw_fx.files import writing
from pd2bw_fx.metrics import Metrics
from pd2bw_fx.models.text import byte_batches
from pd2bw_fx.pipeline import Pipeline
from pd2bw_fx.report.parts import write_timeline
from pd2bw_fx.runtime.checkpoint import updates_of
from pd2bw_fx.runtime.engine import Engine
from pd2bw_fx.runtime.launcher import leave_output
from pd2bw_fx.runtime.loss import Loss
from pd2bw_fx.runtime.optimizing import ParameterOptions
from pd2bw_fx.runtime.options import Precision
from pd2bw_fx.tensor_files import save_tensors
from pd2bw_fx.units import counted

_REPORTS_A_RUN = 20


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """The options of a training run under torchrun.

    `checkpoint` is a folder to which a checkpoint is written every so many updates; one that is in it is
    loaded first.
    """

    num_updates: int
    method: str | None = None
    microbatches_per_update: int | None = None
    checkpoint: Path | None = None
    checkpoint_every: int = 100
    as_json: bool = False
    output: Path | None = None  # a file for the trained weights, as safetensors
    metrics: Path | None = None  # a file for what the run measured
    trace: Path | None = None  # a file for the timeline of the last updates
    record: int = 8  # updates whose actions are in the metrics and the timeline
    replicas: int | None = None
    precision: Precision | None = None
    compile: bool = False


def text_batches(pipe: Pipeline, num_updates: int, *, seed: int = 0) -> Iterable[Any]:
    """Returns real text as bytes, for a model that takes tokens and targets of the same shape."""
    specs = pipe.graph.inputs
    if set(specs) != {"tokens", "targets"}:
        raise InputError(
            f"{pipe.graph.model_name} takes {', '.join(specs)}; name its batches with --data "
            "module:callable, something that gives an iterable of them"
        )
    example = specs["tokens"].example_shape
    assert example is not None
    size = pipe.plan.microbatches_per_update * example[0]
    return byte_batches(batch_size=size, sequence_length=example[1], seed=seed, num_batches=num_updates)


def _fitting(batches: Iterable[Any], pipe: Pipeline) -> Iterable[Any]:
    """Returns the batches, each checked against what the model was traced with; errors have its number."""
    assert pipe.batch_layout is not None
    for number, batch in enumerate(batches):
        try:
            pipe.batch_layout.flatten(batch)
        except InputError as error:
            raise InputError(f"batch {number}: {error}") from None
        yield batch


def run_training(
    pipe: Pipeline,
    batches: Iterable[Any],
    *,
    optimizer: Callable[[Any], Any],
    parameter_options: ParameterOptions | None = None,
    options: TrainOptions,
    console: Console,
) -> None:
    """Trains under torchrun; rank 0 prints the loss and the throughput."""
    engine = Engine.from_pipeline(
        pipe,
        optimizer=optimizer,
        parameter_options=parameter_options,
        microbatches_per_update=options.microbatches_per_update,
        method=options.method,
        replicas=options.replicas,
        precision=options.precision,
        compile=options.compile,
        record=0 if options.metrics is None and options.trace is None else options.record,
    )
    with engine:
        batches = iter(_fitting(batches, pipe))
        first, earlier = _gone_on(engine, batches, options)
        losses, told_s = _trained(engine, batches, first, options, console)
        _tell_of_missing_batches(engine, first, options)
        if losses and options.checkpoint is not None and engine.updates % options.checkpoint_every:
            engine.save_checkpoint(options.checkpoint)
        weights = engine.state_dict()
        if options.output is not None and engine.rank == 0:
            save_model_weights(weights, options.output)
        if losses and (options.metrics is not None or options.trace is not None):
            _save_measured(engine, losses, told_s, first, options, earlier)
        if losses and engine.rank == 0 and not options.as_json:
            _tell_where(options)


def _gone_on(engine: Engine, batches: Iterator[Any], options: TrainOptions) -> tuple[int, Metrics | None]:
    """Loads the checkpoint, if there is one, and passes over the batches before it.

    Returns the number of updates before it, and what they measured.
    """
    if options.checkpoint is None or not (options.checkpoint / "latest").exists():
        return 0, None
    # Before the generators are as they were then: a loader that shuffles by torch's draws its order from
    # them when it begins, and must begin as it did the first time.
    skipped = updates_of(options.checkpoint)
    next(itertools.islice(batches, skipped, skipped), None)
    first = engine.load_checkpoint(options.checkpoint)
    earlier = _measured_before(options.metrics)
    left = "goes on" if first < options.num_updates else "nothing is left to do"
    _say(f"{options.checkpoint} has {counted(first, 'update')}: {left}", engine, options)
    return first, earlier


def _trained(
    engine: Engine, batches: Iterator[Any], first: int, options: TrainOptions, console: Console
) -> tuple[list[Loss], list[float]]:
    """Trains; returns the losses, and the times before and after each update by this process's clock."""
    losses, told_s = list[Loss](), [time.perf_counter()]
    with _Reports(engine, first, options, console) as reports:
        for batch in itertools.islice(batches, max(0, options.num_updates - first)):
            loss = engine.step(batch)
            losses.append(loss)
            told_s.append(time.perf_counter())
            if options.checkpoint is not None and engine.updates % options.checkpoint_every == 0:
                engine.save_checkpoint(options.checkpoint)
            # Every rank reads the loss, so that a failure of its source is noticed everywhere.
            if reports.are_due:
                reports.tell(float(loss))
    return losses, told_s


def _tell_of_missing_batches(engine: Engine, first: int, options: TrainOptions) -> None:
    """Says that the data ended early, and raises InputError where it gave nothing."""
    made, wanted = engine.updates, options.num_updates
    if made == first and first < wanted:
        if first > 0:
            raise InputError(f"the data has no batch beyond the {first} that the run was trained on before")
        raise InputError("the data gave no batch; --data must name something that gives an iterable")
    if made < wanted:
        _say(f"the data ended after {made} of {counted(wanted, 'update')}", engine, options)


def _tell_where(options: TrainOptions) -> None:
    """Prints where everything lies that the run has written."""
    places = {
        "weights": options.output,
        "checkpoint": options.checkpoint,
        "metrics": options.metrics,
        "timeline": options.trace,
    }
    told = [f"{name} in {path}" for name, path in places.items() if path is not None]
    if told:
        _print(f"written: {', '.join(told)}")
    if options.output is None and options.checkpoint is None:
        _print("the trained weights are kept nowhere; --output FILE or --checkpoint FOLDER does")


def _say(text: str, engine: Engine, options: TrainOptions) -> None:
    if engine.rank == 0 and not options.as_json:
        _print(text)


def _print(text: str) -> None:
    """Prints for a reader that may have stopped reading, as `head` does: training goes on regardless."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        leave_output()


def _measured_before(path: Path | None) -> Metrics | None:
    """Returns what the run measured that this one goes on from.

    Raises InputError for a file of anything else.
    """
    return None if path is None or not path.is_file() else Metrics.load(path)


def _save_measured(
    engine: Engine,
    losses: Sequence[Loss],
    told_s: Sequence[float],
    first: int,
    options: TrainOptions,
    earlier: Metrics | None,
) -> None:
    """Saves, on rank 0, what was measured, after the metrics of the run that this one went on from."""
    engine.flush()
    metrics = Metrics(
        engine.job.method,
        engine.job.microbatches_per_update,
        tuple(map(float, losses)),
        tuple(end_s - start_s for start_s, end_s in itertools.pairwise(told_s)),
        first_update=first,
        records=engine.records(),
        replicas=engine.job.shape.replicas,
    )
    if engine.rank != 0:
        return
    if options.trace is not None and metrics.timeline is not None:
        write_timeline(metrics.timeline, options.trace)
    path = options.metrics
    if path is not None:
        if first > 0 and earlier is not None:
            metrics = metrics.after(earlier)
        path.parent.mkdir(parents=True, exist_ok=True)
        metrics.save(path)


def save_model_weights(weights: Mapping[str, Tensor], path: Path) -> None:
    """Saves the weights under the model's own names, a tied parameter under each of them."""
    with writing(path):
        save_tensors(weights, path)


class _Reports:
    """Prints reports on rank 0: a bar on a terminal, lines elsewhere, JSON lines for machines."""

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
            told = loss if math.isfinite(loss) else None  # JSON has no word for the others
            _print(json.dumps({"update": updates, "loss": told, "microbatches_per_s": rate}))
        elif self._has_bar:
            self._bar.update(
                self._task, completed=updates, told=f"loss {loss:.4f}, {rate:.1f} microbatches/s"
            )
        else:
            _print(f"update {updates}: loss {loss:.4f}, {rate:.1f} microbatches/s")
