"""The command line: `pd2bw-fx COMMAND`, or `python -m pd2bw_fx COMMAND`.

Exit codes: 0 done, 1 the work failed, 2 wrong use. A user's mistake gets one line, not a traceback
(`--debug` shows it).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pd2bw_fx.commands import comparing, onnx, planning, probing, training
from pd2bw_fx.errors import Pd2bwError
from pd2bw_fx.train import STARTED_HERE, tell_parent


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    options = parser().parse_args(arguments)
    options.arguments = arguments
    try:
        code: int = options.run(options)
    except Exception as error:
        if options.started_here:
            tell_parent(error)
            return 1
        if options.debug or not isinstance(error, Pd2bwError):
            raise
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 1
    return code


def parser() -> argparse.ArgumentParser:
    """What takes every command's words apart."""
    made = argparse.ArgumentParser(
        prog="pd2bw-fx",
        description="Split a PyTorch model into pipeline stages you can read, and train them with 2BW.",
    )
    made.add_argument("--debug", action="store_true", help="show the traceback of an error")
    made.add_argument(STARTED_HERE, action="store_true", help=argparse.SUPPRESS)
    commands = made.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for group in (planning, probing, training, onnx, comparing):
        group.add(commands)
    return made
