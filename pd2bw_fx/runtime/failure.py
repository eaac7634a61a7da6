"""How ranks learn why another one ended: the failing rank leaves its reason in the group's store.

A lost connection says only that a process is gone. Whoever sees one looks into the store before it speaks.
"""

from __future__ import annotations

import contextlib
import datetime
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

import torch
import torch.distributed as dist

from pd2bw_fx.errors import WorkerError

STARTED_BY = "PD2BW_FX_STARTED_BY"  # in the environment of ranks whose errors that process prints
_MAKING = "making an engine"
_MEETING_S = 5.0  # until all ranks have come to where one is: a batch that it cannot take, the end
_FLUSH_S = 1.0
_FULL = (
    "the device's memory is full: try smaller microbatches (more microbatches_per_update), "
    "split(recompute=True), or more stages; where less of it is free than its memory_bytes in the cluster "
    "file, say so there"
)
_LOOKING_S = 1.0  # whether the parent is there
_GRACE_S = 2.0  # between the end of a connection and the word of the rank that ended it


def end_now() -> NoReturn:
    """End this process, for destructors of a torn process group may wait for peers; print what is to be."""
    flushing = threading.Thread(target=_flush, daemon=True)  # a reader that has stopped would hold it up
    flushing.start()
    flushing.join(_FLUSH_S)
    os._exit(1)


def end_with_parent(process_id: int) -> None:
    """From now on, when that process is not the parent any more: it was killed, and could tell nobody."""

    def watch() -> None:
        while os.getppid() == process_id:
            time.sleep(_LOOKING_S)
        end_now()

    threading.Thread(target=watch, daemon=True).start()


def how_ended(code: int) -> str:
    """Of a process that has left no word, by its exit code."""
    if code >= 0:
        return f"ended by itself with exit code {code}; its own output may say why"
    name = signal.Signals(-code).name
    hint = " (out of memory? see the system's log)" if name == "SIGKILL" else ""
    return f"was ended by {name}{hint}"


def _flush() -> None:
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None: it was closed from the beginning
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


class LinkDownError(WorkerError):
    """The rank at the other end is gone, or did not answer in time."""

    def __init__(self, message: str, *, peer: int | None) -> None:
        super().__init__(message)
        self.peer = peer


@contextlib.contextmanager
def translated(peer: int | None) -> Iterator[None]:
    """torch.distributed's errors name an address; ours name the rank (None: one of all the others)."""
    try:
        yield
    except (RuntimeError, EOFError, OSError) as error:
        whom = "another rank" if peer is None else f"rank {peer}"
        raise LinkDownError(
            f"{whom} no longer answers: it ended, or hung for longer than its time limit "
            f"({first_line(error)})",
            peer=peer,
        ) from error


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def calls_apart(here: str, own: str, there: str, theirs: str, *, rule: str = "") -> str:
    """Two ranks' names, and what each of them is at, which is not the same."""
    rule = rule or "in the same order, with as many batches"
    return f"{here} is {own} where {there} is {theirs}: all ranks make the same calls {rule}"


def note_full_memory(error: BaseException, doing: str = "") -> None:
    """Of a GPU: what to try, and the action if there is one; `doing` is as the engine says it."""
    if not isinstance(error, torch.OutOfMemoryError):
        return
    if _FULL not in getattr(error, "__notes__", ()):
        error.add_note(_FULL)
    action = doing.partition(", at ")[2]
    if action:
        error.add_note(f"at {action}")


@contextlib.contextmanager
def share_failure(
    rank: int,
    stages: str,
    doing: str,
    lost: Callable[[], str | None] = lambda: None,
    *,
    engine: str = _MAKING,
) -> Iterator[None]:
    """A failure in here is told to all ranks; one that began elsewhere is raised with its own reason.

    `lost` says which rank has ended without a word, and how: the other end of a lost connection may only be
    the next to fall. `engine` is a name that the ranks' engines share with no others.
    """
    try:
        yield
    except LinkDownError as error:
        reason = _told(engine) or lost()
        if reason is None:
            tell_launcher(error)
            raise
        tell(engine, reason)
        seen = WorkerError(f"{reason}\n(seen by rank {rank}, {stages}, {doing})")
        tell_launcher(seen)
        raise seen from error
    except (SystemExit, KeyboardInterrupt) as error:
        tell(engine, f"the program of rank {rank} ({stages}) ended {doing}: {error!r}")
        raise
    except Exception as error:
        error.add_note(f"on rank {rank}, {stages}, {doing}")
        note_full_memory(error)
        tell(engine, f"rank {rank} ({stages}) failed {doing}:\n{traceback.format_exc()}")
        tell_launcher(error, traceback.format_exc())
        raise


def is_met_by_all(what: str, num_ranks: int) -> bool:
    """Whether every rank calls this of the same thing in a few seconds: then nobody waits for this one.

    `what` is a name that is used for nothing else.
    """
    with contextlib.suppress(RuntimeError, ValueError):  # the store has gone, or torch.distributed with it
        store = dist.distributed_c10d._get_default_store()
        store.add(f"pd2bw_fx/met/{what}", 1)
        deadline_s = time.monotonic() + _MEETING_S
        while time.monotonic() < deadline_s:
            if store.add(f"pd2bw_fx/met/{what}", 0) == num_ranks:
                return True
            time.sleep(_MEETING_S / 100)
    return False


def tell_launcher(error: BaseException, shown: str = "", *, is_first: bool = False) -> None:
    """What torchrun's summary, the last thing on the screen, says of this rank in place of its exit code.

    torchrun names a file for it in the environment (torch.distributed.elastic's error file); later words
    replace earlier ones. Of all ranks' it takes the first for the cause, by whole seconds: a WorkerError,
    which follows from another rank's end, is given the next one, unless that rank can say nothing
    (`is_first`).
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
def told_to_launcher() -> Iterator[None]:
    """For what fails before the ranks share a fate: every rank has its own word of it."""
    try:
        yield
    except Exception as error:
        tell_launcher(error, "".join(traceback.format_exception_only(error)))
        raise


def forget(engine: str = _MAKING) -> None:
    """Of engines before: what their ranks have told is not the reason of this one's end."""
    with contextlib.suppress(RuntimeError):
        dist.distributed_c10d._get_default_store().delete_key(_key(engine))


def tell(engine: str, reason: str) -> None:
    """Why this rank ends; of several ranks' reasons the first stays."""
    with contextlib.suppress(RuntimeError):  # the store may have gone with its host: the others see that too
        dist.distributed_c10d._get_default_store().compare_set(_key(engine), "", reason)


def _told(engine: str) -> str | None:
    try:
        store = dist.distributed_c10d._get_default_store()
        store.wait([_key(engine)], datetime.timedelta(seconds=_GRACE_S))
        return str(store.get(_key(engine)).decode())
    except (RuntimeError, ValueError):
        return None  # nobody said anything: a process was killed


def _key(engine: str) -> str:
    return f"pd2bw_fx/failure/{engine}"
