"""A rank that is stopped or hangs closes no connection: ranks also tell each other that they are alive.

    every second   set alive/RANK to a count in the store of the ranks' meeting; look at the others' counts
    inside a call  of the engine, a rank whose count has stood still for `silence_s` ends this one too
                   So does one whose program calls something else, when this call has taken as long: where one
                   has fewer batches and flushes, each may wait for the other.

What waits in a process group cannot be interrupted, so the end is that of the process: one message, and exit
code 1.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pd2bw_fx.errors import WorkerError
from pd2bw_fx.runtime.failure import STARTED_BY, calls_apart, end_now, tell_launcher

_BEAT_S = 1.0
_LOST_S = 3.5  # of silence, after which the one that is longest silent has caused the end of a connection
_MAKING = 3.0  # times the silence while engines are made: what is imported then may hold the interpreter
_MOST_WATCHED = 64
_CALLS_KEPT = 1024  # by so many calls are ranks never apart
_DONE = b"done"


class Watch:
    """Watches the other ranks from threads of its own; inside a `with` their silence ends this one."""

    def __init__(self, store: Any, rank: int, num_ranks: int, *, silence_s: float) -> None:
        self._rank = rank
        self._silence_s = silence_s
        self._allowed_s = _MAKING * silence_s
        self._described: Callable[[int], str] = "rank {}".format
        self._doing: Callable[[], str] = lambda: "making its engine"
        self._others = [(rank + step) % num_ranks for step in range(1, min(num_ranks, _MOST_WATCHED + 1))]
        self._tell: Callable[[str], None] = lambda reason: None
        self._engine = ""
        self._depth = 0
        self._entered_s = 0.0
        self._call = (0, "\n")  # the last that all ranks make: its number, what it does, and on what
        self._calls: dict[int, str] = {}
        self._calls_there: dict[int, tuple[str, int, str]] = {}  # the others' last, with the engine's name
        self._processes: dict[int, int] = {}  # the others', each by its number on its own machine
        self._is_closed = threading.Event()
        self._counts: dict[int, bytes] = {}
        self._left: list[int] = []  # in the order in which that was heard
        self._failed: tuple[float, str] | None = None  # another rank: when that was heard, and why
        self._heard_s = dict.fromkeys(self._others, time.monotonic())
        self._answered_s = time.monotonic()  # by the store
        if num_ranks == 1 or not silence_s:
            self._is_closed.set()
            return
        self._store = store.clone()  # the other one may be waiting for something
        self._beat(0)
        atexit.register(self.close)
        self._threads = [
            threading.Thread(target=loop, name="pd2bw_fx watch", daemon=True)
            for loop in (self._listen, self._judge)
        ]
        for thread in self._threads:
            thread.start()

    def tell_of(
        self,
        engine: str,
        described: Callable[[int], str],
        doing: Callable[[], str],
        tell: Callable[[str], None],
    ) -> None:
        """The engine is made: its name, what names a rank with its stages, what this one is at, and how to
        tell the others why it ends."""
        self._engine, self._described, self._doing, self._tell = engine, described, doing, tell
        self._allowed_s = self._silence_s

    def begin(self, doing: str, on: str) -> None:
        """A call that all ranks make, on something of which all say the same."""
        number, doing = self._call[0] + 1, f"{doing}\n{on}"
        self._calls[number] = doing
        self._calls.pop(number - _CALLS_KEPT, None)
        self._call = number, doing

    def __enter__(self) -> None:
        if not self._depth:
            self._entered_s = time.monotonic()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1

    def lost(self) -> str | None:
        """Which rank has stopped to give signs of life, waited for, or has left; None where none has."""
        deadline_s = time.monotonic() + 2 * _LOST_S
        while not self._is_closed.is_set() and time.monotonic() < deadline_s:
            silent_s = {other: self._answered_s - self._heard_s[other] for other in list(self._counts)}
            silent = None
            if silent_s and max(silent_s.values()) > _LOST_S:
                silent = self._described(max(silent_s, key=lambda other: silent_s[other]))
            elif time.monotonic() - self._answered_s > _LOST_S:
                silent = self._holder()
            if silent is not None:
                return f"{silent} no longer answers: it was killed, or hangs"
            if self._left:
                who = self._described(self._left[0])
                return f"{who} has left the pipeline: its program ended, or closed its engine, early"
            time.sleep(_BEAT_S / 10)
        return None

    def fail(self, why: str) -> None:
        """This rank will make no further calls: whoever waits for one ends, with connections still open."""
        if not self._is_closed.is_set():
            with contextlib.suppress(RuntimeError):
                self._store.set(self._failure_key, why)

    def close(self, failed: str | None = None) -> None:
        """This rank has no part in the pipeline any longer, or (why) cannot go on with it."""
        atexit.unregister(self.close)
        if not self._is_closed.is_set():
            self._is_closed.set()
            # A thread that is inside of the store when the interpreter ends takes the process with it.
            for thread in self._threads:
                thread.join(_BEAT_S)
            with contextlib.suppress(RuntimeError):
                if failed is not None:
                    self._store.set(self._failure_key, failed)
                self._store.set(_key(self._rank), _DONE)

    @property
    def _failure_key(self) -> str:
        return f"pd2bw_fx/failed/{self._engine}"

    def _listen(self) -> None:
        """Tell and ask. A store whose process is stopped answers nothing, without any time limit."""
        beat = 0
        while not self._is_closed.wait(_BEAT_S):
            beat += 1
            with contextlib.suppress(RuntimeError):
                self._beat(beat)
                there = [other for other in self._others if self._store.check([_key(other)])]
                values = self._store.multi_get([_key(other) for other in there]) if there else []
                self._answered_s = time.monotonic()
                if self._failed is None and self._engine and self._store.check([self._failure_key]):
                    self._failed = self._answered_s, self._store.get(self._failure_key).decode()
                for other, value in zip(there, values, strict=True):
                    if value == _DONE or self._counts.get(other) != value:
                        self._counts[other], self._heard_s[other] = value, self._answered_s
                        self._note(other, value)

    def _beat(self, count: int) -> None:
        self._store.set(_key(self._rank), json.dumps([count, os.getpid(), self._engine, *self._call]))

    def _note(self, other: int, value: bytes) -> None:
        if value != _DONE:
            _, self._processes[other], *there = json.loads(value)
            self._calls_there[other] = tuple(there)
            self._left = [rank for rank in self._left if rank != other]  # that was of an engine before
        elif other not in self._left:
            self._left.append(other)

    def _judge(self) -> None:
        before_s = time.monotonic()
        while not self._is_closed.wait(_BEAT_S):
            now_s = time.monotonic()
            if now_s - before_s > 3 * _BEAT_S:
                # This process itself stood still: what it has not heard says nothing of others.
                self._heard_s, self._answered_s = dict.fromkeys(self._others, now_s), now_s
            before_s = now_s
            if not self._depth:
                continue
            if self._failed is not None:
                # The other's program goes on, with the connections that this one waits at.
                failed_s, why = self._failed
                if now_s - max(failed_s, self._entered_s) > self._silence_s:
                    self._end_for(why)
            if now_s - self._answered_s > self._allowed_s:
                self._end(self._holder(), now_s - self._answered_s)
            for other, heard_s in self._heard_s.items():
                silence_s = self._answered_s - heard_s
                if other in self._counts and silence_s > self._allowed_s:
                    _wake(self._processes.get(other, 0))
                    self._end(self._described(other), silence_s)
            if now_s - self._entered_s > self._allowed_s and (reason := self._apart()):
                telling = threading.Thread(target=self._tell, args=(reason,), daemon=True)
                telling.start()
                telling.join(_BEAT_S)
                self._end_for(reason)

    def _apart(self) -> str | None:
        """Where this rank's program and another's have parted."""
        for other, (engine, number, there) in list(self._calls_there.items()):  # another thread adds to it
            here = self._calls.get(number, there)
            if engine == self._engine and here != there:
                (here, own), (there, theirs) = here.split("\n"), there.split("\n")
                ranks = self._described(self._rank), self._described(other)
                if here == there:
                    both = f"{here} on {own}", f"on {theirs}"
                    return calls_apart(ranks[0], both[0], ranks[1], both[1], rule="on the same batches")
                return calls_apart(ranks[0], here, ranks[1], there)
        return None

    def _holder(self) -> str:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return "torchrun on the first machine, which holds the store of the ranks,"
        return f"{self._described(0)}, which holds the store of the ranks,"

    def _end(self, who: str, silence_s: float) -> None:
        self._end_for(f"{who} has given no sign of life for {silence_s:.0f} s: it was stopped, or hangs")

    def _end_for(self, reason: str) -> None:
        told = f"{reason}\n(seen by {self._described(self._rank)}, {self._doing()})"
        if STARTED_BY not in os.environ:
            sys.stderr.write(f"WorkerError: {told}\n")
        tell_launcher(WorkerError(told), is_first=True)
        end_now()


def _wake(process: int) -> None:
    """One that is stopped takes the signal by which torchrun ends it only when it goes on; it would wait for
    half a minute. Only of this rank's own launcher: elsewhere the number is another process's."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        parent = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1]
        if int(parent) == os.getppid():
            os.kill(process, signal.SIGCONT)


def _key(rank: int) -> str:
    return f"pd2bw_fx/alive/{rank}"
