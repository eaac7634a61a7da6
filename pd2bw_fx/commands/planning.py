"""The commands that split a model, and that check and show the result."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from pd2bw_fx.commands.common import (
    check_model_name,
    check_pipeline,
    check_split,
    check_writable,
    command,
    is_onnx,
    model_command,
    saved_folder,
)
from pd2bw_fx.commands.options import numbers_named, plan_in, planning, search_options, slack_named
from pd2bw_fx.errors import UsageError
from pd2bw_fx.files import MANIFEST
from pd2bw_fx.report import PARTS, is_page


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
        return _plan_workload(options)
    if options.accelerators_only:
        raise UsageError("--accelerators-only is for a --workload; a model is planned on --cluster")
    check_split(options)
    from pd2bw_fx.commands.work import planning, seeded

    return seeded(planning.plan, options)


def _plan_workload(options: argparse.Namespace) -> int:
    of_search = search_options(options)
    others = planning(options).keys() - of_search.keys()
    of_models = options.explain or options.edited or options.no_profile_cache
    if options.cluster is not None or of_models or others:
        raise UsageError(
            "--workload has its own devices and costs and no operators to explain; of the options, "
            "--solver, --max-gap and --time-limit are for it"
        )
    from pd2bw_fx.commands.workloads import placed

    placement = placed(options.workload, accelerators_only=options.accelerators_only, **of_search)
    print(json.dumps(placement.to_json()) if options.json else placement)
    return 0


def _show(options: argparse.Namespace) -> int:
    check_split(options)
    from pd2bw_fx.commands.work import planning, seeded

    return seeded(planning.show, options)


def _split(options: argparse.Namespace) -> int:
    check_split(options)
    from pd2bw_fx.commands.work import planning, seeded

    return seeded(planning.save, options)


def _check(options: argparse.Namespace) -> int:
    if not options.plan.exists():
        raise UsageError(f"{options.plan} is not there; name plan.json in a folder written by split")
    if options.plan.is_file() and not any(options.plan.parent.glob(f"{MANIFEST}*")):  # .half: being written
        raise UsageError(
            f"{options.plan} is in no folder written by split, whose graph and costs price a plan; "
            "put it there"
        )
    file = options.plan / "plan.json" if options.plan.is_dir() else options.plan
    if file.is_file():
        plan_in(file)  # refuses what is no plan before torch is imported, which pricing needs
    from pd2bw_fx.commands.work import planning, seeded

    return seeded(planning.check, options)


def _verify(options: argparse.Namespace) -> int:
    if not is_onnx(options):
        if saved_folder(options) is None and options.against is not None:
            raise UsageError(f"{options.model} is compared with itself; --against is for a saved folder")
        if saved_folder(options) is not None and options.against is None:
            raise UsageError(f"{options.model} has no model to be compared with; name it with --against")
        if options.against is not None:
            check_model_name(options.against)
    check_split(options)
    from pd2bw_fx.commands.work import planning, seeded

    return seeded(planning.verify, options)


def _simulate(options: argparse.Namespace) -> int:
    check_writable(options.output)
    if options.updates < 1:
        raise UsageError(f"--updates is {options.updates}; at least one was expected")
    check_pipeline(options)
    from pd2bw_fx.commands.work import planning, seeded

    return seeded(planning.simulate, options)


def _report(options: argparse.Namespace) -> int:
    check_writable(options.output)
    if options.part is None and not is_page(options.output):
        raise UsageError(f"--output is {options.output}; the page is HTML: a name that ends with .html")
    if is_onnx(options) and options.metrics is not None:
        raise UsageError("--metrics are of a training run; an ONNX file is split for inference")
    check_split(options)
    from pd2bw_fx.commands.work import planning, seeded

    return seeded(planning.report, options)
