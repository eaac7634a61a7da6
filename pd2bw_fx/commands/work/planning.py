"""Splits models, and checks and shows the result."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.syntax import Syntax

from pd2bw_fx.commands.common import is_onnx, saved_folder
from pd2bw_fx.commands.options import plan_in
from pd2bw_fx.commands.work.models import model_named, named_onnx, named_pipeline
from pd2bw_fx.errors import InputError, UsageError
from pd2bw_fx.folder import read_pipeline
from pd2bw_fx.metrics import FILE, Metrics
from pd2bw_fx.onnx_pipeline import OnnxPipeline
from pd2bw_fx.pipeline import Pipeline
from pd2bw_fx.report.page import page_html
from pd2bw_fx.report.parts import picture_of, write_timeline
from pd2bw_fx.report.table import plan_table
from pd2bw_fx.units import counted, format_seconds


def plan(options: argparse.Namespace) -> int:
    pipe = named_onnx(options) if is_onnx(options) else named_pipeline(options)
    why = pipe.explain() if options.explain else None
    if options.json:
        print(json.dumps(pipe.plan.to_json() | ({} if why is None else {"explanation": asdict(why)})))
        return 0
    print(pipe if why is None else f"{pipe}\n\n{why}")
    return 0


def show(options: argparse.Namespace) -> int:
    pipe = named_onnx(options) if is_onnx(options) else named_pipeline(options)
    if not 0 <= options.stage < pipe.plan.num_stages:
        raise UsageError(
            f"--stage {options.stage}: there are stages 0 to {pipe.plan.num_stages - 1}; name one of them"
        )
    if isinstance(pipe, OnnxPipeline):
        print(pipe.text(options.stage))
        return 0
    source = pipe.programs[options.stage].source
    if sys.stdout.isatty():
        Console().print(Syntax(source, "python").highlight(source), soft_wrap=True)
    else:
        print(source, end="")
    return 0


def save(options: argparse.Namespace) -> int:
    pipe = named_onnx(options) if is_onnx(options) else named_pipeline(options)
    pipe.save(options.output)
    if options.json:
        print(json.dumps(pipe.plan.to_json()))
        return 0
    print(pipe)
    print(f"saved in {options.output}")
    return 0


def check(options: argparse.Namespace) -> int:
    folder = options.plan if options.plan.is_dir() else options.plan.parent
    pipe = Pipeline(**read_pipeline(folder, edited=True))
    path = folder / "plan.json" if options.plan.is_dir() else options.plan
    priced = pipe.check_plan(plan_in(path))
    if options.json:
        print(json.dumps(priced.to_json()))
        return 0
    print(plan_table(pipe.graph, pipe.costs, priced))
    given = shlex.quote(str(path))
    print(f"the plan is valid; to have its stages: pd2bw-fx split MODEL --plan {given} -o FOLDER")
    return 0


def verify(options: argparse.Namespace) -> int:
    if is_onnx(options):
        found = named_onnx(options).manifest
        if options.json:
            print(json.dumps({"relative": found["largest_differences_from_model"]}))
            return 0
        for name, difference in found["largest_differences_from_model"].items():
            sizes = ", ".join(map(str, found["batch_sizes_checked"]))
            print(f"{name}: at most {difference:.1e} from what the whole file gives, batch sizes {sizes}")
        return 0
    against = None if options.against is None else model_named(options.against)
    compared = named_pipeline(options).verify(against)
    relative = {difference.name: difference.relative for difference in compared.differences}
    print(json.dumps({"exact": compared.exact, "relative": relative}) if options.json else compared)
    return 0


def simulate(options: argparse.Namespace) -> int:
    timeline = named_pipeline(options).simulate(
        method=options.method,
        microbatches_per_update=options.microbatches,
        num_updates=options.updates,
        replicas=options.replicas,
        jitter=options.jitter,
        slack=options.slack,
    )
    figures = {
        "method": timeline.method,
        "microbatches_per_update": timeline.microbatches_per_update,
        "microbatches_per_s": timeline.throughput,
        "bubble": timeline.bubble,
        "span_s": timeline.span_s,
        "in_flight_peak": list(timeline.in_flight_peak),
        "idle_by_cause_s": [dict(causes) for causes in timeline.idle_by_cause_s],
    }
    if options.output is not None:
        write_timeline(timeline, options.output)
    if options.json:
        print(json.dumps(figures))
        return 0
    print(
        f"{timeline.method}, {counted(timeline.microbatches_per_update, 'microbatch')} an update: "
        f"{timeline.throughput:.4g} microbatches/s, idle {timeline.bubble:.1%} (filling and draining too)"
    )
    for rank, causes in enumerate(timeline.idle_by_cause_s):
        waits = ", ".join(f"{cause} {format_seconds(seconds)}" for cause, seconds in causes.items())
        most = counted(timeline.in_flight_peak[rank], "microbatch")
        print(f"  rank {rank}: idle for {waits}; at most {most} in flight")
    return 0


def report(options: argparse.Namespace) -> int:
    if is_onnx(options):
        parts = named_onnx(options)
        if options.part is None:
            page = page_html(parts.graph, parts.costs, parts.plan, ())
            options.output.write_text(page, encoding="utf-8")
        else:
            drawn = picture_of(options.part, graph=parts.graph, plan=parts.plan, timeline=None, metrics=None)
            drawn.save(options.output)
    else:
        pipe, metrics = named_pipeline(options), _metrics(options)
        try:
            if options.part is None:
                pipe.report(options.output, metrics=metrics)
            else:
                pipe.draw(options.part, options.output, metrics=metrics)
        except InputError:
            if metrics is not None:
                _require_run_of(pipe, metrics, options.metrics or Path(str(options.model)) / FILE)
            raise
    print(f"{options.output} written")
    return 0


def _require_run_of(pipe: Pipeline, metrics: Metrics, file: Path) -> None:
    """Raises InputError naming metrics of a run that this plan cannot have: the model was split again."""
    m, replicas = metrics.microbatches_per_update, metrics.replicas
    try:
        pipe.simulate(
            method=metrics.method, microbatches_per_update=m, replicas=replicas, num_updates=1, slack="auto"
        )
    except InputError as error:
        raise InputError(
            f"{file} is of a run of other stages ({error}); move it away, or name this plan's with --metrics"
        ) from error


def _metrics(options: argparse.Namespace) -> Metrics | None:
    """Returns what a training run measured, if there was one."""
    if options.metrics is not None:
        return Metrics.load(options.metrics)
    folder = saved_folder(options)
    return Metrics.load(folder) if folder is not None and (folder / FILE).is_file() else None
