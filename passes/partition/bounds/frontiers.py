"""The farthest that stages get within a target and their memory: an exact answer for work and saved bytes.

The relaxed rules: tensors cost no time, and of the memory only static and saved bytes count, not what stages
hold of tensors that cross, shared parameters or workspaces. Whatever is left of a stage's nodes when some are
taken away is then within its limits too. So of two down-sets of which one includes the other, and which the
same stages can reach, the larger one is as good: stages that go on from the smaller one can go on from the
larger one without the nodes that it has already. After each stage only the largest down-sets are kept, the
frontier, and where a graph is almost a row these are few.

With an infinite target this tells whether the model fits at all, for thousands of operators within seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from pd2bw_fx.passes.partition.instance import Floats, Instance, Integers

from .downsets import OutOfTime, down_sets_and_ready

_SLACK = 1 + 1e-9
_ROUNDING = 1e-12  # of the sum over all nodes
_MOST_SETS = 60_000
_MOST_KEPT = 2000  # down-sets of one frontier


class _Row(NamedTuple):
    """The amounts of a stage's nodes may add up to `limit`; `up_to` has the sum over each down-set."""

    up_to: Floats
    limit: float


class Frontiers:
    """The down-sets of a graph, which can be asked about instances and targets."""

    def __init__(self, num_nodes: int, sets: Sequence[int], arcs: Integers) -> None:
        self._num_nodes = num_nodes
        self._sets = sets  # as bit masks; the number of nodes does not decrease
        self._source, self._node, self._target = arcs  # a set, a node, and the set of both; sources ascend
        self._sums: dict[bytes, Floats] = {}
        # One arc to each set but the first, and where those to sets of one more node begin.
        self._last, self._one = np.unique(self._target, return_index=True)
        sizes = np.array([members.bit_count() for members in sets], dtype=np.int64)
        self._levels = np.searchsorted(sizes[self._last], np.arange(1, num_nodes + 2)).tolist()

    @classmethod
    def of(
        cls, num_nodes: int, edges: Sequence[tuple[int, int]], deadline: Any, *, max_sets: int = _MOST_SETS
    ) -> Frontiers | None:
        """Returns None where the graph has more than `max_sets` down-sets. Raises OutOfTime."""
        found = down_sets_and_ready(num_nodes, edges, max_sets, deadline)
        if found is None:
            return None
        number = {members: at for at, members in enumerate(found)}
        arcs = [
            (at, node, number[members | 1 << node])
            for at, (members, ready) in enumerate(found.items())
            for node in ready
        ]
        return cls(num_nodes, list(found), np.array(arcs, dtype=np.int64).reshape(-1, 3).T)

    def chain(self, instance: Instance, target_s: float, deadline: Any) -> Integers | None:
        """Returns the stage of every node in an assignment that the relaxed rules allow, in which stages may
        be empty, or None, which proves that no assignment in this order is within the target.

        Raises OutOfTime, also where a frontier is too large.
        """
        came: list[dict[int, int]] = []
        frontier = [0]
        for stage in range(instance.num_stages):
            reached: dict[int, int] = {}
            for rows in self._ways(instance, stage, target_s):
                for at in frontier:
                    if deadline.left_s == 0:
                        raise OutOfTime
                    for farthest in self._farthest(at, rows):
                        reached.setdefault(farthest, at)
            frontier = self._largest(list(reached))
            came.append(reached)
        at = len(self._sets) - 1
        if at not in came[-1]:
            return None
        stage_of = np.zeros(self._num_nodes, dtype=np.int64)
        for stage in reversed(range(instance.num_stages)):
            before = came[stage][at]
            own = self._sets[at] & ~self._sets[before]
            stage_of[[node for node in range(self._num_nodes) if own >> node & 1]] = stage
            at = before
        return stage_of

    def _farthest(self, at: int, rows: Sequence[_Row]) -> Iterator[int]:
        """Yields the largest sets that one stage reaches from this set."""
        within = np.ones(len(self._sets) - at, dtype=bool)  # sets that include this one are not before it
        for row in rows:
            within &= row.up_to[at:] <= row.up_to[at] + row.limit
        start = int(np.searchsorted(self._source, at))
        onward = within[self._target[start:] - at]
        within[self._source[start:][onward] - at] = False  # with a node more they are within it, too
        own = self._sets[at]
        for farthest in (at + np.flatnonzero(within)).tolist():
            if own & ~self._sets[farthest] == 0:
                yield farthest

    def _largest(self, reached: Sequence[int]) -> list[int]:
        """Returns the sets that no other one includes."""
        kept: list[int] = []
        for at in sorted(reached, reverse=True):
            members = self._sets[at]
            if not any(members & ~self._sets[other] == 0 for other in kept):
                kept.append(at)
        if len(kept) > _MOST_KEPT:
            raise OutOfTime
        return kept

    def _ways(self, instance: Instance, stage: int, target_s: float) -> list[list[_Row]]:
        """Returns the rows of a stage that keeps what its backward needs, and of one that computes it again,
        as far as it may do either."""
        again = {False: [False], True: [True]}.get(instance.recompute, [False, True])  # type: ignore[arg-type]
        return [self._rows(instance, stage, target_s, again=each) for each in again]

    def _rows(self, instance: Instance, stage: int, target_s: float, *, again: bool) -> list[_Row]:
        """Returns the rows of the worst moments of its memory (`Instance`), its time, and what is barred."""
        static, saved = self._up_to(instance.static_bytes[stage]), self._up_to(instance.saved_bytes)
        times = 1 if again else int(instance.in_flight[stage])
        limit = float(instance.limit_bytes[stage])
        if instance.gradients_wait[stage]:
            later = 0 if again and instance.updates_each[stage] else 1 if again else times - 1
            without = static - self._up_to(instance.gradient_bytes)
            rows = [(without + times * saved, limit), (static + later * saved, limit)]
        else:
            rows = [(static + times * saved, limit)]
        if np.isfinite(target_s):
            work = self._up_to(instance.work_s[stage] + (instance.again_s[stage] if again else 0.0))
            rows.append((work, target_s - float(instance.besides_s[stage])))
        if instance.forbidden is not None:
            rows.append((self._up_to(instance.forbidden[stage].astype(np.float64)), 0.5))
        return [
            _Row(up_to, at_most * _SLACK + _ROUNDING * float(up_to[-1]))
            for up_to, at_most in rows
            if up_to[-1] > at_most
        ]

    def _up_to(self, amounts: Floats) -> Floats:
        """Returns the sum of the nodes' amounts over each down-set."""
        key = amounts.tobytes()
        if key not in self._sums:
            sums = np.zeros(len(self._sets))
            source, node = self._source[self._one], self._node[self._one]
            for start, end in zip(self._levels, self._levels[1:], strict=False):
                sums[self._last[start:end]] = sums[source[start:end]] + amounts[node[start:end]]
            self._sums[key] = sums
        return self._sums[key]


def memory_binds(instance: Instance) -> bool:
    """Returns whether some stage has no room for all nodes together."""
    most = instance.static_bytes.sum(axis=1) + instance.in_flight * instance.saved_bytes.sum()
    return bool((most > instance.limit_bytes).any())
