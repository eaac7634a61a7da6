"""All-reduces of the gradients of parameters that several ranks hold (tied, or of replicated stages).

They are added up over all holders before every update, in buckets, while the update's last backward still
runs:

    B 7     ... head     block 5   block 4      block 3   ...        of the last microbatch
                 `- bucket 0 -> all-reduce      `- bucket 1 -> all-reduce

Every holder then takes the same step on the same weights, so that the copies stay equal.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pd2bw_fx.costs import GRADIENT_BUCKET_BYTES
from pd2bw_fx.runtime.failure import name_peer_in_errors


@dataclass(frozen=True, slots=True)
class TiedParameter:
    """A parameter that this rank holds, and the group of all ranks that hold it."""

    name: str
    group: dist.ProcessGroup


def join_ties(
    holders: Mapping[str, tuple[int, ...]], rank: int, group_of: Callable[[Sequence[int]], dist.ProcessGroup]
) -> tuple[TiedParameter, ...]:
    """Returns this rank's tied parameters, in an order that is the same on all their holders.

    `holders` are the ranks of each parameter, `group_of` makes the group of some ranks. All ranks must call
    this.
    """
    groups = {ranks: group_of(ranks) for ranks in sorted(set(holders.values()))}
    return tuple(TiedParameter(name, groups[ranks]) for name, ranks in holders.items() if rank in ranks)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters of one type with the same holders, whose gradients one all-reduce adds up."""

    group: dist.ProcessGroup
    names: tuple[str, ...]


def in_buckets(ties: Sequence[TiedParameter], like: Mapping[str, Tensor]) -> tuple[Bucket, ...]:
    """Returns the parameters in buckets, last to first, about as a backward completes their gradients.

    `like[name]` has a gradient's size and type.
    """
    open_: dict[tuple[dist.ProcessGroup, torch.dtype], tuple[list[str], int]] = {}
    buckets: list[Bucket] = []
    for tied in reversed(ties):
        tensor = like[tied.name]
        names, size = open_.pop((tied.group, tensor.dtype), ([], 0))
        names, size = [*names, tied.name], size + tensor.nbytes
        if size >= GRADIENT_BUCKET_BYTES:
            buckets.append(Bucket(tied.group, tuple(names)))
        else:
            open_[tied.group, tensor.dtype] = names, size
    return (*buckets, *(Bucket(group, tuple(names)) for (group, _), (names, _) in open_.items()))


