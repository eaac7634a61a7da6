"""What is searched: the orders that the devices may have, each an instance, and the time that there is."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .instance import Floats, Instance, Integers

FEW_CHOICES = 12
_CACHED_INSTANCES = 64


@dataclass(frozen=True, slots=True, eq=False)
class SearchResult:
    """The best assignment, on which of the instances, and a bound that no assignment on any of them beats."""

    choice: int
    stage_of: Integers
    bottleneck_s: float
    bound_s: float


class Deadline:
    """Counts down from when it is made. Ctrl-C stops it: nothing else is begun in its time."""

    def __init__(self, time_limit_s: float) -> None:
        self._end = time.perf_counter() + time_limit_s
        self.is_stopped = False

    def stop(self) -> None:
        self.is_stopped = True
        self._end = 0.0

    @property
    def left_s(self) -> float:
        return max(0.0, self._end - time.perf_counter())


class Choices:
    """One problem under several device orders; each instance is made when it is first asked for.

    `are_all`: there are no other orders. `work_s` (devices, nodes) is of all devices that there are.
    """

    def __init__(
        self,
        count: int,
        make: Callable[[int], Instance],
        *,
        are_all: bool = True,
        work_s: Floats | None = None,
    ) -> None:
        self.are_all = are_all
        self._count = count
        self._make = make
        self._work_s = work_s
        self._made: dict[int, Instance] = {}

    def __len__(self) -> int:
        return self._count

    def changed(self, change: Callable[[Instance], Instance]) -> Choices:
        """The same with every instance changed."""
        make = self._make
        return Choices(
            self._count, lambda choice: change(make(choice)), are_all=self.are_all, work_s=self._work_s
        )

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
    """What the slowest stage takes at least, for its work and what it does besides."""
    besides_s = instance.besides_s
    least_s = floor_s(instance.work_s, instance.num_stages) + float(besides_s.min())
    return least_s if instance.may_be_empty else max(least_s, float(besides_s.max()))


def floor_s(work_s: Floats, num_stages: int) -> float:
    """What `num_stages` of these devices (devices, nodes) need for the work, however it is spread over them.

    Of any j k + 1 nodes one of k stages has j + 1, which are no faster than the j + 1 fastest of them; the
    slowest nodes give the best such bound. And with a weight for each device, no node adds less to the
    weighted sum of the stages' loads than where that is least; weights go by how fast devices are.
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
