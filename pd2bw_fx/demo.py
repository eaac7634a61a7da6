"""The README's main example: a small GPT from the split to ONNX files, on real text, on this machine."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.syntax import Syntax
from torch import Tensor

from pd2bw_fx.errors import ExportError
from pd2bw_fx.metrics import Metrics
from pd2bw_fx.models.gpt import GPT, GPTConfig
from pd2bw_fx.models.text import byte_batches
from pd2bw_fx.passes.export_onnx import run_onnx
from pd2bw_fx.passes.split import split
from pd2bw_fx.pipeline import Pipeline
from pd2bw_fx.report.curves import loss_curves
from pd2bw_fx.report.timeline import timeline_svg
from pd2bw_fx.runtime.reference import train_reference

_STAGES = 2
_MICROBATCHES = 4
_MICROBATCH_SIZE = 8
_CONFIG = GPTConfig(vocab_size=256, sequence_length=64, num_layers=4, num_heads=4, width=128, dropout=0.0)

Batch = tuple[Tensor, Tensor]


def run_demo(output: Path, *, num_updates: int, console: Console) -> None:
    """Splits, prints, trains beside one process, draws and exports; pictures and files go to `output`."""
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    output.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = GPT.from_config(_CONFIG)
    began = time.perf_counter()

    console.rule("1. split")
    pipe = split(
        model,
        example_args=model.example_inputs(batch_size=_MICROBATCH_SIZE),
        cluster=_STAGES,
        microbatches_per_update=_MICROBATCHES,
    )
    console.print(str(pipe), highlight=False, soft_wrap=True)
    console.print(f"verified: {pipe.verify()}")

    console.rule("2. read a stage")
    source = pipe.stages[1].source
    console.print(Syntax(source, "python").highlight(source), soft_wrap=True)

    console.rule("3. train on real text")
    curves, metrics = _train_three_ways(pipe, model, num_updates, console)
    loss_curves(
        curves, output / "loss.png", title=f"GPT on the text of the Python manual, {num_updates} updates"
    )
    (output / "timeline.svg").write_text(timeline_svg(pipe.simulate()), encoding="utf-8")
    pipe.report(output / "report.html", metrics=metrics)

    console.rule("4. export")
    pipe.save(output / "pipeline")
    manifest = pipe.export_onnx(output / "onnx")
    _check_onnx(pipe, model, output / "onnx", console)
    console.print(
        f"{len(manifest['stages'])} ONNX files and everything else in {output}/ "
        f"({time.perf_counter() - began:.0f} s in all)"
    )


def _train_three_ways(
    pipe: Pipeline, model: GPT, num_updates: int, console: Console
) -> tuple[dict[str, Sequence[float]], Metrics]:
    optimizer = functools.partial(torch.optim.AdamW, lr=3e-4, weight_decay=0.01)
    # A gradient that is one update late needs a warm-up.
    warm_up = functools.partial(torch.optim.lr_scheduler.LinearLR, start_factor=0.02, total_iters=50)
    batches = functools.partial(
        byte_batches,
        batch_size=_MICROBATCHES * _MICROBATCH_SIZE,
        sequence_length=_CONFIG.sequence_length,
        seed=0,
        num_batches=num_updates,
    )
    curves: dict[str, Sequence[float]] = {}
    with _bars(console) as bar:
        advance = bar(f"2BW, {_STAGES} processes", num_updates)
        result = pipe.train_local(
            batches(), optimizer=optimizer, lr_scheduler=warm_up, on_update=advance, record=8
        )
        curves[f"2BW on {_STAGES} processes"] = result.losses
        for label, method in (("one process, synchronous", "synchronous"), ("one process, 2BW rule", "2bw")):
            advance = bar(label, num_updates)
            with _one_thread():
                curves[label] = train_reference(
                    model,
                    batches(),
                    optimizer=optimizer,
                    lr_scheduler=warm_up,
                    microbatches_per_update=_MICROBATCHES,
                    method=method,
                    on_update=advance,
                ).losses
    _report(curves, console)
    return curves, result.metrics


def _report(curves: dict[str, Sequence[float]], console: Console) -> None:
    pipeline, synchronous, reference = curves.values()
    apart = max(abs(a - b) / abs(b) for a, b in zip(pipeline, reference, strict=True))
    tail = max(1, len(pipeline) // 10)
    console.print(
        f"loss {pipeline[0]:.3f} -> {sum(pipeline[-tail:]) / tail:.3f}; synchronous training ends at "
        f"{sum(synchronous[-tail:]) / tail:.3f}"
    )
    console.print(f"largest difference from the single-process 2BW rule at any update: {apart:.1e} (float32)")


@contextmanager
def _one_thread() -> Iterator[None]:
    """Limits this process to one thread, as workers are: two that wait for each other may be slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _bars(console: Console) -> Iterator[Callable[[str, int], Callable[[int, float], None]]]:
    """Yields progress bars with the loss beside them."""
    columns = (
        TextColumn("{task.description:<28}"),
        BarColumn(),
        TextColumn("{task.completed:>4}/{task.total}"),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:

        def bar(label: str, total: int) -> Callable[[int, float], None]:
            task = progress.add_task(label, total=total, loss=float("nan"))

            def advance(update: int, loss: float) -> None:
                progress.update(task, completed=update + 1, loss=loss)

            return advance

        yield bar


def _check_onnx(pipe: Pipeline, model: GPT, folder: Path, console: Console) -> None:
    """Compares the files in onnxruntime, one after another, with the eager model with the trained weights."""
    batch = next(
        byte_batches(batch_size=3, sequence_length=_CONFIG.sequence_length, seed=1, split="validation")
    )
    model.load_state_dict(pipe.state_dict())
    model.eval()
    with torch.no_grad():
        eager = float(model(*batch))
    found = run_onnx(folder, dict(zip(pipe.graph.inputs, batch, strict=True)))
    loss = float(next(iter(found.values())))
    if abs(loss - eager) > 1e-4 * abs(eager):
        raise ExportError(f"onnxruntime's loss is {loss:.6f}, and the model's {eager:.6f}; please report it")
    console.print(f"validation loss {eager:.6f} in PyTorch, {loss:.6f} in onnxruntime")
