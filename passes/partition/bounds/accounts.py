"""Finds a chain of down-sets with room for sends (`chains.py`), where its stages are too many for a table.

The down-sets are gone through once, with the largest account of every number of stages that reach them. Only
the accounts are kept, not the stages, and a set is left behind as soon as its account is. So down-sets that
have tens of millions of stages between them take seconds.

The stages before a set are a chain whatever comes behind it, so a set is also left out where what the stages
behind it take at least is more than its account has.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from pd2bw_fx.passes.partition.instance import Floats, Integers

from .downsets import DownSets, OutOfTime
from .stage_table import Block, Pairs, fewest_stages_behind

_ROWS = 64  # down-sets that are looked at together
_MANY = 8  # nodes of a tensor: with more, its readers are on several stages
_SLACK = 1e-9  # of the target


class BlockRoom(Protocol):
    """The rule of a `chains.Room`, for one block of stages after another.

    The stages behind each set take at least `taken_behind` from the account that is there.
    """

    first: float
    taken_behind: Floats

    def taken(self, stages: Block) -> Floats:
        """Returns what each of the stages takes, which has to be there before it."""

    def given(self, stages: Block) -> Floats:
        """Returns what each of the stages gives to those after it."""


class TimeInAll:
    """The rule of `chains.RoomInAll`."""

    def __init__(self, sets: DownSets, target_s: float) -> None:
        table = sets.tables[0]
        self._most, self._target_s = sets.kinds[0].count, target_s
        self.first = self._most * target_s - float(table.work_s[-1])
        # A tensor that is cut at a set is received by one stage behind it or more.
        self.taken_behind = 2 * table.cut_s

    def bound_s(self, found: Accounts) -> float:
        """Returns a time that no chain beats: one within a smaller target is one within this target too, and
        has no less to transfer than the chain that has most room here."""
        return self._target_s * (1 - 2 * _SLACK) - found.most_left / self._most

    def taken(self, stages: Block) -> Floats:
        return 2 * stages.received_s

    def given(self, stages: Block) -> Floats:
        return np.zeros_like(stages.received_s)


class TimeToHandOn:
    """The rule of `chains.RoomToHandOn`, for tensors that are surely on several stages."""

    def __init__(self, sets: DownSets, target_s: float) -> None:
        self._sets = sets
        self._target_s = target_s
        self._cost_s = sets.tables[0].cost_s
        self.nets = np.flatnonzero((sets.sizes > _MANY) & (self._cost_s > 0)).tolist()
        self.first = 0.0
        self.taken_behind = np.zeros(len(sets))

    def taken(self, stages: Block) -> Floats:
        taken_s = np.zeros_like(stages.load_s)
        for net in self.nets:
            before, with_it = self._counts(net, stages)
            taken_s += self._cost_s[net] * ((before > 0) & (before < with_it))
        return taken_s

    def given(self, stages: Block) -> Floats:
        given_s = np.zeros_like(stages.load_s)
        cheapest_s, passed_s = np.full((2, *stages.load_s.shape), np.inf)
        for net in self.nets:
            before, with_it = self._counts(net, stages)
            seconds, leaves = self._cost_s[net], (with_it > 0) & (with_it < self._sets.sizes[net])
            has = leaves & (before < with_it)
            given_s += seconds * (has & (before == 0))
            passed_s = np.where(leaves, np.minimum(passed_s, seconds), passed_s)
            cheapest_s = np.where(has, np.minimum(cheapest_s, seconds), cheapest_s)
        left_s = np.maximum(self._target_s - stages.load_s, 0.0)
        passing_s = np.maximum(left_s - 2 * passed_s, 0.0)
        given_s += np.where(cheapest_s < np.inf, left_s, passing_s)
        return given_s

    def _counts(self, net: int, stages: Block) -> tuple[Integers, Integers]:
        """Returns how many of a tensor's nodes are before the stages, and with them."""
        counts = self._sets.counts[net]
        return counts[stages.start][:, None], counts[stages.end][None, :]


class Accounts:
    """The largest account of each down-set, by the number of stages before it, and where these came from."""

    def __init__(self, sets: DownSets, first: float) -> None:
        self._sets = sets
        self._most = sets.kinds[0].count
        self._left = np.full((self._most + 1, len(sets)), -np.inf)
        self._left[0, 0] = first
        self._came = np.zeros((self._most + 1, len(sets)), dtype=np.int64)

    @classmethod
    def of(cls, sets: DownSets, target_s: float, room: BlockRoom, deadline: Any) -> Accounts:
        """Goes through all down-sets. Raises OutOfTime."""
        found = cls(sets, room.first)
        behind = fewest_stages_behind(sets, target_s)
        useful = np.flatnonzero(behind < found._most)
        pairs = Pairs(sets, useful)
        least = room.taken_behind - _SLACK * found._most * target_s
        rows = np.union1d([0], useful[useful < len(sets) - 1])
        for at in range(0, len(rows), _ROWS):
            if deadline.left_s == 0:
                raise OutOfTime
            stages = pairs.within(rows[at : at + _ROWS], target_s)
            taken, given = room.taken(stages), room.given(stages)
            # A set comes before those that include it: what is known of it is final when its turn comes.
            for row, start in enumerate(stages.start.tolist()):
                if found.is_reached(start):
                    fits = np.flatnonzero(stages.fits[row])
                    end = stages.end[fits]
                    found._go_on(start, end, taken[row, fits], given[row, fits], least[end], behind[end])
        return found

    @property
    def most_left(self) -> float:
        """The largest account at the end, infinitely small where there is no chain."""
        return float(self._left[:, -1].max())

    def is_reached(self, at: int) -> bool:
        return bool((self._left[:, at] > -np.inf).any())

    def _go_on(
        self, start: int, end: Integers, taken: Floats, given: Floats, least: Floats, behind: Integers
    ) -> None:
        """Goes on from a set to those that one stage more can end with."""
        numbers = np.flatnonzero(self._left[:-1, start] > -np.inf)[:, None]
        left = self._left[numbers, start] - taken
        left += np.where((left < least) | (numbers + behind >= self._most), -np.inf, given)
        number, to = np.nonzero(left > self._left[numbers + 1, end])
        after, end = numbers[number, 0] + 1, end[to]
        self._left[after, end] = left[number, to]
        self._came[after, end] = start

    def roomiest_chain(self, num_stages: int | None = None) -> Integers | None:
        """Returns the stage of each node on the chain with the most room at its end, of `num_stages` or of
        any number, or None where no chain within the target always has room."""
        at_end = self._left[:, -1]
        count = num_stages or int(np.argmax(at_end))
        if at_end[count] == -np.inf:
            return None
        cuts, end = [], len(self._sets) - 1
        for number in range(count, 1, -1):
            end = int(self._came[number, end])
            cuts.append(end)
        return self._sets.cut_at(cuts)
