"""What commands share: how they are declared, and what MODEL may be."""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import sys
import traceback
from pathlib import Path
from typing import Any, Literal

from torch import nn

from pd2bw_fx.commands.options import add_planning, planning, planning_words
from pd2bw_fx.commands.progress import ProgressLine
from pd2bw_fx.errors import InputError, UsageError
from pd2bw_fx.files import MANIFEST
from pd2bw_fx.models import MODELS, build
from pd2bw_fx.onnx_pipeline import OnnxPipeline
from pd2bw_fx.passes.split import split
from pd2bw_fx.pipeline import Pipeline, load

DEBUG_HELP = "show the traceback of an error"


def command(commands: Any, name: str, purpose: str, example: str) -> argparse.ArgumentParser:
    """Adds a command whose help ends with an example."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=purpose,
        description=purpose,
        epilog=f"example: {example}",
        allow_abbrev=False,
    )
    parser.set_defaults(command=parser)
    # The same option may stand before the command, and its absence here must not undo it.
    parser.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=DEBUG_HELP)
    return parser


def model_command(
    commands: Any,
    name: str,
    purpose: str,
    example: str,
    *,
    is_optional: bool = False,
    takes_folder: bool = True,
    takes_onnx: bool = False,
    splits: bool = True,
    runs: bool = False,
) -> argparse.ArgumentParser:
    parser = command(commands, name, purpose, example)
    parser.add_argument(
        "model",
        nargs="?" if is_optional else None,
        metavar="MODEL",
        help=f"one of {', '.join(sorted(MODELS))}; or module:callable (file.py:callable) returning a model"
        + ("; or a saved folder" if takes_folder else "")
        + ("; or an ONNX file" if takes_onnx else ""),
    )
    if takes_folder:
        parser.add_argument(
            "--edited", action="store_true", help="accept stages of a saved folder that were edited by hand"
        )
    parser.add_argument("--cluster", help="number of devices, or a cluster file (default: this machine)")
    parser.add_argument(
        "--no-profile-cache",
        action="store_true",
        help="measure every operator anew, and keep no times on disk",
    )
    if splits:
        add_planning(parser, runs=runs)
    return parser


def saved_folder(options: argparse.Namespace) -> Path | None:
    """Returns the folder that MODEL is, if it is one."""
    given = str(options.model)
    return Path(given) if given not in MODELS and Path(given).is_dir() else None


def is_onnx(options: argparse.Namespace) -> bool:
    return bool(options.model) and str(options.model).endswith(".onnx")


def named_onnx(options: argparse.Namespace) -> OnnxPipeline:
    """Returns the ONNX file that MODEL names, split as the options say."""
    return split(str(options.model), cluster=named_cluster(options), **planning(options))


def slack_named(text: str) -> float | Literal["auto"]:
    """Parses --slack for argparse."""
    if text == "auto":
        return "auto"
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor auto") from None


def named_pipeline(options: argparse.Namespace) -> Pipeline:
    """Returns the pipeline that MODEL and --cluster mean: a saved one as it is, or a model split here."""
    if is_onnx(options):
        raise UsageError(
            f"{options.model} is an ONNX file, which is split for inference; plan, split, show, verify and "
            "report take one"
        )
    if saved_folder(options) is not None:
        is_ours = (Path(options.model) / MANIFEST).is_file()  # else `load` says what is wrong with it
        if is_ours and (given := planning_words(options)):
            raise UsageError(
                f"a saved folder has its plan already; leave out {given[0]}, or split the model again with it"
            )
        return load(options.model, edited=options.edited)
    if getattr(options, "edited", False):
        raise UsageError(f"--edited is of a saved folder; {options.model} is split here")
    line = ProgressLine()
    pipe = split(
        model_named(options.model),
        cluster=named_cluster(options),
        profile_cache=not options.no_profile_cache,
        progress=line,
        **planning(options),
    )
    line.close()
    return pipe


def named_model(options: argparse.Namespace) -> nn.Module:
    """Returns the model that MODEL names, not split."""
    name = str(options.model)
    if is_onnx(options) or saved_folder(options) is not None:
        raise UsageError(f"{name} is split already, or for inference; name the model itself")
    return model_named(name)


def check_writable(path: Path | None) -> None:
    """Raises InputError for a file that cannot be written, before minutes are spent on its content."""
    if path is None:
        return
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise UsageError(f"{path} cannot be written; name a file in a folder that is there and is yours")


def check_folder(path: Path | None) -> None:
    """Raises InputError for a folder that cannot be written; it may exist or not."""
    if path is None:
        return
    there = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise UsageError(f"{path} cannot be a folder that is written to: {there} is none of yours")


def named_cluster(options: argparse.Namespace) -> int | str | None:
    """Returns a number of devices, or the path of a cluster file."""
    given: str | None = options.cluster
    return int(given) if given is not None and given.removeprefix("-").isdigit() else given


def loaded(name: str) -> Any:
    """Returns what `module:attribute` or `file.py:attribute` names, also from the working folder."""
    module_name, _, attribute = name.rpartition(":")
    if not module_name or not attribute:
        raise UsageError(f"{name!r} is not of the form module:callable")
    folder, file = "", Path(module_name)
    if file.suffix == ".py":
        if not file.is_file():
            raise UsageError(f"{name!r} cannot be imported: there is no file {module_name}")
        folder, module_name = str(file.absolute().parent), file.stem
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
        if folder and not file.samefile(getattr(module, "__file__", None) or "."):
            raise UsageError(
                f"{name!r} cannot be imported: another module is called {module_name}; rename the file"
            )
        return getattr(module, attribute)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{name!r} cannot be imported: {error}") from error
    except UsageError:
        raise
    except Exception as error:  # whatever the module's own code raises
        raise InputError(f"importing {module_name} raises {_said(error)}") from error


def called(name: str, factory: Any) -> Any:
    """Returns what the user's callable returns. Raises InputError that says where it failed."""
    if not callable(factory):
        raise UsageError(f"{name!r} is a {type(factory).__name__}; something to call was expected")
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # some callables in C have none
        signature = inspect.Signature()
    try:
        signature.bind()
    except TypeError as error:
        raise UsageError(f"{name!r} cannot be called without arguments: {error}") from error
    try:
        return factory()
    except Exception as error:  # whatever the user's own code raises
        raise InputError(f"{name!r} raises {_said(error)}") from error


def _said(error: Exception) -> str:
    """Returns the error, and the last line of the user's code that led to it."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}; --debug shows the traceback"


def model_named(name: str) -> nn.Module:
    if name in MODELS:
        return build(name)
    if ":" not in name:
        raise UsageError(
            f"{name!r} is no model of ours ({', '.join(sorted(MODELS))}), no folder, and not of the form "
            "module:callable or file.py:callable"
        )
    factory = loaded(name)
    if isinstance(factory, nn.Module):
        return factory
    model = called(name, factory)
    if not isinstance(model, nn.Module):
        raise UsageError(f"{name!r} gives a {type(model).__name__}; an nn.Module was expected")
    return model
