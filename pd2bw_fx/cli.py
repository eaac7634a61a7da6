"""The command line: `pd2bw-fx COMMAND`, or `python -m pd2bw_fx COMMAND`.

Exit codes: 0 done, 1 the work failed, 2 wrong use. A user's mistake gets one line, not a traceback
(`--debug` shows it).
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.syntax import Syntax
from torch import nn

from pd2bw_fx.demo import run_demo
from pd2bw_fx.errors import InputError, Pd2bwError
from pd2bw_fx.models import MODELS, build
from pd2bw_fx.passes.split import split
from pd2bw_fx.pipeline import Pipeline, load


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
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

    plan = _model_command(commands, "plan", "print the plan", "pd2bw-fx plan gpt --cluster 4")
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
    export.set_defaults(run=_export)

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


def _model_command(commands: Any, name: str, purpose: str, example: str) -> argparse.ArgumentParser:
    parser = _command(commands, name, purpose, example)
    parser.add_argument(
        "model",
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
    pipe = _pipeline(options)
    print(json.dumps(pipe.plan.to_json()) if options.json else pipe)
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
    manifest = _pipeline(options).export_onnx(options.output, opset=options.opset)
    print(f"{len(manifest['stages'])} stages exported to {options.output}")
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


def _model(name: str) -> nn.Module:
    if name in MODELS:
        return build(name)
    module_name, _, attribute = name.partition(":")
    if not attribute:
        raise InputError(
            f"{name!r} is no model of ours ({', '.join(sorted(MODELS))}), no folder, and not of the form "
            "module:callable"
        )
    sys.path.insert(0, "")
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise InputError(f"{name!r} cannot be imported: {error}") from error
    model = factory() if not isinstance(factory, nn.Module) else factory
    if not isinstance(model, nn.Module):
        raise InputError(f"{name!r} gives a {type(model).__name__}; an nn.Module was expected")
    return model