class GradientSums:
    """Sums the gradients that one update has for tied parameters over their holders.

    The buckets of a group start in the same order on all its ranks, whatever order gradients are completed
    in. `counted`: each bucket also counts the ranks that have gradients of their own, and a parameter for
    which no rank has one gets no sum. torch's optimizers leave such a parameter alone, but would step it for
    a sum of zeros. `is_held`: nothing starts before `start`.
    """

    def __init__(
        self,
        buckets: Iterable[Bucket],
        like: Mapping[str, Tensor],
        *,
        counted: bool = False,
        is_held: bool = False,
    ) -> None:
        self._like = like
        self._counted = counted
        self._is_held = is_held
        self._without: set[str] = set()
        self._waiting: dict[dist.ProcessGroup, deque[Bucket]] = {}
        for bucket in buckets:
            self._waiting.setdefault(bucket.group, deque()).append(bucket)
        self._group_of = {n: b.group for queue in self._waiting.values() for b in queue for n in b.names}
        self._complete: dict[str, Tensor] = {}
        self._adding: list[tuple[Bucket, Tensor, dist.Work]] = []

    def offer(self, name: str, gradient: Tensor) -> None:
        """Takes a gradient that is complete on this rank, and starts the bucket that it completes."""
        if name not in self._group_of:
            return
        assert name not in self._complete, f"the gradient of {name} was complete twice in an update"
        self._complete[name] = gradient
        self._start_complete(self._waiting[self._group_of[name]])

    def close(self, gradients: Mapping[str, Tensor], empty: Callable[[str], Tensor]) -> None:
        """Takes all gradients as complete; `empty(name)` is that of a holder that has none of its own."""
        for queue in self._waiting.values():
            for name in (name for bucket in queue for name in bucket.names):
                own = gradients.get(name)
                if own is None:
                    self._without.add(name)
                self._complete[name] = empty(name) if own is None else own
            self._start_complete(queue)

    def start(self) -> None:
        """Starts all buckets that are complete, now and from now on."""
        if self._is_held:
            self._is_held = False
            for queue in self._waiting.values():
                self._start_complete(queue)

    @property
    def is_under_way(self) -> bool:
        return bool(self._adding) or any(self._waiting.values())

    @property
    def have_arrived(self) -> bool:
        return not any(self._waiting.values()) and all(work.is_completed() for _, _, work in self._adding)

    def wait(self) -> dict[str, Tensor]:
        """Waits for the sums and returns them by name."""
        self.start()
        sums: dict[str, Tensor] = {}
        for bucket, flat, work in self._adding:
            wait_for(work)
            views = self._views(bucket, flat)
            if self._counted:
                counts = flat[-len(bucket.names) :].tolist()
                views = {n: views[n] for n, count in zip(bucket.names, counts, strict=True) if count}
            sums |= views
        return sums

    def _start_complete(self, queue: deque[Bucket]) -> None:
        while not self._is_held and queue and all(name in self._complete for name in queue[0].names):
            bucket = queue.popleft()
            likes = [self._like[name] for name in bucket.names]
            num_counts = len(likes) if self._counted else 0
            size = sum(t.numel() for t in likes) + num_counts
            flat = torch.empty(size, dtype=likes[0].dtype, device=likes[0].device)
            if num_counts:
                own = [float(name not in self._without) for name in bucket.names]
                flat[-num_counts:] = torch.tensor(own, dtype=flat.dtype, device=flat.device)
            for name, view in self._views(bucket, flat).items():
                view.copy_(self._complete[name])
            self._adding.append((bucket, flat, start_adding(bucket, flat)))

    def _views(self, bucket: Bucket, flat: Tensor) -> dict[str, Tensor]:
        views, offset = dict[str, Tensor](), 0
        for name in bucket.names:
            like = self._like[name]
            views[name] = flat.as_strided(like.shape, like.stride(), offset)
            offset += like.numel()
        return views


class UseQuestion:
    """Asks all ranks once, in the first update, which tied parameters have a gradient on any holder.

    It is for models in which that is the same in every update. Where no holder has a gradient, torch's
    optimizers leave the parameter alone, but would step it for a sum of zeros.
    """

    def __init__(self, ties: Sequence[TiedParameter], used_here: Iterable[str], device: torch.device) -> None:
        self._here = frozenset(used_here)
        self._groups = {tied.group: [t.name for t in ties if t.group is tied.group] for tied in ties}
        self._device = device
        self._asked: list[tuple[list[str], Tensor, dist.Work]] = []
        self._answer: frozenset[str] | None = None

    def ask(self) -> None:
        """Starts to ask, unless that was done."""
        while self._groups:
            group, names = next(iter(self._groups.items()))
            del self._groups[group]
            flags = torch.tensor([n in self._here for n in names], dtype=torch.float32, device=self._device)
            self._asked.append((names, flags, start_adding(Bucket(group, tuple(names)), flags)))

    def answer(self) -> frozenset[str]:
        if self._answer is None:
            self.ask()
            for _, _, work in self._asked:
                wait_for(work)
            self._answer = frozenset(
                name
                for names, flags, _ in self._asked
                for name, count in zip(names, flags.tolist(), strict=True)
                if count
            )
        return self._answer


class HasGroup(Protocol):
    @property
    def group(self) -> dist.ProcessGroup: ...


def start_adding(among: HasGroup, tensor: Tensor) -> dist.Work:
    """Starts to replace a tensor by its sum over the group."""
    with name_peer_in_errors(None):
        work = dist.all_reduce(tensor, group=among.group, async_op=True)
    assert isinstance(work, dist.Work)
    return work


def wait_for(work: dist.Work) -> None:
    with name_peer_in_errors(None):
        work.wait()
