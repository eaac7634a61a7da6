"""Run by torchrun: another of these programs, with its engines on a GPU, or with links as nccl has them.

    torchrun --nproc-per-node N elsewhere.py cuda equals_methods.py RESULT.json

cuda       on the GPU that this rank has, whether others have it too or not
nccl       the same, over nccl even where ranks share a GPU: each tells nccl that it is a machine of its own
in-order   on the CPU: whatever goes one way on a link goes in the order that it is asked for and without a
           tag, a send ends when it has been received, the first sum of a group waits until all its ranks are
           there, and all that was asked for is waited for after every call, and where something is computed
           for the first time
"""

import os
import queue
import runpy
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pd2bw_fx.actions import Kind
from pd2bw_fx.runtime import setup
from pd2bw_fx.runtime.channel import Route
from pd2bw_fx.runtime.groups import Groups
from pd2bw_fx.runtime.options import EngineOptions
from pd2bw_fx.runtime.rank_runner import RankRunner
from pd2bw_fx.runtime.stage_runner import StageRunner
from pd2bw_fx.runtime.update import PendingUpdate
from pd2bw_fx.runtime.weights import WeightStore

_COMPUTES = ((PendingUpdate, "_start_squares"), (PendingUpdate, "_clip"), (WeightStore, "_step"))


class InOrder:
    """What a group carries out, one after another."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[Sent] = queue.SimpleQueue()
        self.last: Sent | None = None
        threading.Thread(target=self._work, daemon=True).start()

    def add(self, work: Callable[[], None]) -> "Sent":
        self.last = sent = Sent(work)
        self._waiting.put(sent)
        return sent

    def _work(self) -> None:
        while True:
            sent = self._waiting.get()
            sent.work()
            sent.is_done.set()


class Sent:
    def __init__(self, work: Callable[[], None]) -> None:
        self.work, self.is_done = work, threading.Event()

    def wait(self) -> None:
        if not self.is_done.wait(30):
            raise RuntimeError("nothing has met this send or receive for 30 s")


def link_in_order() -> None:
    of_groups, on_gpu = dict[Any, InOrder](), set[Any]()

    def of(route: Route) -> InOrder:
        if route.group not in of_groups:
            of_groups[route.group] = InOrder()
        return of_groups[route.group]

    isend_by_host, irecv_by_host = Route.isend, Route.irecv

    def isend(route: Route, tensor: Tensor, tag: int) -> Any:
        if route.group not in on_gpu:
            return isend_by_host(route, tensor, tag)

        def work() -> None:
            dist.send(tensor, route.peer, group=route.group)
            dist.recv(torch.empty(1), route.peer, group=route.group, tag=1)

        return of(route).add(work)

    def irecv(route: Route, buffer: Tensor, tag: int) -> Any:
        if route.group not in on_gpu:
            return irecv_by_host(route, buffer, tag)

        def work() -> None:
            dist.recv(buffer, route.peer, group=route.group)
            dist.send(torch.empty(1), route.peer, group=route.group, tag=1)

        return of(route).add(work)

    all_reduce, used, adding = dist.all_reduce, set[Any](), list[Any]()

    def all_reduce_in_order(tensor: Tensor, *args: Any, group: Any = None, async_op: bool = False) -> Any:
        work = all_reduce(tensor, *args, group=group, async_op=True)
        if group not in used or not async_op:
            work.wait()
        used.add(group)
        if group in on_gpu:
            adding.append(work)
        return work

    def wait_for_all() -> None:
        for group in of_groups.values():
            if group.last is not None:
                group.last.wait()
        while adding:
            adding.pop().wait()

    def waits_first(compute: Callable[..., Any]) -> Callable[..., Any]:
        """As a kernel that has not been called before. That of a forward or backward is one of its size."""
        seen = weakref.WeakKeyDictionary[Any, set[Any]]()

        def computing(self: Any, *args: Any, **given: Any) -> Any:
            size = (
                self._in_flight[args[0].microbatch].microbatch.size if isinstance(self, StageRunner) else None
            )
            of = self.clipping.group if isinstance(self, PendingUpdate) else self  # an engine's
            if size not in seen.setdefault(of, set()):
                seen[of].add(size)
                wait_for_all()
            return compute(self, *args, **given)

        return computing

    new, run = Groups._new, RankRunner.run

    def make(groups: Groups, ranks: Sequence[int], backend: str | None) -> dist.ProcessGroup:
        group = new(groups, ranks, "gloo")
        if backend == "nccl":
            on_gpu.add(group)
        return group

    def run_and_wait(runner: RankRunner, *args: Any, **given: Any) -> None:
        run(runner, *args, **given)
        wait_for_all()
        dist.barrier()

    dist.all_reduce = all_reduce_in_order  # type: ignore[assignment]
    setup.ranks_in_reach = lambda *_: frozenset()
    Route.isend, Route.irecv = isend, irecv  # type: ignore[method-assign]
    RankRunner.run = run_and_wait  # type: ignore[method-assign]
    for owner, name in _COMPUTES:
        setattr(owner, name, waits_first(getattr(owner, name)))
    performs = dict(StageRunner._performs)
    performs |= {kind: waits_first(performs[kind]) for kind in (Kind.FORWARD, Kind.BACKWARD)}
    StageRunner._performs = performs  # type: ignore[misc]
    Groups._chosen = lambda *_: True  # type: ignore[method-assign]
    Groups._new = make  # type: ignore[method-assign]
    torch.cuda.synchronize = lambda *_: None


def choose(**chosen: Any) -> None:
    """For every engine that is not told otherwise."""
    of = EngineOptions.of

    def with_choice(options: Mapping[str, Any], *others: str) -> EngineOptions:
        return of({**chosen, **options}, *others)

    EngineOptions.of = with_choice  # type: ignore[method-assign, assignment]


def main() -> None:
    where, program = sys.argv[1:3]
    if where == "in-order":
        link_in_order()
    else:
        choose(device="cuda", backend="nccl" if where == "nccl" else "gloo")
    if where == "nccl":
        os.environ |= {"NCCL_HOSTID": f"machine{os.environ['RANK']}", "NCCL_SOCKET_IFNAME": "lo"}
    del sys.argv[1:3]
    runpy.run_path(str(Path(__file__).parent / program), run_name="__main__")


if __name__ == "__main__":
    main()
