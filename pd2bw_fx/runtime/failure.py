"""How ranks learn why another one ended: the failing rank leaves its reason in the group's store.

A lost connection says only that a process is gone. A rank that sees one looks into the store before it
raises.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import time
import traceback
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from pd2bw_fx.errors import WorkerError
from pd2bw_fx.runtime.launcher import tell_launcher
from pd2bw_fx.stage_errors import place_of

_MAKING = "making an engine"
_MEETING_S = 5.0  # until all ranks have met: at a batch that one of them refuses, or at the end
_FULL = (
    "the device's memory is full: try smaller microbatches (more microbatches_per_update), "
    "split(recompute=True), or more stages; where less of it is free than its memory_bytes in the cluster "
    "file, say so there"
)
_GRACE_S = 2.0  # between the end of a connection and the reason of the rank that ended it
_STAY_S = 3.0  # of the rank that holds the store, at most: others may not have read why they end


class LinkDownError(WorkerError):
    """The rank at the other end is gone, or did not answer in time."""

    def __init__(self, peer: int | None, how: str) -> None:
        super().__init__(f"{'another rank' if peer is None else f'rank {peer}'} {how}")
        self.peer = peer
        self.how = how


def name_peer_in_errors(peer: int | None) -> contextlib.AbstractContextManager[None]:
    """Raises LinkDownError for torch.distributed's errors, which name an address where ours name the rank.

    `peer` None is one of all the others.
    """
    return _NamedPeer(peer)


class _NamedPeer(contextlib.AbstractContextManager[None]):
    """A class where a generator would do: every message enters one, in a third of the time."""

    __slots__ = ("_peer",)

    def __init__(self, peer: int | None) -> None:
        self._peer = peer

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (RuntimeError, EOFError, OSError)):
            how = "no longer answers: it ended, or hung for longer than its time limit"
            cause = first_line(error).partition(". This is typically")[0]  # gloo's advice, which is none here
            raise LinkDownError(self._peer, f"{how} ({cause})") from error


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def calls_apart(here: str, own: str, there: str, theirs: str, *, rule: str = "") -> str:
    """Returns a message: ranks named `here` and `there` are in different calls, `own` and `theirs`."""
    rule = rule or "in the same order, with as many batches"
    return f"{here} is {own} where {there} is {theirs}: all ranks make the same calls {rule}"


def left_early(who: str) -> str:
    """Returns a message: a rank's program has ended before those of ranks that wait for it."""
    return (
        f"{who} has left the pipeline: its program ended, or closed its engine, early; every rank makes each "
        "call of its engine, state_dict and save_checkpoint too"
    )


def at(error: BaseException) -> str:
    """Returns, for the end of a summary, at which call of a stage an error began; else nothing."""
    place = place_of(error)
    return "" if place is None else f", at {place}"


def note_full_memory(error: BaseException) -> None:
    """Adds to an error of a GPU's full memory what to try."""
    if isinstance(error, torch.OutOfMemoryError) and _FULL not in getattr(error, "__notes__", ()):
        error.add_note(_FULL)


@contextlib.contextmanager
def share_failure(
    rank: int,
    stages: str,
    doing: Callable[[], str],
    lost: Callable[[Callable[[], str | None]], str | None] = lambda told: told(),
    *,
    named: Callable[[int], str] = "rank {}".format,
    engine: str = _MAKING,
) -> Iterator[None]:
    """Tells all ranks of a failure in here; raises one that began on another rank with that rank's reason.

    `doing` says what this rank is at, `named` names a rank with its stages. `lost` says which rank has ended
    without a word, and how, or what another rank has found out meanwhile: the rank at the other end of a lost
    connection may itself be a later victim.
    `engine` is a name that the ranks' engines share with no others.
    """
    try:
        yield
    except LinkDownError as error:
        seen_by = f"\n(seen by rank {rank}, {stages}, {doing()})"
        known = str(error) if error.peer is None else f"{named(error.peer)} {error.how}"
        tell_launcher(WorkerError(known + seen_by))  # torchrun may end this rank before it knows more
        reason = _told(engine, _GRACE_S) or lost(functools.partial(_told, engine))
        if reason is None:
            raise
        tell(engine, reason)
        seen = WorkerError(f"{reason}{seen_by}")
        tell_launcher(seen)
        with contextlib.suppress(RuntimeError, ValueError):  # torch.distributed has gone
            others = dist.get_world_size() - 1  # the one that ended says nothing
            is_met_by_all(f"told/{engine}", others, _STAY_S if holds_the_store(rank) else 0.0)
        raise seen from None  # the lost connection is a consequence of the reason
    except (SystemExit, KeyboardInterrupt) as error:
        tell(engine, f"the program of rank {rank} ({stages}) ended {doing()}: {error!r}")
        raise
    except Exception as error:
        note_full_memory(error)
        error.add_note(f"on rank {rank}, {stages}, {doing()}")
        tell(engine, f"rank {rank} ({stages}) failed {doing()}{at(error)}:\n{traceback.format_exc()}")
        tell_launcher(error, traceback.format_exc())
        raise


def is_met_by_all(what: str, num_ranks: int, within_s: float = _MEETING_S) -> bool:
    """Returns whether so many ranks call this with the same `what` in a few seconds, so that none waits here.

    `what` is a name that is used for nothing else.
    """
    with contextlib.suppress(RuntimeError, ValueError):  # the store has gone, or torch.distributed with it
        store = dist.distributed_c10d._get_default_store()
        store.add(f"pd2bw_fx/met/{what}", 1)
        deadline_s = time.monotonic() + within_s
        while time.monotonic() < deadline_s:
            if store.add(f"pd2bw_fx/met/{what}", 0) >= num_ranks:
                return True
            time.sleep(_MEETING_S / 100)
    return False


def forget(engine: str = _MAKING) -> None:
    """Deletes the reasons that the ranks of an earlier engine have left under this name."""
    with contextlib.suppress(RuntimeError):
        dist.distributed_c10d._get_default_store().delete_key(_key(engine))


def tell(engine: str, reason: str) -> None:
    """Leaves the reason why this rank ends; of several ranks' reasons the first one stays."""
    with contextlib.suppress(RuntimeError):  # the store may have gone with its host: the others see that too
        dist.distributed_c10d._get_default_store().compare_set(_key(engine), "", reason)


def holds_the_store(rank: int) -> bool:
    """Returns whether the store in which ranks meet ends with this rank: it may be torchrun's own."""
    return rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _told(engine: str, within_s: float = 0.0) -> str | None:
    try:
        store = dist.distributed_c10d._get_default_store()
        if within_s:
            store.wait([_key(engine)], datetime.timedelta(seconds=within_s))
        return str(store.get(_key(engine)).decode()) if store.check([_key(engine)]) else None
    except (RuntimeError, ValueError):
        return None  # nobody said anything: a process was killed


def _key(engine: str) -> str:
    return f"pd2bw_fx/failure/{engine}"
