"""Command line options for splitting a model: the arguments of `split`."""

from __future__ import annotations

import argparse
import re
import tomllib
from pathlib import Path
from typing import Any, Literal

from pd2bw_fx.constraints import Constraints
from pd2bw_fx.errors import InputError
from pd2bw_fx.passes.schedule import training_methods
from pd2bw_fx.plan import Plan

# Options -> arguments of `split`. Those of a run are for a saved pipeline too, in simulate and train.
_OF_A_RUN = {"method": "method", "microbatches": "microbatches_per_update"}
_OF_A_PLAN = {
    "num_stages": "num_stages",
    "chunks": "chunks",
    "replicas": "replicas",
    "recompute": "recompute",
    "constraints": "constraints",
    "plan": "plan",
    "costs": "costs",
    "tracer": "tracer",
    "solver": "solver",
    "max_gap": "max_gap",
    "time_limit": "time_limit_s",
}
_RECOMPUTE: dict[str, bool | Literal["auto"]] = {"never": False, "always": True, "auto": "auto"}


def add_planning(parser: argparse.ArgumentParser, *, runs: bool) -> None:
    """Adds the options of `split`. `runs`: the command itself runs a method, also of a saved pipeline."""
    parser.set_defaults(runs=runs)
    group = parser.add_argument_group("how to split", "as the arguments of pd2bw_fx.split are called")
    methods = ", ".join(training_methods())
    default = "the plan's, else 2bw" if runs else "2bw"
    group.add_argument("--method", metavar="METHOD", help=f"{methods} (default: {default})")
    group.add_argument("--chunks", type=int, help="stages on each device, of interleaved (default 2)")
    default = "the plan's" if runs else "as many as the method needs"
    group.add_argument("--microbatches", type=int, help=f"microbatches an update (default: {default})")
    if not runs:
        group.add_argument(
            "--replicas",
            type=_numbers_or_auto,
            metavar="NUMBER|N,N,..|auto",
            help="devices that run each stage; auto: the fastest (default 1)",
        )
    group.add_argument(
        "--plan", type=Path, metavar="FILE", help="take this plan.json, edited or not, instead of searching"
    )
    _add_wishes(group)


def add_wishes(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `split` that do not depend on the method, for a command that plans several."""
    group = parser.add_argument_group("how to split", "as the arguments of pd2bw_fx.split are called")
    _add_wishes(group)


def _add_wishes(group: Any) -> None:
    group.add_argument(
        "--num-stages",
        type=_number_or_auto,
        metavar="NUMBER|auto",
        help="auto: the fastest (default: one for every device)",
    )
    group.add_argument(
        "--recompute",
        choices=_RECOMPUTE,
        help="recompute activations in the backward; auto: only in stages where it pays (default: never)",
    )
    group.add_argument(
        "--constraints", type=Path, metavar="FILE", help="TOML with the fields of pd2bw_fx.Constraints"
    )
    group.add_argument(
        "--costs", choices=("measured", "analytic"), help="costs of operators (default: measured)"
    )
    group.add_argument(
        "--tracer",
        help="how to trace: export, export-sequence, export-as-example or fx (default: the first that works)",
    )
    group.add_argument("--solver", help="highs, cbc, or another that PuLP knows (default: highs)")
    group.add_argument(
        "--max-gap",
        type=float,
        help="stop when the plan is proven to be this close to the optimum (default 1e-4)",
    )
    group.add_argument("--time-limit", type=float, metavar="SECONDS", help="time for the search (default 60)")


def planning(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the arguments of `split` that were given."""
    names = _OF_A_RUN | _of_a_plan(options)
    given = {names[name]: value for name in names if (value := getattr(options, name, None)) is not None}
    if "recompute" in given:
        given["recompute"] = _RECOMPUTE[given["recompute"]]
    if "constraints" in given:
        given["constraints"] = _constraints(given["constraints"])
    if "plan" in given:
        given["plan"] = plan_in(given["plan"])
    return given


def wishes(options: argparse.Namespace) -> dict[str, Any]:
    """Returns those of `planning` that `add_wishes` has added."""
    return {name: given for name, given in planning(options).items() if name not in _OF_A_RUN.values()}


def in_options(told: str) -> str:
    """Returns an error in the words of the command line: `num_stages=9` is `--num-stages 9`."""
    told = told.replace("load(folder, edited=True)", "say so with --edited")
    told = told.replace("to split(model, .., plan=..)", "to split, with --plan and the model")
    told = re.sub(r"split\(\.\., ([^()]*)\)", r"\1", told)  # `split(.., method='ddp')`
    for option, argument in (_OF_A_RUN | _OF_A_PLAN).items():
        word = f"--{option.replace('_', '-')}"
        told = re.sub(rf"\b{argument}=(['\"]?)([\w.-]+)\1", rf"{word} \2", told)
        if argument != option or "_" in argument:
            told = re.sub(rf"(?<![\w.-]){argument}\b", word, told)
    return told


def search_options(options: argparse.Namespace) -> dict[str, Any]:
    """Returns those of `planning` that only the search uses."""
    return {k: v for k, v in planning(options).items() if k in ("solver", "max_gap", "time_limit_s")}


def planning_words(options: argparse.Namespace) -> list[str]:
    """Returns the given options that are of no use to a pipeline that has its plan already."""
    names = ["cluster", *_of_a_plan(options), *({} if options.runs else _OF_A_RUN)]
    return [f"--{name.replace('_', '-')}" for name in names if getattr(options, name, None) is not None]


def _of_a_plan(options: argparse.Namespace) -> dict[str, str]:
    """Returns the options of the plan. In a command that runs a method, --replicas is for the run."""
    return {k: v for k, v in _OF_A_PLAN.items() if not (options.runs and k == "replicas")}


def _number_or_auto(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a whole number nor auto") from None


def _numbers_or_auto(text: str) -> int | list[int] | Literal["auto"]:
    return "auto" if text == "auto" else numbers_named(text, or_else="a number, auto or ")


def numbers_named(text: str, *, or_else: str = "a number or ") -> int | list[int]:
    """One number or several (`2,1,1`), for argparse."""
    try:
        numbers = [int(number) for number in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is none of them: {or_else}numbers with commas, such as 2,1,1"
        ) from None
    return numbers if len(numbers) > 1 else numbers[0]


def slack_named(text: str) -> float | Literal["auto"]:
    """Parses --slack for argparse."""
    if text == "auto":
        return "auto"
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor auto") from None


def plan_in(path: Path) -> Plan:
    """Reads a plan.

    Raises InputError for a file that cannot be read, PlanMismatchError for anything but a plan.
    """
    try:
        return Plan.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error


def _constraints(path: Path) -> Constraints:
    """Reads constraints. Raises InputError for a file that cannot be read or contains something else."""
    try:
        said = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"constraints {path} cannot be read: {error}") from error
    known = Constraints.__dataclass_fields__
    strange = sorted(said.keys() - known.keys())
    if strange:
        raise InputError(f"constraints {path} has {strange[0]!r}; expected {', '.join(known)}")
    for name in ("together", "whole"):
        if isinstance(said.get(name), list):
            said[name] = tuple(tuple(part) if isinstance(part, list) else part for part in said[name])
    return Constraints(**said)
