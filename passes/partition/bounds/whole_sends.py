"""Finds a chain of down-sets whose stages have the time for every single send, for stages that are all alike.

Of a tensor with several readers, a chain keeps an account of its own: the sends that stages so far have made
of it to later stages. The stage that makes it makes one send, which its load counts, and more if it has the
time. A stage that reads it takes one send from the account, and may make others. So may a stage that takes
one to pass it on. Nothing is relaxed but memory.

    stage   0 makes e, sends it twice    1 reads e    2 has time: takes none    3 reads e
    sends             2                      1                   1                  0

Several accounts of a chain to the same down-set with as many stages are continued, but none that has no more
sends of any tensor than another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from pd2bw_fx.passes.partition.instance import Flags, Integers

from .downsets import OutOfTime
from .stage_table import StageTable

_SLACK = 1e-9  # of the target
_MOST_STEPS = 200_000  # a stage for an account: about ten microseconds each

# Sends on their way, by tensor; only of those that are cut.
Account: TypeAlias = dict[int, int]


class TooMany(Exception):
    """Raised when the answer would take too many steps."""


def chain_of_whole_sends(
    stages: StageTable, target_s: float, deadline: Any, *, num_stages: int
) -> Integers | None:
    """Returns the stage of each node on a chain of `num_stages` within the target, or None where there is
    none. Raises OutOfTime and TooMany."""
    return _Accounts(stages, target_s, num_stages).chain(deadline)


class _Accounts:
    """`_known[j, set]` are the accounts of chains of j stages to a set: each with the chain's set before and
    the number of its account there."""

    def __init__(self, stages: StageTable, target_s: float, num_stages: int) -> None:
        self._stages = stages
        self._target_s = target_s
        self._num_stages = num_stages
        sets = stages.sets
        cost_s = sets.tables[0].cost_s
        self._cost_s = cost_s.tolist()
        is_shared = (sets.sizes > 2) & (cost_s > 0)
        self._cut = [net[is_shared[net]].tolist() for net in sets.crossing]
        self._known: dict[tuple[int, int], list[tuple[Account, int, int]]] = {(0, 0): [({}, -1, -1)]}
        self._steps = 0

    def chain(self, deadline: Any) -> Integers | None:
        stages, k, last = self._stages, self._num_stages, len(self._stages.sets) - 1
        within = np.flatnonzero(stages.load_s <= self._target_s * (1 + _SLACK))
        within = within[np.argsort(stages.start[within], kind="stable")]
        leads_on = self._leads_on(within)
        start = stages.start[within]
        end, load_s = stages.end[within].tolist(), stages.load_s[within].tolist()
        places = np.searchsorted(start, np.arange(last + 2)).tolist()
        for at in np.unique(start).tolist():
            if deadline.left_s == 0:
                raise OutOfTime
            for so_far in range(k):
                accounts = self._known.get((so_far, at), [])
                for place in range(places[at], places[at + 1]) if accounts else ():
                    to = end[place]
                    if leads_on[k - so_far - 1][to]:
                        self._continue(accounts, so_far, at, to, self._target_s - load_s[place])
        return self._walked_back()

    def _leads_on(self, within: Integers) -> list[Flags]:
        """Returns from which sets so many further stages lead to the last one, by their number."""
        stages = self._stages
        leading = np.zeros(len(stages.sets), dtype=bool)
        leading[-1] = True
        found = [leading]
        for _ in range(self._num_stages):
            leading = np.zeros(len(stages.sets), dtype=bool)
            leading[stages.start[within[found[-1][stages.end[within]]]]] = True
            found.append(leading)
        return found

    def _continue(
        self, accounts: Sequence[tuple[Account, int, int]], so_far: int, at: int, to: int, left_s: float
    ) -> None:
        counts = self._stages.sets.counts
        readers = [net for net in self._cut[at] if counts[net, to] > counts[net, at]]
        known = self._known.setdefault((so_far + 1, to), [])
        for number, (account, _, _) in enumerate(accounts):
            self._steps += 1
            if self._steps > _MOST_STEPS:
                raise TooMany
            if all(account[net] for net in readers):
                for after in self._after(account, readers, at, to, so_far, left_s):
                    _add(known, (after, at, number))

    def _after(
        self, account: Account, readers: Sequence[int], at: int, to: int, so_far: int, left_s: float
    ) -> Iterator[Account]:
        """Yields the accounts behind a stage which reads some tensors and has so much time left."""
        counts, sizes = self._stages.sets.counts, self._stages.sets.sizes
        after, most = {}, {}
        for net in self._cut[to]:
            is_made_here = counts[net, at] == 0
            after[net] = 1 if is_made_here else account[net] - (net in readers)
            most[net] = min(self._num_stages - so_far - 1, int(sizes[net] - counts[net, to]))
        sending = [net for net in self._cut[to] if counts[net, to] > counts[net, at]]
        passing = [net for net in self._cut[to] if net not in sending and after[net] > 0]
        for taking in _subsets(passing):
            time_s = left_s - sum(self._cost_s[net] for net in taking)
            if time_s >= -_SLACK * self._target_s:
                taken = {net: sends - (net in taking) for net, sends in after.items()}
                yield from self._sent([*sending, *taking], taken, most, time_s)

    def _sent(self, nets: Sequence[int], account: Account, most: Account, time_s: float) -> Iterator[Account]:
        """Yields the account with as many more sends of `nets` as there is time for, in all ways."""
        if not nets:
            yield {net: min(sends, most[net]) for net, sends in account.items()}
            return
        net, cost_s = nets[0], self._cost_s[nets[0]]
        affordable = int((time_s + _SLACK * self._target_s) / cost_s)
        for more in range(min(affordable, max(0, most[net] - account[net])) + 1):
            yield from self._sent(
                nets[1:], {**account, net: account[net] + more}, most, time_s - more * cost_s
            )

    def _walked_back(self) -> Integers | None:
        at, number, cuts = len(self._stages.sets) - 1, 0, []
        if not self._known.get((self._num_stages, at)):
            return None
        for so_far in range(self._num_stages, 0, -1):
            _, at, number = self._known[so_far, at][number]
            cuts.append(at)
        return self._stages.sets.cut_at(cuts[:-1])


def _subsets(nets: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for bits in range(1 << len(nets)):
        yield tuple(net for at, net in enumerate(nets) if bits >> at & 1)


def _add(known: list[tuple[Account, int, int]], new: tuple[Account, int, int]) -> None:
    """Adds an account, unless another one has as many sends of each tensor."""
    account = new[0]
    if not any(all(other[net] >= sends for net, sends in account.items()) for other, _, _ in known):
        known.append(new)
