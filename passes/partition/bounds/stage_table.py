"""All stages that a chain of down-sets can have within a target, in one table.

A stage is a pair of down-sets: what the stages before it have together, and what they have with it. Its load
under relaxed rules is its work, and the cost of each tensor that it has a part of and not the whole. For a
tensor of which q > 0 members are in the first set, and whose last of m members is not, that is

    cost of those cut at the second set  -  cost of those cut at the first one
        +  sum of c ([more than q are in the second set] + [all m are in the second set])

which is linear in flags of the second set. So the loads of many pairs are one product of matrices, and a
table is made in a fraction of the time that a look at one down-set after another would take.

Down-sets that no chain within the target has are left out first: the stages before such a set, or those
behind it, or all of them have more to do than their time. The others are looked at from the first set on, one
stage after another, and only from sets that so many stages reach. Where transfers are dear beside work, there
are mostly few of these: a stage then cannot end where many tensors are cut. A stage is left out, too, from
whose end more stages are needed than are left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pd2bw_fx.passes.partition.instance import Flags, Floats, Integers

from .downsets import DownSets, OutOfTime

_SLACK = 1 + 1e-9  # of the target: rounding never excludes what fits exactly
_ROWS = 128  # down-sets that are looked at together
_MAX_STAGES = 3_000_000
_MAX_STEPS = 10**11  # pairs of down-sets times flags: a tenth of a nanosecond each
_UNREACHED = 10**6  # more stages than there are


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
        most, last = sets.kinds[0].count, len(sets) - 1
        fewest_behind = fewest_stages_behind(sets, target_s)
        pairs = Pairs(sets, np.flatnonzero(fewest_behind < most))
        ahead = np.full(last + 1, _UNREACHED)  # the fewest stages from the first set
        ahead[0] = 0
        start, end, seconds, num_stages = [], [], [], 0
        for number in range(1, most + 1):
            from_sets = np.flatnonzero(ahead == number - 1)
            for at in range(0, len(from_sets), _ROWS):
                if deadline.left_s == 0:
                    raise OutOfTime
                block = pairs.within(from_sets[at : at + _ROWS], target_s)
                if pairs.steps > _MAX_STEPS:
                    return None
                here, to = np.nonzero(block.fits & (number + fewest_behind[block.end] <= most))
                start.append(block.start[here])
                end.append(block.end[to])
                seconds.append(np.stack((block.load_s[here, to], block.received_s[here, to])))
                num_stages += len(end[-1])
                if num_stages > _MAX_STAGES:
                    return None
                ahead[end[-1]] = np.minimum(ahead[end[-1]], number)
        starts, ends = np.concatenate(start), np.concatenate(end)
        behind = np.full(last + 1, _UNREACHED)  # the fewest stages to the last set
        behind[last] = 0
        for number in range(1, most + 1):
            leading = starts[behind[ends] == number - 1]
            behind[leading] = np.minimum(behind[leading], number)
        is_useful = ahead[starts] + 1 + behind[ends] <= most
        return cls(sets, target_s, starts[is_useful], ends[is_useful], np.hstack(seconds)[:, is_useful])


def fewest_stages_behind(sets: DownSets, target_s: float) -> Integers:
    """Returns the fewest stages behind each set, by what is to be done there, or `_UNREACHED` for a set that
    no chain within the target has."""
    table, most = sets.tables[0], sets.kinds[0].count
    work_s, cut_s = table.work_s, table.cut_s
    behind_s, time_s = work_s[-1] - work_s, target_s * _SLACK
    # A tensor that is cut at the set is paid for before it and behind it.
    fewest = np.ceil((work_s + cut_s) / time_s - 1e-6)
    fewest_behind = np.ceil((behind_s + cut_s) / time_s - 1e-6)
    is_useful = fewest + fewest_behind <= most
    is_useful &= work_s[-1] + 2 * cut_s <= most * time_s
    found: Integers = np.where(is_useful, fewest_behind, _UNREACHED).astype(np.int64)
    found[-1] = 0
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Stages from some down-sets to others: from `start` (rows) to `end` (columns), where it `fits`.

    `load_s` and `received_s` are those of `StageTable`; where it does not fit they mean nothing.
    """

    start: Integers
    end: Integers
    fits: Flags
    load_s: Floats
    received_s: Floats


class Pairs:
    """Loads of pairs of down-sets, of which the second is in `useful`. `steps` counts what products take."""

    def __init__(self, sets: DownSets, useful: Integers) -> None:
        table = sets.tables[0]
        self._sets = sets
        self._useful = useful
        self._up_to_s: Floats = np.maximum.accumulate(table.work_s)
        self._behind_s = table.work_s + table.cut_s
        nets = np.flatnonzero((table.cost_s > 0) & (sets.sizes > 1))
        # A flag says that a set has more than so many members of a net.
        self._net = np.repeat(nets, sets.sizes[nets] - 1)
        self._num_before = np.concatenate([np.arange(1, size) for size in sets.sizes[nets]] or [nets])
        self._cost_s = table.cost_s[self._net]
        self._is_last = self._num_before == sets.sizes[self._net] - 1
        self.steps = 0

    def within(self, rows: Integers, target_s: float) -> Block:
        """Returns the stages within the target from these sets, in rising order."""
        sets, time_s = self._sets, target_s * _SLACK
        until = int(np.searchsorted(self._up_to_s, self._up_to_s[rows[-1]] + time_s, side="right"))
        near = self._useful[slice(*np.searchsorted(self._useful, (rows[0] + 1, until)))]
        in_all: npt.NDArray[np.uint64] = np.bitwise_and.reduce(sets.words[:, rows], axis=1, keepdims=True)
        near = near[((sets.words[:, near] & in_all) == in_all).all(axis=0)]
        # Of a large model's tensors, few are cut at one of these sets.
        cut = np.flatnonzero(sets.partly[:, rows].any(axis=1))
        flags = np.flatnonzero(np.isin(self._net, cut))
        counts, num_before = sets.counts[self._net[flags, None], rows], self._num_before[flags, None]
        received = self._cost_s[flags] * (counts == num_before).T
        is_whole = (counts > 0) & (counts <= num_before) & self._is_last[flags, None]
        costs = received + self._cost_s[flags] * is_whole.T
        has_more = (sets.counts[self._net[flags, None], near] > num_before).astype(np.float64)
        self.steps += len(rows) * has_more.size
        load_s = costs @ has_more
        load_s += self._behind_s[near]
        load_s -= self._behind_s[rows, None]
        fits = (load_s <= time_s) & (near > rows[:, None])
        others: npt.NDArray[np.uint64] = sets.words[:, rows] & ~in_all
        for word in np.flatnonzero(others.any(axis=1)):
            own = others[word][:, None]
            fits &= (sets.words[word, near] & own) == own
        return Block(rows, near, fits, load_s, received @ has_more)
