"""The command line: `pd2bw-fx COMMAND`, or `python -m pd2bw_fx COMMAND`.

Exit codes: 0 done, 1 the work failed, 2 wrong use. A user's mistake gets one line, not a traceback
(`--debug` shows it).
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.syntax import Syntax
from torch import nn

from pd2bw_fx.demo import run_demo
from pd2bw_fx.errors import InputError, Pd2bwError
from pd2bw_fx.models import MODELS, build
from pd2bw_fx.passes.export_onnx import merge_onnx, run_onnx_processes
from pd2bw_fx.passes.partition import plan_workload
from pd2bw_fx.passes.split import split
from pd2bw_fx.pipeline import Pipeline, load
from pd2bw_fx.report.page import page_html
from pd2bw_fx.report.timeline import timeline_svg
from pd2bw_fx.train import (
    TrainOptions,
    is_under_torchrun,
    optimizer_named,
    run_training,
    start_processes,
    text_batches,
)
from pd2bw_fx.units import format_seconds
from pd2bw_fx.workload import read_workload


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    options.arguments = arguments
    try:
        code: int = options.run(options)
    except Pd2bwError as error:
        if options.debug:
            raise
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 1
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pd2bw-fx",
        description="Split a PyTorch model into pipeline stages you can read, and train them with 2BW.",
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    demo = _command(
        commands,
        "demo",
        "the whole way through on a small GPT: plan, read, train, export",
        "pd2bw-fx demo -o demo_out",
    )
    demo.add_argument("-o", "--output", type=Path, default=Path("demo_out"), help="folder for the pictures")
    demo.add_argument("--updates", type=int, default=300, help="training updates (default 300)")
    demo.set_defaults(run=_demo)

    plan = _model_command(
        commands, "plan", "print the plan", "pd2bw-fx plan gpt --cluster 4 --explain", is_optional=True
    )
    plan.add_argument(
        "--explain", action="store_true", help="also the next best cuts, what binds, what helps"
    )
    plan.add_argument("--workload", type=Path, help="place a published workload (JSON) in place of a model")
    plan.add_argument("--accelerators-only", action="store_true", help="leave out the workload's CPUs")
    plan.add_argument("--json", action="store_true", help="the plan as JSON, for machines")
    plan.set_defaults(run=_plan)

    show = _model_command(
        commands, "show", "print the generated code of a stage", "pd2bw-fx show gpt --stage 1"
    )
    show.add_argument("--stage", type=int, default=0, help="which stage (default 0)")
    show.set_defaults(run=_show)

    save = _model_command(commands, "split", "split and save", "pd2bw-fx split gpt --cluster 2 -o gpt_2")
    save.add_argument("-o", "--output", type=Path, required=True, help="folder to write")
    save.set_defaults(run=_split)

    export = _model_command(
        commands, "export", "write one checked ONNX file a stage", "pd2bw-fx export gpt_2 -o gpt_2_onnx"
    )
    export.add_argument("-o", "--output", type=Path, required=True, help="folder to write")
    export.add_argument("--opset", type=int, default=20, help="ONNX operator set (default 20)")
    export.add_argument(
        "--form",
        choices=["stages", "annotated", "both"],
        default="stages",
        help="one file a stage, or the whole model in one file that names each node's stage",
    )
    export.set_defaults(run=_export)

    merge = _command(
        commands,
        "merge",
        "put exported stages back into one ONNX file",
        "pd2bw-fx merge gpt_2_onnx -o gpt.onnx",
    )
    merge.add_argument("folder", metavar="FOLDER", help="written by export")
    merge.add_argument("-o", "--output", type=Path, required=True, help="file to write")
    merge.set_defaults(run=_merge)

    run = _command(
        commands,
        "run-onnx",
        "run exported stages, one process each",
        "pd2bw-fx run-onnx gpt_2_onnx --input x.npz -o y.npz",
    )
    run.add_argument("folder", metavar="FOLDER", help="written by export")
    run.add_argument("--input", type=Path, required=True, help="an .npz file with the model's inputs by name")
    run.add_argument("-o", "--output", type=Path, help="an .npz file for the outputs (default: print shapes)")
    run.add_argument("--microbatches", type=int, default=1, help="parts of the batch in the pipeline at once")
    run.set_defaults(run=_run_onnx)

    simulate = _model_command(
        commands,
        "simulate",
        "what a schedule would take on the plan's times",
        "pd2bw-fx simulate gpt --cluster 4 --method 1f1b -o timeline.svg",
    )
    simulate.add_argument("--method", help="2bw, 1f1b or gpipe (default: the plan's)")
    simulate.add_argument("--microbatches", type=int, help="microbatches an update (default: the plan's)")
    simulate.add_argument("--updates", type=int, default=8, help="updates to simulate (default 8)")
    simulate.add_argument("--jitter", type=float, default=0.0, help="relative spread of compute times")
    simulate.add_argument(
        "-o", "--output", type=Path, help="the timeline: .svg, or .json for Perfetto and chrome://tracing"
    )
    simulate.add_argument("--json", action="store_true", help="the figures as JSON, for machines")
    simulate.set_defaults(run=_simulate)

    train = _model_command(
        commands,
        "train",
        "train with one process a stage, started here or by torchrun",
        "pd2bw-fx train gpt --cluster 2 --updates 300 --lr 3e-4 --checkpoint gpt_run",
    )
    train.add_argument(
        "--data", help="module:callable that gives an iterable of batches (default: real text)"
    )
    train.add_argument("--optimizer", default="adamw", help="adamw, adam, sgd, or module:callable (adamw)")
    train.add_argument("--lr", type=float, help="learning rate (default: torch's)")
    train.add_argument("--updates", type=int, default=300, help="updates in all (default 300)")
    train.add_argument("--method", help="2bw, 1f1b or gpipe (default: the plan's)")
    train.add_argument("--microbatches", type=int, help="microbatches an update (default: the plan's)")
    train.add_argument("--checkpoint", type=Path, help="folder to write to, and to go on from")
    train.add_argument("--every", type=int, default=100, help="updates between checkpoints (default 100)")
    train.add_argument("--json", action="store_true", help="a line of JSON for each report, for machines")
    train.add_argument("-o", "--output", type=Path, help="the trained weights, as safetensors")
    train.set_defaults(run=_train)

    report = _model_command(
        commands, "report", "one HTML page about a pipeline", "pd2bw-fx report gpt_2 -o report.html"
    )
    report.add_argument("-o", "--output", type=Path, required=True, help="the page to write")
    report.set_defaults(run=_report)

    verify = _model_command(
        commands, "verify", "compare the stages with the model", "pd2bw-fx verify gpt --cluster 3"
    )
    verify.set_defaults(run=_verify)
    return parser


def _command(commands: Any, name: str, purpose: str, example: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=purpose, description=purpose, epilog=f"example: {example}"
    )
    return parser


def _model_command(
    commands: Any, name: str, purpose: str, example: str, *, is_optional: bool = False
) -> argparse.ArgumentParser:
    parser = _command(commands, name, purpose, example)
    parser.add_argument(
        "model",
        nargs="?" if is_optional else None,
        metavar="MODEL",
        help=f"one of {', '.join(sorted(MODELS))}; or module:callable returning a model; or a saved folder",
    )
    parser.add_argument("--cluster", help="number of devices, or a cluster file (default: this machine)")
    return parser


def _demo(options: argparse.Namespace) -> int:
    if options.updates < 1:
        raise InputError(f"--updates is {options.updates}; at least one is needed")
    run_demo(options.output, num_updates=options.updates, console=Console())
    return 0


def _plan(options: argparse.Namespace) -> int:
    if (options.model is None) == (options.workload is None):
        raise InputError("plan takes a MODEL or --workload FILE; give one of them")
    if options.workload is not None:
        placement = plan_workload(
            read_workload(options.workload), accelerators_only=options.accelerators_only
        )
        print(json.dumps(placement.to_json()) if options.json else placement)
        return 0
    pipe = _pipeline(options)
    print(json.dumps(pipe.plan.to_json()) if options.json else pipe)
    if options.explain:
        print(f"\n{pipe.explain()}")
    return 0


def _show(options: argparse.Namespace) -> int:
    pipe = _pipeline(options)
    if not 0 <= options.stage < len(pipe.programs):
        raise InputError(
            f"--stage {options.stage}: there are stages 0 to {len(pipe.programs) - 1}; name one of them"
        )
    source = pipe.programs[options.stage].source
    if sys.stdout.isatty():
        Console().print(Syntax(source, "python").highlight(source), soft_wrap=True)
    else:
        print(source, end="")
    return 0


def _split(options: argparse.Namespace) -> int:
    pipe = _pipeline(options)
    pipe.save(options.output)
    print(pipe)
    print(f"saved in {options.output}")
    return 0


def _export(options: argparse.Namespace) -> int:
    _pipeline(options).export_onnx(options.output, form=options.form, opset=options.opset)
    files = sorted(path.name for path in options.output.glob("*.onnx"))
    print(f"{', '.join(files)} written to {options.output}")
    return 0


def _merge(options: argparse.Namespace) -> int:
    merge_onnx(options.folder, options.output)
    print(f"{options.output} written")
    return 0


def _run_onnx(options: argparse.Namespace) -> int:
    if not options.input.is_file():
        raise InputError(f"{options.input} is no file; give an .npz with the model's inputs by name")
    with np.load(options.input) as file:
        inputs = dict(file)
    outputs = run_onnx_processes(options.folder, inputs, num_microbatches=options.microbatches)
    if options.output is not None:
        np.savez(options.output, allow_pickle=False, **outputs)
    for name, value in outputs.items():
        shown = f" {value}" if value.ndim == 0 else ""
        print(f"{name}: {value.dtype} {value.shape}{shown}")
    return 0


def _simulate(options: argparse.Namespace) -> int:
    timeline = _pipeline(options).simulate(
        method=options.method,
        microbatches_per_update=options.microbatches,
        num_updates=options.updates,
        jitter=options.jitter,
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
        text = timeline_svg(timeline)
        if options.output.suffix == ".json":
            text = json.dumps(timeline.to_chrome_trace())
        options.output.write_text(text)
    if options.json:
        print(json.dumps(figures))
        return 0
    print(
        f"{timeline.method}, {timeline.microbatches_per_update} microbatches an update: "
        f"{timeline.throughput:.4g} microbatches/s, idle {timeline.bubble:.1%} (filling and draining too)"
    )
    for rank, causes in enumerate(timeline.idle_by_cause_s):
        waits = ", ".join(f"{cause} {format_seconds(seconds)}" for cause, seconds in causes.items())
        print(
            f"  rank {rank}: idle for {waits}; at most {timeline.in_flight_peak[rank]} microbatches in flight"
        )
    return 0


def _train(options: argparse.Namespace) -> int:
    if options.updates < 1 or options.every < 1:
        raise InputError("--updates and --every must be 1 or more")
    if not is_under_torchrun():
        return _train_here(options)
    is_first = int(os.environ["RANK"]) == 0
    pipe = _pipeline(options)
    batches = _loaded(options.data)() if options.data else text_batches(pipe, options.updates)
    run_training(
        pipe,
        batches,
        optimizer=optimizer_named(options.optimizer, options.lr, _loaded),
        options=TrainOptions(
            num_updates=options.updates,
            method=options.method,
            microbatches_per_update=options.microbatches,
            checkpoint=options.checkpoint,
            checkpoint_every=options.every,
            as_json=options.json,
            output=options.output,
        ),
        console=Console(quiet=not is_first),
    )
    return 0


def _train_here(options: argparse.Namespace) -> int:
    """Split once, and have torchrun start one process for each stage."""
    given = sys.argv[1:] if options.arguments is None else list(options.arguments)
    with tempfile.TemporaryDirectory(prefix="pd2bw_fx_") as folder:
        pipe = _pipeline(options)
        pipe.save(Path(folder) / "pipeline")
        if options.cluster is not None:
            at = given.index("--cluster") if "--cluster" in given else None
            given = [g for g in given if not g.startswith("--cluster=")]
            if at is not None:
                del given[at : at + 2]
        given[given.index(options.model)] = str(Path(folder) / "pipeline")
        return 1 if start_processes(pipe.plan.num_stages, given) else 0


def _report(options: argparse.Namespace) -> int:
    pipe = _pipeline(options)
    page = page_html(pipe.graph, pipe.costs, pipe.plan, pipe.programs, pipe.simulate())
    options.output.write_text(page)
    print(f"{options.output} written")
    return 0


def _verify(options: argparse.Namespace) -> int:
    print(_pipeline(options).verify())
    return 0


def _pipeline(options: argparse.Namespace) -> Pipeline:
    if options.model not in MODELS and Path(options.model).is_dir():
        if options.cluster is not None:
            raise InputError("a saved folder has its plan already; leave out --cluster, or split it again")
        return load(options.model)
    cluster = int(options.cluster) if (options.cluster or "").isdigit() else options.cluster
    return split(_model(options.model), cluster=cluster)


def _loaded(name: str) -> Any:
    """What `module:attribute` names; modules are looked for in the working folder too."""
    module_name, _, attribute = name.partition(":")
    if not attribute:
        raise InputError(f"{name!r} is not of the form module:callable")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise InputError(f"{name!r} cannot be imported: {error}") from error


def _model(name: str) -> nn.Module:
    if name in MODELS:
        return build(name)
    if ":" not in name:
        raise InputError(
            f"{name!r} is no model of ours ({', '.join(sorted(MODELS))}), no folder, and not of the form "
            "module:callable"
        )
    factory = _loaded(name)
    if isinstance(factory, nn.Module):
        return factory
    try:
        model = factory()
    except TypeError as error:
        raise InputError(f"{name!r} cannot be called without arguments: {error}") from error
    if not isinstance(model, nn.Module):
        raise InputError(f"{name!r} gives a {type(model).__name__}; an nn.Module was expected")
    return model
