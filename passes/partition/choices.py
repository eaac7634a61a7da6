"""The input and the output of a search: instances for all device orders, a deadline, the result."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from pd2bw_fx.errors import SolverError
from pd2bw_fx.passes.solver import Status

from .instance import Floats, Instance, Integers

FEW_CHOICES = 12
_CACHED_INSTANCES = 64


@dataclass(frozen=True, slots=True, eq=False)
class SearchResult:
    """The best assignment, the choice that it is of, and a bound that no assignment of any choice beats."""

    choice: int
    stage_of: Integers
    bottleneck_s: float
    bound_s: float


class NothingFaster(Exception):
    """Raised where no plan faster than a given one was found. No plan at all is faster than `bound_s`."""

    def __init__(self, bound_s: float) -> None:
        super().__init__(f"nothing faster was found; no plan is faster than {bound_s} s")
        self.bound_s = bound_s


class NoPlanInTime(SolverError):
    """Raised where the time ran out before any plan was found, or that there is none."""

    def __init__(self, nearest: str = "") -> None:
        super().__init__(
            f"there was no time to find a plan, or that there is none; {nearest}raise time_limit_s"
        )


class Answer(NamedTuple):
    """What is known about a target: an assignment within it, on one of the choices, or that there is none.

    With the status UNKNOWN, `stage_of` may be an assignment over the target, which can still be the best so
    far. Whatever the status, no assignment of any choice is faster than `bound_s`.
    """

    status: Status
    choice: int = -1
    stage_of: Integers | None = None
    bound_s: float = 0.0


class Deadline:
    """A time limit that counts down from when it is made. Ctrl-C stops it, and no step begins after that.

    It ends no later than the deadline that it is `within`, and stops that one with itself: of a call that
    searches several times, each search has a deadline within that of the call.
    """

    def __init__(self, time_limit_s: float, *, within: Deadline | None = None) -> None:
        self._end = time.perf_counter() + time_limit_s
        self._within = within
        self._is_stopped = False

    def stop(self) -> None:
        self._is_stopped = True
        self._end = 0.0
        if self._within is not None:
            self._within.stop()

    @property
    def is_stopped(self) -> bool:
        return self._is_stopped or (self._within is not None and self._within.is_stopped)

    @property
    def left_s(self) -> float:
        left_s = max(0.0, self._end - time.perf_counter())
        return left_s if self._within is None else min(left_s, self._within.left_s)


class Choices:
    """One problem under several device orders, with an instance for each, made when it is first used.

    `are_all` says that there are no other orders. `work_s` (devices, nodes) is the work on all devices, also
    on those that an order leaves out. `memory_key` is equal for choices whose stages have the same memory and
    may have the same nodes, so that the same assignments fit; without it no two are known to be alike.
    """

    def __init__(
        self,
        count: int,
        make: Callable[[int], Instance],
        *,
        are_all: bool = True,
        work_s: Floats | None = None,
        memory_key: Callable[[int], Hashable] | None = None,
    ) -> None:
        self.are_all = are_all
        self._memory_key = memory_key
        self._count = count
        self._make = make
        self._work_s = work_s
        self._made: dict[int, Instance] = {}

    def __len__(self) -> int:
        return self._count

    def changed(self, change: Callable[[Instance], Instance]) -> Choices:
        """Returns choices with the same orders, and `change` made to every instance."""
        make = self._make
        return Choices(
            self._count,
            lambda choice: change(make(choice)),
            are_all=self.are_all,
            work_s=self._work_s,
            memory_key=self._memory_key,
        )

    def that_fit_as(self, choice: int) -> list[int]:
        """Returns all choices on which the same assignments fit as on this one, itself included."""
        return self._by_memory[self._key_of(choice)]

    def different_in_memory(self) -> list[int]:
        """Returns one choice of each set of choices that are alike in what fits."""
        return [alike[0] for alike in self._by_memory.values()]

    def only(self, choices: Sequence[int]) -> Choices:
        """Returns some of the choices, which count as all that there are if these do."""
        return Choices(len(choices), lambda number: self[choices[number]], are_all=self.are_all)

    def _key_of(self, choice: int) -> Hashable:
        return choice if self._memory_key is None else self._memory_key(choice)

    @cached_property
    def _by_memory(self) -> dict[Hashable, list[int]]:
        groups: dict[Hashable, list[int]] = {}
        for choice in range(self._count):
            groups.setdefault(self._key_of(choice), []).append(choice)
        return groups

    def floor_s(self) -> float:
        """No assignment of any choice is faster."""
        if len(self) <= FEW_CHOICES or self._work_s is None:
            return min(floor_of(self[choice]) for choice in range(len(self)))
        return floor_s(self._work_s, self[0].num_stages)

    def __getitem__(self, choice: int) -> Instance:
        instance = self._made.get(choice)
        if instance is None:
            instance = self._make(choice)
            if len(self._made) < _CACHED_INSTANCES:
                self._made[choice] = instance
        return instance


def floor_of(instance: Instance) -> float:
    """A lower bound on the slowest stage from work alone, `fixed_s` included."""
    besides_s = instance.besides_s
    least_s = floor_s(instance.work_s, instance.num_stages) + float(besides_s.min())
    return least_s if instance.may_be_empty else max(least_s, float(besides_s.max()))


def floor_s(work_s: Floats, num_stages: int) -> float:
    """A lower bound on the slowest of `num_stages` stages, from `work_s` (devices, nodes) alone.

    The larger of two bounds. First, of any j k + 1 nodes some stage of k has j + 1, which take no less than
    the j + 1 fastest of them; the slowest j k + 1 nodes give the best such bound. Second, let each device
    have a weight. A node adds to the weighted sum of all loads no less than on the device where its weighted
    time is smallest, so the sum of these minima, divided by the sum of the k largest weights, bounds the
    slowest load. The weight is the device's speed: one over the time that it takes for all nodes.
    """
    k = num_stages
    slowest_first = np.sort(work_s.min(axis=0))[::-1]
    upto = np.concatenate(([0.0], slowest_first.cumsum()))
    j = np.arange(-(-len(slowest_first) // k))
    together_s = upto[j * k + 1] - upto[j * k - j]
    floor_s = float(max(together_s.max(initial=0.0), upto[-1] / k))
    total_s = work_s.sum(axis=1)
    if total_s.min() > 0:
        weight = 1.0 / total_s
        least = (weight[:, None] * work_s).min(axis=0).sum()
        floor_s = max(floor_s, float(least / np.sort(weight)[-k:].sum()))
    return floor_s
