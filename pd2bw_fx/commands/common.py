"""What commands share: how they are declared, and the checks of what they are given."""

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from pd2bw_fx.cluster import Cluster
from pd2bw_fx.commands.options import add_planning, planning, planning_words
from pd2bw_fx.errors import UsageError
from pd2bw_fx.files import MANIFEST, require_onnx_file
from pd2bw_fx.models import MODELS
from pd2bw_fx.names import did_you_mean
from pd2bw_fx.passes.schedule import method_of

DEBUG_HELP = "show the traceback of an error"


class CommandParser(argparse.ArgumentParser):
    """Names an option that is unknown, and the nearest one, also where a required one is missing.

    argparse would then say only what is missing, which the mistyped option may be.
    """

    _words: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._words = list(args or ())
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        known = [word for word in self._option_string_actions if word.startswith("--")]
        for word in (word.partition("=")[0] for word in self._words if word.startswith("--")):
            if word not in known and word != "--":
                near = difflib.get_close_matches(word, known, n=1)
                message += f"; {word} is no option" + (f", did you mean {near[0]}?" if near else "")
        super().error(message)


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
        help=f"one of {', '.join(sorted(MODELS))}; or module:callable (file.py:callable) returning a model, "
        "whose example_inputs() gives a microbatch"
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


def check_split(options: argparse.Namespace) -> None:
    """Raises InputError where a model, an ONNX file or a saved folder cannot be what the options say."""
    if is_onnx(options):
        require_onnx_file(Path(options.model))
        _check_planning(options)
    else:
        check_pipeline(options)


def check_pipeline(options: argparse.Namespace) -> None:
    """As `check_split`, for a command that takes no ONNX file."""
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
        return
    if getattr(options, "edited", False):
        raise UsageError(f"--edited is of a saved folder; {options.model} is split here")
    check_model_name(str(options.model))
    _check_planning(options)


def check_model(options: argparse.Namespace) -> None:
    """Raises InputError where MODEL is no model that is not split yet, or the cluster file cannot be one."""
    name = str(options.model)
    if is_onnx(options) or saved_folder(options) is not None:
        raise UsageError(f"{name} is split already, or for inference; name the model itself")
    check_model_name(name)
    _check_planning(options)


def check_model_name(name: str) -> None:
    """Raises UsageError for what cannot name a model."""
    if name in MODELS:
        return
    if ":" not in name:
        raise UsageError(
            f"{name!r} is no model of ours ({', '.join(sorted(MODELS))}), no folder, and not of the form "
            f"module:callable or file.py:callable{did_you_mean(name, MODELS)}"
        )
    module_and_attribute(name)


def module_and_attribute(name: str) -> tuple[str, str]:
    """Returns the two parts of `module:attribute` or `file.py:attribute`. Raises UsageError for others."""
    module, _, attribute = name.rpartition(":")
    if not module or not attribute:
        raise UsageError(f"{name!r} is not of the form module:callable")
    if Path(module).suffix == ".py" and not Path(module).is_file():
        raise UsageError(f"{name!r} cannot be imported: there is no file {module}")
    return module, attribute


def _check_planning(options: argparse.Namespace) -> None:
    """Reads the files that the options name, and looks up the method."""
    given = planning(options)
    is_known = ":" not in str(options.model)  # a model's own file may register methods
    if is_known and (method := given.get("method")) is not None:
        method_of(method)
    if isinstance(cluster := named_cluster(options), str):
        Cluster.of(cluster)


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
