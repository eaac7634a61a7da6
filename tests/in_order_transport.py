"""Emulates on a CPU how nccl blocks: an engine that would hang over nccl hangs in tests without a GPU.

nccl                                              here
------------------------------------------------  -------------------------------------------------------
does a group's calls in order, and ignores tags   a queue and a thread for each group; no tags
ends a send when its receive has come             the receiver returns a token, and the sender waits for it
blocks a group's first sum until all ranks are    the first sum of each group is waited for
there
waits in some calls until the GPU is idle, such   before each first computation, and after RankRunner.run,
as the first call of a kernel                     all sends, receives and sums under way are waited for

A send over a link, with its token:

    rank 0   [send A ............ token][send B ..
    rank 1            [receive A, token][receive B ..
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pd2bw_fx.actions import Action, Kind
from pd2bw_fx.runtime import setup
from pd2bw_fx.runtime.channel import Route
from pd2bw_fx.runtime.groups import Groups
from pd2bw_fx.runtime.rank_runner import RankRunner
from pd2bw_fx.runtime.stage_runner import StageRunner
from pd2bw_fx.runtime.update import PendingUpdate
from pd2bw_fx.runtime.weights import WeightStore

TIMEOUT_S = 120
_TOKEN_TAG = 1


class QueuedCall:
    """A send or receive that its group's thread does; the engine waits for it as for a dist.Work."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.work, self.is_done = work, threading.Event()

    def wait(self) -> None:
        if not self.is_done.wait(TIMEOUT_S):
            raise RuntimeError(f"nothing has met this send or receive for {TIMEOUT_S} s")


class CallQueue:
    """The sends and receives of one group, done one after another by a thread."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[QueuedCall] = queue.SimpleQueue()
        self._last: QueuedCall | None = None
        threading.Thread(target=self._work, daemon=True).start()

    def add(self, work: Callable[[], None]) -> QueuedCall:
        self._last = call = QueuedCall(work)
        self._waiting.put(call)
        return call

    def wait(self) -> None:
        if self._last is not None:
            self._last.wait()

    def _work(self) -> None:
        while True:
            call = self._waiting.get()
            call.work()
            call.is_done.set()


class InOrderTransport:
    """Makes the engines of this process use gloo groups on the CPU that block as nccl groups do."""

    def __init__(self) -> None:
        self._queues: dict[dist.ProcessGroup, CallQueue] = {}
        self._nccl_groups = set[dist.ProcessGroup]()  # those that the engine takes for nccl's
        self._summed = set[dist.ProcessGroup | None]()  # groups whose first sum has been waited for
        self._sums = list[Any]()  # works of sums that may still be under way

    def install(self) -> None:
        """Replaces, for the rest of the process, what an engine calls to communicate and to compute."""
        Groups._chosen = lambda *_: True  # type: ignore[method-assign]
        setup.ranks_in_reach = lambda *_: frozenset()  # no shared memory between ranks
        torch.cuda.synchronize = lambda *_: None
        _wrap(Groups, "_new", self._new_group)
        _wrap(Route, "isend", self._isend)
        _wrap(Route, "irecv", self._irecv)
        _wrap(RankRunner, "run", self._run)
        all_reduce = dist.all_reduce
        dist.all_reduce = lambda *args, **given: self._all_reduce(all_reduce, *args, **given)

        for name in ("_start_squares", "_clip"):
            _wrap(PendingUpdate, name, self._waiting_first(_engine_of_update))
        _wrap(WeightStore, "_step", self._waiting_first(lambda store, *_: (store, None)))
        performs = dict(StageRunner._performs)
        for kind in (Kind.FORWARD, Kind.BACKWARD):
            performs[kind] = _wrapped(performs[kind], self._waiting_first(_stage_and_size))
        StageRunner._performs = performs  # type: ignore[misc]

    def _new_group(
        self, new: Callable[..., Any], groups: Groups, ranks: Sequence[int], backend: str | None
    ) -> dist.ProcessGroup:
        group: dist.ProcessGroup = new(groups, ranks, "gloo")
        if backend == "nccl":
            self._nccl_groups.add(group)
        return group

    def _isend(self, isend: Callable[..., Any], route: Route, tensor: Tensor, tag: int) -> Any:
        if route.group not in self._nccl_groups:
            return isend(route, tensor, tag)

        def work() -> None:
            dist.send(tensor, route.peer, group=route.group)
            dist.recv(torch.empty(1), route.peer, group=route.group, tag=_TOKEN_TAG)

        return self._queue_of(route).add(work)

    def _irecv(self, irecv: Callable[..., Any], route: Route, buffer: Tensor, tag: int) -> Any:
        if route.group not in self._nccl_groups:
            return irecv(route, buffer, tag)

        def work() -> None:
            dist.recv(buffer, route.peer, group=route.group)
            dist.send(torch.empty(1), route.peer, group=route.group, tag=_TOKEN_TAG)

        return self._queue_of(route).add(work)

    def _queue_of(self, route: Route) -> CallQueue:
        if route.group not in self._queues:
            self._queues[route.group] = CallQueue()
        return self._queues[route.group]

    def _all_reduce(
        self,
        all_reduce: Callable[..., Any],
        tensor: Tensor,
        *args: Any,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        work = all_reduce(tensor, *args, group=group, async_op=True)
        if group not in self._summed or not async_op:
            work.wait()
        self._summed.add(group)
        if group in self._nccl_groups:
            self._sums.append(work)
        return work

    def _run(self, run: Callable[..., None], runner: RankRunner, *args: Any, **given: Any) -> None:
        run(runner, *args, **given)
        self._wait_for_all()
        dist.barrier()

    def _waiting_first(self, kernel_of: Callable[..., tuple[Any, Any]]) -> Callable[..., Any]:
        """Makes a computation wait for all that is under way when it calls a kernel for the first time.

        `kernel_of` tells from the call's arguments what the kernel belongs to (no longer noted once that is
        gone), and what distinguishes it from others of the same owner.
        """
        seen = weakref.WeakKeyDictionary[Any, set[Any]]()

        def computing(compute: Callable[..., Any], *args: Any, **given: Any) -> Any:
            owner, variant = kernel_of(*args)
            variants = seen.setdefault(owner, set())
            if variant not in variants:
                variants.add(variant)
                self._wait_for_all()
            return compute(*args, **given)

        return computing

    def _wait_for_all(self) -> None:
        for calls in self._queues.values():
            calls.wait()
        while self._sums:
            self._sums.pop().wait()


def _engine_of_update(update: PendingUpdate, *_: Any) -> tuple[Any, None]:
    """An update is a new object each time; the group for norms is its engine's own."""
    assert update.clipping is not None
    return update.clipping.group, None


def _stage_and_size(runner: StageRunner, action: Action) -> tuple[StageRunner, int]:
    """Another size of a microbatch takes other kernels."""
    return runner, runner._in_flight[action.microbatch].microbatch.size


def _wrap(owner: type, name: str, around: Callable[..., Any]) -> None:
    setattr(owner, name, _wrapped(getattr(owner, name), around))


def _wrapped(original: Callable[..., Any], around: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function, a method if assigned to a class, that passes `original` to `around` first."""

    def wrapped(*args: Any, **given: Any) -> Any:
        return around(original, *args, **given)

    return wrapped
