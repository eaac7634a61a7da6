"""The commands that split a model, and that check and show the result."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.syntax import Syntax

from pd2bw_fx.commands.common import (
    check_writable,
    command,
    is_onnx,
    model_command,
    model_named,
    named_onnx,
    named_pipeline,
    saved_folder,
    slack_named,
)
from pd2bw_fx.commands.options import numbers_named, plan_in, planning, search_options
from pd2bw_fx.commands.progress import ProgressLine, in_workload_units
from pd2bw_fx.errors import InputError, UsageError
from pd2bw_fx.folder import read_pipeline
from pd2bw_fx.metrics import FILE, Metrics
from pd2bw_fx.onnx_pipeline import OnnxPipeline
from pd2bw_fx.passes.partition import plan_workload
from pd2bw_fx.pipeline import Pipeline
from pd2bw_fx.report.page import is_page, page_html
from pd2bw_fx.report.parts import PARTS, picture_of, write_timeline
from pd2bw_fx.report.table import plan_table
from pd2bw_fx.units import counted, format_seconds
from pd2bw_fx.workload import read_workload


def add(commands: Any) -> None:
    """plan, show, split, verify, check, simulate, report"""
    _add_splitting(commands)
    _add_checking(commands)
    _add_looking(commands)


def _add_splitting(commands: Any) -> None:
    """plan, show, split"""
    plan = model_command(
        commands,
        "plan",
        "print the plan",
        "pd2bw-fx plan gpt --cluster 4 --explain",
        is_optional=True,
        takes_onnx=True,
    )
    plan.add_argument(
        "--explain",
        action="store_true",
        help="also print the next best cuts, what binds, and what would help",
    )
    plan.add_argument("--workload", type=Path, help="plan a published workload (JSON) instead of a model")
    plan.add_argument("--accelerators-only", action="store_true", help="leave out the workload's CPUs")
    plan.add_argument("--json", action="store_true", help="print the plan as JSON")
    plan.set_defaults(run=_plan)

    show = model_command(
        commands,
        "show",
        "print the generated code of a stage",
        "pd2bw-fx show gpt --stage 1",
        takes_onnx=True,
    )
    show.add_argument("--stage", type=int, default=0, help="which stage (default 0)")
    show.set_defaults(run=_show)

    save = model_command(
        commands,
        "split",
        "split a model or an ONNX file, and save the stages",
        "pd2bw-fx split gpt --cluster 2 -o gpt_2",
        takes_onnx=True,
    )
    save.add_argument("-o", "--output", type=Path, required=True, help="folder to write")
    save.add_argument("--json", action="store_true", help="print the plan as JSON")
    save.set_defaults(run=_split)


def _add_checking(commands: Any) -> None:
    """verify, check"""
    verify = model_command(
        commands,
        "verify",
        "compare the stages with the model",
        "pd2bw-fx verify gpt_2 --against gpt",
        takes_onnx=True,
    )
    verify.add_argument(
        "--against",
        metavar="MODEL",
        help="the model that a saved folder was split from: a name or module:callable",
    )
    verify.add_argument("--json", action="store_true", help="print the differences as JSON")
    verify.set_defaults(run=_verify)

    check = command(
        commands,
        "check",
        "check a plan that was edited by hand, and price it again",
        "pd2bw-fx check gpt_2/plan.json",
    )
    check.add_argument("plan", metavar="PLAN", type=Path, help="plan.json in a folder written by split")
    check.add_argument("--json", action="store_true", help="print the plan as JSON, priced again")
    check.set_defaults(run=_check)


def _add_looking(commands: Any) -> None:
    """simulate, report"""
    simulate = model_command(
        commands,
        "simulate",
        "simulate a schedule with the plan's times",
        "pd2bw-fx simulate gpt --cluster 4 --method 1f1b -o timeline.svg",
        runs=True,
    )
    simulate.add_argument("--updates", type=int, default=8, help="updates to simulate (default 8)")
    simulate.add_argument(
        "--replicas",
        type=numbers_named,
        metavar="NUMBER|N,N,..",
        help="ranks for each stage, on devices like the plan's (default: the plan's)",
    )
    simulate.add_argument("--jitter", type=float, default=0.0, help="relative spread of compute times")
    simulate.add_argument(
        "--slack",
        type=slack_named,
        metavar="NUMBER|auto",
        default=0.0,
        help="more microbatches in flight, of 2bw and 1f1b; auto: as many as the engine allows (default 0)",
    )
    simulate.add_argument(
        "-o",
        "--output",
        type=Path,
        help="file for the timeline: .svg, .png, or .json for Perfetto and chrome://tracing",
    )
    simulate.add_argument("--json", action="store_true", help="print the figures as JSON")
    simulate.set_defaults(run=_simulate)

    report = model_command(
        commands,
        "report",
        "write one HTML page about a pipeline, or one picture of it",
        "pd2bw-fx report gpt_2 -o report.html",
        takes_onnx=True,
    )
    report.add_argument("-o", "--output", type=Path, required=True, help="the file to write")
    report.add_argument(
        "--part", choices=PARTS, help="only this picture, as .svg or .png (timelines also .json for Perfetto)"
    )
    report.add_argument(
        "--metrics",
        type=Path,
        help="file that `train` wrote (default: metrics.json in MODEL, if it is a folder)",
    )
    report.set_defaults(run=_report)


def _plan(options: argparse.Namespace) -> int:
    if (options.model is None) == (options.workload is None):
        raise UsageError("plan takes a MODEL or --workload FILE; give one of them")
    if options.workload is not None:
        of_search = search_options(options)
        others = planning(options).keys() - of_search.keys()
        if options.cluster is not None or options.explain or others:
            raise UsageError(
                "--workload has its own devices and costs and no operators to explain; of the options, "
                "--solver, --max-gap and --time-limit are for it"
            )
        line = ProgressLine(text=in_workload_units)
        placement = plan_workload(
            read_workload(options.workload),
            accelerators_only=options.accelerators_only,
            progress=line,
            **of_search,
        )
        line.close()
        print(json.dumps(placement.to_json()) if options.json else placement)
        return 0
    if options.accelerators_only:
        raise UsageError("--accelerators-only is for a --workload; a model is planned on --cluster")
    pipe = named_onnx(options) if is_onnx(options) else named_pipeline(options)
    why = pipe.explain() if options.explain else None
    if options.json:
        print(json.dumps(pipe.plan.to_json() | ({} if why is None else {"explanation": asdict(why)})))
        return 0
    print(pipe if why is None else f"{pipe}\n\n{why}")
    return 0


def _show(options: argparse.Namespace) -> int:
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


def _split(options: argparse.Namespace) -> int:
    pipe = named_onnx(options) if is_onnx(options) else named_pipeline(options)
    pipe.save(options.output)
    if options.json:
        print(json.dumps(pipe.plan.to_json()))
        return 0
    print(pipe)
    print(f"saved in {options.output}")
    return 0


def _check(options: argparse.Namespace) -> int:
    if not options.plan.exists():
        raise UsageError(f"{options.plan} is not there; name plan.json in a folder written by split")
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


def _verify(options: argparse.Namespace) -> int:
    if is_onnx(options):
        found = named_onnx(options).manifest
        if options.json:
            print(json.dumps({"relative": found["largest_differences_from_model"]}))
            return 0
        for name, difference in found["largest_differences_from_model"].items():
            sizes = ", ".join(map(str, found["batch_sizes_checked"]))
            print(f"{name}: at most {difference:.1e} from what the whole file gives, batch sizes {sizes}")
        return 0
    if saved_folder(options) is None and options.against is not None:
        raise UsageError(f"{options.model} is compared with itself; --against is for a saved folder")
    if saved_folder(options) is not None and options.against is None:
        raise UsageError(f"{options.model} has no model to be compared with; name it with --against")
    against = None if options.against is None else model_named(options.against)
    compared = named_pipeline(options).verify(against)
    relative = {difference.name: difference.relative for difference in compared.differences}
    print(json.dumps({"exact": compared.exact, "relative": relative}) if options.json else compared)
    return 0


def _simulate(options: argparse.Namespace) -> int:
    check_writable(options.output)
    if options.updates < 1:
        raise UsageError(f"--updates is {options.updates}; at least one was expected")
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


def _report(options: argparse.Namespace) -> int:
    check_writable(options.output)
    if options.part is None and not is_page(options.output):
        raise UsageError(f"--output is {options.output}; the page is HTML: a name that ends with .html")
    if is_onnx(options):
        if options.metrics is not None:
            raise UsageError("--metrics are of a training run; an ONNX file is split for inference")
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
