"""The command line: `pd2bw-fx COMMAND`, or `python -m pd2bw_fx COMMAND`.

Exit codes: 0 done, 1 the work failed, 2 wrong use (InputError, ClusterError, and what argparse refuses). A
user's mistake gets one line, not a traceback (`--debug` shows it).
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence

from pd2bw_fx import __version__
from pd2bw_fx.commands import comparing, onnx, planning, probing, training
from pd2bw_fx.commands.common import DEBUG_HELP, CommandParser
from pd2bw_fx.commands.options import in_options
from pd2bw_fx.errors import ClusterError, InputError, Pd2bwError
from pd2bw_fx.runtime.launcher import (
    STARTED_BY,
    STARTED_HERE,
    end_with_parent,
    is_under_torchrun,
    leave_output,
    tell_launcher,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    options, unknown = parser().parse_known_args(arguments)
    if unknown:  # parse_args would say so below the usage of the whole program
        options.command.error(f"unrecognized arguments: {' '.join(unknown)}")
    options.arguments = arguments
    if options.started_here:
        end_with_parent(int(os.environ[STARTED_BY]))
    try:
        code: int = options.run(options)
        if sys.stdout is not None:  # None where it was closed from the beginning
            sys.stdout.flush()
    except BrokenPipeError:  # the reader, `head` for instance, has seen enough
        leave_output()
        return 0
    except KeyboardInterrupt:
        if not options.started_here:
            print("interrupted", file=sys.stderr)
        return 1
    except Exception as error:
        return _failed(error, options)
    return code


def _failed(error: Exception, options: argparse.Namespace) -> int:
    """Prints an error in one line if it is the user's to correct; a bug of ours keeps its traceback."""
    told = f"{type(error).__name__}: {error}"
    if isinstance(error, Pd2bwError) and hasattr(options, "runs"):  # the command splits a model
        told = in_options(told)
    is_theirs = isinstance(error, (Pd2bwError, OSError))
    if is_under_torchrun():
        is_short = is_theirs and not options.started_here and not options.debug
        tell_launcher(error, told if is_short else "".join(traceback.format_exception(error)))
    if not options.started_here:
        if options.debug or not is_theirs:
            raise error
        print(told, file=sys.stderr)
    return 2 if isinstance(error, (InputError, ClusterError)) else 1


def parser() -> argparse.ArgumentParser:
    """Returns the parser of every command's arguments."""
    made = argparse.ArgumentParser(
        prog="pd2bw-fx",
        description="Split a PyTorch model into pipeline stages you can read, and train them with 2BW.",
        epilog="exit codes: 0 done, 1 the work failed, 2 wrong use",
    )
    made.add_argument("--version", action="version", version=f"pd2bw-fx {__version__}")
    made.add_argument("--debug", action="store_true", help=DEBUG_HELP)
    made.add_argument(STARTED_HERE, action="store_true", help=argparse.SUPPRESS)
    commands = made.add_subparsers(
        title="commands", required=True, metavar="COMMAND", parser_class=CommandParser
    )
    for group in (planning, probing, training, onnx, comparing):
        group.add(commands)
    return made
