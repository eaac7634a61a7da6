"""All stages that a chain of down-sets can have within a target, in one table.

A stage is a pair of down-sets: what the stages before it have together, and what they have with it. Its load
under relaxed rules is its work, and the cost of each tensor that it has a part of and not the whole. For a
tensor of which q > 0 members are in the first set, and whose last of m members is not, that is

    cost of those cut at the second set  -  cost of those cut at the first one
        +  sum of c ([more than q are in the second set] + [all m are in the second set])

which is linear in flags of the second set. So the loads of many pairs are one product of matrices, and a
table is made in a fraction of the time that a look at one down-set after another would take.

Down-sets that no chain within the target has are left out first: the stages before such a set, or those
behind it, or all of them have more to do than their time.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pd2bw_fx.passes.partition.instance import Flags, Floats, Integers

from .downsets import DownSets, OutOfTime

_SLACK = 1 + 1e-9  # of the target: rounding never excludes what fits exactly
_ROWS = 128  # down-sets that are looked at together
_MAX_STAGES = 3_000_000
_MAX_CELLS = 50_000_000  # flags times down-sets, eight bytes each


class StageTable:
    """The stages within `target_s`, ordered by their `end`, for devices that are all alike.

    `start` and `end` number the down-sets in `sets`, `load_s` is a stage's load, and `received_s` the part of
    it that is for tensors which earlier stages have a part of. `first_to` is where the stages to each set of
    `reached` begin.
    """

    def __init__(self, sets: DownSets, target_s: float, start: Integers, end: Integers, s: Floats) -> None:
        self.sets = sets
        self.target_s = target_s
        self.most = sets.kinds[0].count
        order = np.argsort(end, kind="stable")
        self.start, self.end = start[order], end[order]
        self.load_s, self.received_s = s[0, order], s[1, order]
        self.reached, self.first_to = np.unique(self.end, return_index=True)

    @classmethod
    def of(cls, sets: DownSets, target_s: float, deadline: Any) -> StageTable | None:
        """Returns None where there are too many stages to list. Raises OutOfTime."""
        useful = _useful(sets, target_s)
        flags = int((np.maximum(sets.sizes, 1) - 1).sum())
        if flags * len(useful) > _MAX_CELLS:
            return None
        pairs = _Pairs(sets, useful)
        start, end, seconds, num_stages = [], [], [], 0
        for at in range(0, len(useful) - 1, _ROWS):
            if deadline.left_s == 0:
                raise OutOfTime
            from_sets, to_sets, s = pairs.within(at, min(at + _ROWS, len(useful) - 1), target_s)
            start.append(useful[from_sets])
            end.append(useful[to_sets])
            seconds.append(s)
            num_stages += len(from_sets)
            if num_stages > _MAX_STAGES:
                return None
        return cls(sets, target_s, np.concatenate(start), np.concatenate(end), np.hstack(seconds))


def _useful(sets: DownSets, target_s: float) -> Integers:
    """Returns the sets that a chain within the target may have, the first and the last set always."""
    table, most = sets.tables[0], sets.kinds[0].count
    work_s, cut_s = table.work_s, table.cut_s
    behind_s, time_s = work_s[-1] - work_s, target_s * _SLACK
    # A tensor that is cut at the set is paid for before it and behind it.
    fewest = np.ceil((work_s + cut_s) / time_s - 1e-6)
    fewest_behind = np.ceil((behind_s + cut_s) / time_s - 1e-6)
    is_useful = fewest + fewest_behind <= most
    is_useful &= work_s[-1] + 2 * cut_s <= most * time_s
    is_useful[[0, -1]] = True
    useful: Integers = np.flatnonzero(is_useful)
    return useful


class _Pairs:
    """Loads of pairs of some down-sets, by place in `useful`."""

    def __init__(self, sets: DownSets, useful: Integers) -> None:
        table = sets.tables[0]
        self._behind_s = table.work_s[useful] + table.cut_s[useful]
        self._up_to_s: Floats = np.maximum.accumulate(table.work_s[useful])
        self._has = sets.member[useful].astype(np.float32)
        self._lacks = np.ascontiguousarray(1 - self._has.T)
        counts = sets.counts[:, useful].astype(np.int64)
        has_more: list[Flags] = []
        costs: list[Floats] = []
        received: list[Floats] = []
        for net in np.flatnonzero((table.cost_s > 0) & (sets.sizes > 1)).tolist():
            size, count, cost_s = int(sets.sizes[net]), counts[net], float(table.cost_s[net])
            for num_before in range(1, size):
                has_more.append(count > num_before)
                received.append(cost_s * (count == num_before))
                is_whole = (count > 0) & (count < size) & (num_before == size - 1)
                costs.append(received[-1] + cost_s * is_whole)
        shape = len(has_more), len(useful)
        self._has_more = np.array(has_more, dtype=np.float64).reshape(shape)
        self._costs = np.array(costs).reshape(shape).T.copy()
        self._received = np.array(received).reshape(shape).T.copy()

    def within(self, first: int, last: int, target_s: float) -> tuple[Integers, Integers, Floats]:
        """Returns the stages from sets `first` up to `last`: where they start, where they end, and their
        seconds (load and received, stages)."""
        reach_s = self._up_to_s[last - 1] + target_s * _SLACK
        until = int(np.searchsorted(self._up_to_s, reach_s, side="right"))
        rows, near = slice(first, last), slice(first, until)
        load_s = self._costs[rows] @ self._has_more[:, near]
        load_s += self._behind_s[near]
        load_s -= self._behind_s[rows, None]
        is_behind = np.arange(first, until) > np.arange(first, last)[:, None]
        at, to = np.nonzero(is_behind & (load_s <= target_s * _SLACK))
        num_missing = self._has[rows] @ self._lacks[:, near]
        grows = num_missing[at, to] == 0
        at, to = at[grows], to[grows]
        received_s = self._received[rows] @ self._has_more[:, near]
        return at + first, to + first, np.stack((load_s[at, to], received_s[at, to]))
