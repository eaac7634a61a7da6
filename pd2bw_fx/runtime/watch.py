"""Ranks tell each other every second that they live: one that is stopped or hangs closes no connection.

    every second   set alive/RANK to a count in the store of the ranks' meeting, and read the others' counts
    inside a call  of the engine, this rank ends where another's count has stood still for `silence_s`, and
                   where this call has taken as long and another rank's program has made another call: of two
                   ranks one of which has fewer batches and flushes, each may wait for the other

A wait in a process group cannot be interrupted, so the whole process ends, with one message and exit code 1.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from pd2bw_fx.errors import WorkerError
from pd2bw_fx.runtime.failure import calls_apart, holds_the_store, left_early
from pd2bw_fx.runtime.launcher import STARTED_BY, end_now, tell_launcher

_BEAT_S = 1.0  # from one beat to the next
_LOST_S = 3.5  # of silence: the rank that is silent longest, and as long as this, has ended a connection
_MAKING = 3.0  # the silence allowed while engines are made, in `silence_s`: imports may hold the interpreter
_MOST_WATCHED = 64  # other ranks that a rank watches
_CALLS_KEPT = 1024  # of this rank's own: no two ranks are ever as many calls apart
_DONE = b"done"  # in place of a beat: this rank has no part in the pipeline any longer


class Call(NamedTuple):
    """A call that all ranks make: its number, what it does ("in update 3"), and on what (mostly nothing)."""

    number: int
    doing: str
    subject: str


class _Beat(NamedTuple):
    """What a rank writes into the store every second. `call` is its last one, of the engine of that name."""

    number: int  # changes from beat to beat
    process: int  # its number on the rank's own machine
    engine: str
    call: Call

    def encoded(self) -> str:
        return json.dumps([self.number, self.process, self.engine, *self.call])

    @classmethod
    def decoded(cls, value: bytes) -> Self:
        number, process, engine, *call = json.loads(value)
        return cls(number, process, engine, Call(*call))


@dataclass(slots=True)
class _Peer:
    """What this rank has heard of another one. `beat` is replaced as a whole: two threads read it."""

    heard_s: float  # when its value in the store last changed
    value: bytes | None = None  # the last one; None before the first
    beat: _Beat | None = None  # the last one, which stays when the rank is done


class Watch:
    """Watches the other ranks from two threads. Inside a `with`, their silence ends this process."""

    def __init__(self, store: Any, rank: int, num_ranks: int, *, silence_s: float) -> None:
        self._rank = rank
        self._silence_s = silence_s
        self._allowed_s = _MAKING * silence_s
        self._described: Callable[[int], str] = "rank {}".format
        self._doing: Callable[[], str] = lambda: "making its engine"
        self._tell: Callable[[str], None] = lambda reason: None
        self._engine = ""
        self._depth = 0
        self._entered_s = 0.0
        self._call = Call(0, "", "")  # this rank's last
        self._calls: dict[int, Call] = {}  # this rank's last ones, by number
        self._is_closed = threading.Event()
        others = [(rank + step) % num_ranks for step in range(1, min(num_ranks, _MOST_WATCHED + 1))]
        self._peers = {other: _Peer(heard_s=time.monotonic()) for other in others}
        self._left: list[int] = []  # ranks that are done, in the order in which that was heard
        self._failed: tuple[float, str] | None = None  # another rank: when that was heard, and why
        self._answered_s = time.monotonic()  # when the store last answered
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
        """Takes note of an engine that is made.

        `engine` is its name, `described` names a rank with its stages, `doing` says what this rank is at, and
        `tell` tells the others why it ends.
        """
        self._engine, self._described, self._doing, self._tell = engine, described, doing, tell
        self._allowed_s = self._silence_s

    def begin(self, doing: str, subject: str) -> None:
        """Takes note of a call that all ranks make: what it does, and on what, in the same words on all."""
        call = Call(self._call.number + 1, doing, subject)
        self._calls[call.number] = call
        self._calls.pop(call.number - _CALLS_KEPT, None)
        self._call = call

    def __enter__(self) -> None:
        if not self._depth:
            self._entered_s = time.monotonic()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1

    def lost(self, told: Callable[[], str | None]) -> str | None:
        """Waits some seconds for a rank to fall silent or leave; returns what became of it, or None.

        It may be `told` by another rank, which has heard of it before: once that has ended, and the store
        with it, nothing more is heard.
        """
        deadline_s = time.monotonic() + 2 * _LOST_S
        while not self._is_closed.is_set() and time.monotonic() < deadline_s:
            silent_s = {
                other: self._answered_s - peer.heard_s
                for other, peer in self._peers.items()
                if peer.value is not None
            }
            silent = None
            if silent_s and max(silent_s.values()) > _LOST_S:
                silent = self._described(max(silent_s, key=lambda other: silent_s[other]))
            elif time.monotonic() - self._answered_s > _LOST_S:
                silent = self._holder()
            if silent is not None:
                return f"{silent} no longer answers: it was killed, or hangs"
            if self._left:
                return left_early(self._described(self._left[0]))
            time.sleep(_BEAT_S / 10)
            if (reason := told()) is not None:
                return reason
        return None

    def fail(self, why: str) -> None:
        """Tells the others that this rank makes no more calls: a rank that waits for one ends.

        Its connections stay open.
        """
        if not self._is_closed.is_set():
            with contextlib.suppress(RuntimeError):
                self._store.set(self._failure_key, why)

    def close(self, failed: str | None = None) -> None:
        """Stops watching: this rank is done with the pipeline, or `failed` says why it cannot go on."""
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
        """Writes this rank's beat and reads the others', again and again.

        A store whose process is stopped does not answer, however long the call waits.
        """
        number = 0
        while not self._is_closed.wait(_BEAT_S):
            number += 1
            with contextlib.suppress(RuntimeError):
                self._beat(number)
                there = [other for other in self._peers if self._store.check([_key(other)])]
                values = self._store.multi_get([_key(other) for other in there]) if there else []
                self._answered_s = time.monotonic()
                if self._failed is None and self._engine and self._store.check([self._failure_key]):
                    self._failed = self._answered_s, self._store.get(self._failure_key).decode()
                for other, value in zip(there, values, strict=True):
                    if value == _DONE or self._peers[other].value != value:
                        self._note(other, value)

    def _beat(self, number: int) -> None:
        beat = _Beat(number, os.getpid(), self._engine, self._call)
        self._store.set(_key(self._rank), beat.encoded())

    def _note(self, other: int, value: bytes) -> None:
        peer = self._peers[other]
        peer.value, peer.heard_s = value, self._answered_s
        if value != _DONE:
            peer.beat = _Beat.decoded(value)
            self._left = [rank for rank in self._left if rank != other]  # it had left an earlier engine
        elif other not in self._left:
            self._left.append(other)

    def _judge(self) -> None:
        """Ends this process where one of the others has failed, is silent, or makes other calls."""
        before_s = time.monotonic()
        while not self._is_closed.wait(_BEAT_S):
            now_s = time.monotonic()
            if now_s - before_s > 3 * _BEAT_S:
                # This process itself stood still: what it has not heard says nothing of others.
                self._answered_s = now_s
                for peer in self._peers.values():
                    peer.heard_s = now_s
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
            for other, peer in self._peers.items():
                silence_s = self._answered_s - peer.heard_s
                if peer.value is not None and silence_s > self._allowed_s:
                    _wake(0 if peer.beat is None else peer.beat.process)
                    self._end(self._described(other), silence_s)
            if now_s - self._entered_s > self._allowed_s and (reason := self._apart()):
                telling = threading.Thread(target=self._tell, args=(reason,), daemon=True)
                telling.start()
                telling.join(_BEAT_S)
                self._end_for(reason)

    def _apart(self) -> str | None:
        """Returns where this rank's program and another's have parted, or None."""
        for other, peer in self._peers.items():
            beat = peer.beat
            if beat is None or beat.engine != self._engine:
                continue
            there = beat.call
            here = self._calls.get(there.number, there)
            if here == there:
                continue
            this_rank, other_rank = self._described(self._rank), self._described(other)
            if here.doing != there.doing:
                return calls_apart(this_rank, here.doing, other_rank, there.doing)
            own, theirs = f"{here.doing} on {here.subject}", f"on {there.subject}"
            return calls_apart(this_rank, own, other_rank, theirs, rule="on the same batches")
        return None

    def _holder(self) -> str:
        who = self._described(0) if holds_the_store(0) else "torchrun on the first machine"
        return f"{who}, which holds the store of the ranks,"

    def _end(self, who: str, silence_s: float) -> None:
        self._end_for(f"{who} has given no sign of life for {silence_s:.0f} s: it was stopped, or hangs")

    def _end_for(self, reason: str) -> None:
        told = f"{reason}\n(seen by {self._described(self._rank)}, {self._doing()})"

        def tell() -> None:
            tell_launcher(WorkerError(told), is_first=True)
            if STARTED_BY not in os.environ:
                sys.stderr.write(f"WorkerError: {told}\n")

        end_now(tell)


def _wake(process: int) -> None:
    """Lets a stopped process go on, if it is a child of this rank's own launcher.

    A stopped process takes the signal by which torchrun ends it only when it goes on, and torchrun would wait
    half a minute for it. On another machine, or of another launcher, the number is another process's.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        parent = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1]
        if int(parent) == os.getppid():
            os.kill(process, signal.SIGCONT)


def _key(rank: int) -> str:
    return f"pd2bw_fx/alive/{rank}"
