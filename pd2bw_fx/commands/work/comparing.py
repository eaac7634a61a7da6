"""Compares training methods on one model and one cluster."""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from pd2bw_fx.cluster import Cluster
from pd2bw_fx.commands.common import named_cluster
from pd2bw_fx.commands.options import in_options, wishes
from pd2bw_fx.commands.work.models import called, loaded, named_model
from pd2bw_fx.compare import Figures, LeftOut, Training, compare
from pd2bw_fx.errors import InputError
from pd2bw_fx.optimizer_names import groups_named, optimizer_named
from pd2bw_fx.passes.schedule import training_methods
from pd2bw_fx.pipeline import Pipeline
from pd2bw_fx.report.compared import compared_svg
from pd2bw_fx.report.curves import loss_curves
from pd2bw_fx.report.picture import write_picture
from pd2bw_fx.train import text_batches
from pd2bw_fx.units import format_bytes

_COLUMNS = ("method", "simulated/s", "idle", "memory", "versions", "delay")
_TRAINED = ("measured/s", "loss")
_WIDE = 120


def compare_methods(options: argparse.Namespace) -> int:
    model, cluster = named_model(options), Cluster.of(named_cluster(options))
    training = None
    if not options.simulate:
        training = Training(
            batches=functools.partial(_batches, options),
            optimizer=optimizer_named(options.optimizer, options.lr, loaded),
            parameter_options=lambda pipe: groups_named(options.optimizer, pipe.graph),
            rounds=options.rounds,
        )
    found: list[Figures | LeftOut] = []
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        rounds = 1 if options.simulate else options.rounds
        methods = options.methods or training_methods()
        task = progress.add_task("methods", total=rounds * len(methods))
        figures = compare(
            model,
            cluster,
            methods=methods,
            microbatches_per_update=options.microbatches,
            training=training,
            on_run=lambda method: progress.update(task, advance=1, description=method),
            profile_cache=not options.no_profile_cache,
            **wishes(options),
        )
        for each in figures:
            found.append(each)
            if isinstance(each, LeftOut):
                progress.update(task, advance=rounds, description=each.method)
    used = [each for each in found if isinstance(each, Figures)]
    left_out = [each for each in found if isinstance(each, LeftOut)]
    if options.output is not None:
        if not used:
            raise InputError("no method can be used here; there is no timeline to draw")
        write_picture(compared_svg([each.timeline for each in used]), options.output)
    if options.json:
        rest = [{"method": e.method, "reason": e.reason, "fits": e.fits} for e in left_out]
        print(json.dumps({"methods": [each.to_json() for each in used], "left_out": rest}))
    else:
        _print(used, left_out, is_trained=training is not None)
    if options.losses is not None:  # last: the table says why there may be none
        loss_curves({each.method: each.losses for each in used if each.losses}, options.losses)
    return 0 if used else 1


def _batches(options: argparse.Namespace, pipe: Pipeline) -> Iterable[Any]:
    """Returns as many batches as there are updates."""
    if not options.data:
        return text_batches(pipe, options.updates)
    return itertools.islice(called(options.data, loaded(options.data)), options.updates)


def _print(used: Sequence[Figures], left_out: Sequence[LeftOut], *, is_trained: bool) -> None:
    """Prints a table that a document can take as it is, and what its columns mean."""
    table = Table(*_COLUMNS, *(_TRAINED if is_trained else ()), box=box.MARKDOWN)
    limits = sorted({each.fullest.limit_bytes for each in used})
    for each in used:
        least, most = each.delays
        held = format_bytes(each.fullest.total_bytes)
        cells = [
            each.method,
            f"{each.microbatches_per_s:.4g}",
            f"{each.bubble:.1%}",
            held if len(limits) == 1 else f"{held} of {format_bytes(each.fullest.limit_bytes)}",
            str(each.versions),
            str(most) if least == most else f"{least} to {most}",
        ]
        if is_trained:
            cells += [_measured(each.measured), _shown(each.loss)]
        table.add_row(*cells)
    # The table is printed at its full width: a terminal breaks lines better than the table breaks words.
    Console(width=max(Console().width, _WIDE)).print(table)
    of = f", of {format_bytes(limits[0])}" if len(limits) == 1 else ""
    print(
        "/s: microbatches a second; idle: of all devices' time in the steady state; memory: the fullest "
        f"device's{of}; delay: updates a gradient is behind"
        + "; loss: of the trained weights on the last batch"
        * is_trained
    )
    for left in left_out:
        print(f"{left.method} {'is left out' if left.fits else 'does not fit'}: {in_options(left.reason)}")
    for each in used:
        if each.not_trained is not None:
            print(f"{each.method} was not trained: {each.not_trained}")


def _measured(rounds: Sequence[float]) -> str:
    """Returns the median, and how far the rounds are apart."""
    if len(rounds) < 2:
        return _shown(next(iter(rounds), None))
    return f"{statistics.median(rounds):.4g} ({min(rounds):.3g} to {max(rounds):.3g})"


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
