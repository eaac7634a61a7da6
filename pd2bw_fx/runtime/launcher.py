"""A process and the one that started it: torchrun's launcher, or a command that trains or measures.

The process ends with the one that started it, and tells it why it ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

from pd2bw_fx.errors import WorkerError

STARTED_BY = "PD2BW_FX_STARTED_BY"  # environment variable: the process that prints this rank's errors
STARTED_HERE = "--started-here"  # tells a rank that its errors are printed by the process that started it
_TELLING_S = 2.0
_LOOKING_S = 1.0  # between two looks at the parent


def is_under_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def end_now(tell: Callable[[], None] = lambda: None) -> NoReturn:
    """Ends this process without destructors, which may wait for peers in a torn process group.

    `tell` says why, and what was printed is flushed. They have a few seconds: whoever reads the output, or
    the disk that a file is on, may have stopped.
    """

    def last_words() -> None:
        tell()
        _flush()

    telling = threading.Thread(target=last_words, daemon=True)
    telling.start()
    telling.join(_TELLING_S)
    os._exit(1)


def end_with_parent(process_id: int) -> None:
    """Ends this process once `process_id` is not its parent any more: it was killed and could not tell."""

    def watch() -> None:
        while os.getppid() == process_id:
            time.sleep(_LOOKING_S)
        end_now()

    threading.Thread(target=watch, daemon=True).start()


def how_ended(code: int) -> str:
    """Returns how a process ended that has left no reason, by its exit code."""
    if code >= 0:
        return f"ended by itself with exit code {code}; its own output may say why"
    name = signal.Signals(-code).name
    hint = " (out of memory? see the system's log)" if name == "SIGKILL" else ""
    return f"was ended by {name}{hint}"


def _flush() -> None:
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None: it was closed from the beginning
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def leave_output() -> None:
    """Discards what is printed from now on, and what is buffered of it so far."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def tell_launcher(error: BaseException, shown: str = "", *, is_first: bool = False) -> None:
    """Writes what torchrun's summary, the last thing on the screen, shows of this rank for its exit code.

    Without it, the summary has only the exit code. torchrun names a file for it in the environment
    (torch.distributed.elastic's error file); a later error replaces an earlier one. torchrun takes the error
    with the earliest time for the cause, in whole seconds. A WorkerError, which follows from another rank's
    end, is therefore dated a second later, unless that rank can say nothing (`is_first`).
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file is None:
        return
    told_s = int(time.time()) + (isinstance(error, WorkerError) and not is_first)
    more = {"py_callstack": shown or str(error), "timestamp": str(told_s)}
    told = {"message": f"{type(error).__name__}: {error}", "extraInfo": more}
    try:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text(json.dumps({"message": told}), encoding="utf-8")
    except OSError:  # torchrun would fail at half a file
        with contextlib.suppress(OSError):
            Path(file).unlink()


@contextlib.contextmanager
def tell_launcher_of_errors() -> Iterator[None]:
    """Tells the launcher of a failure before the ranks share their failures: every rank has its own error."""
    try:
        yield
    except Exception as error:
        tell_launcher(error, "".join(traceback.format_exception_only(error)))
        raise
