"""Finds chains of down-sets for stages that are all alike: the fastest one, or the one with most room.

Every stage of a chain is within the target if it pays once for each tensor that it has a part of. That does
not count the further sends of a tensor which several stages read. So a chain has an account of room for
sends. Each stage takes some room and gives some, by the rule of a `Room`, and the account never falls below
zero. Of two chains that reach the same down-set with as many stages, the one with more room is continued.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from pd2bw_fx.passes.partition.instance import Flags, Floats, Integers

from .downsets import OutOfTime
from .stage_table import StageTable

_MANY = 8  # nodes of a tensor: with more, its readers are on several stages
_SLACK = 1e-9  # of the target, or of a send


class Room(Protocol):
    """A rule that says how much room stages take and give. A chain begins with `first`.

    What a stage takes has to be there before it; what it gives is there for the stages after it.
    """

    first: float
    slack: float  # that rounding may cost an account
    taken: Floats
    given: Floats


class RoomInAll:
    """The time for transfers, in seconds, that the target leaves all stages together.

    A tensor is transferred once for every stage but one that has a part of it, and each transfer takes time
    at both its ends.
    """

    def __init__(self, stages: StageTable, target_s: float) -> None:
        self.first = stages.most * target_s - float(stages.sets.tables[0].work_s[-1])
        self.slack = _SLACK * stages.most * target_s
        self.taken = 2 * stages.received_s
        self.given = np.zeros(len(self.taken))


class Readers:
    """The tensors of a table's stages that more than one stage may read: those of at least `least` nodes.

    Of these, `received` and `received_s` say how many a stage receives, and how long that takes it. The first
    send of such a tensor is in the load of the stage that makes it: `made` and `made_s` count these.
    `cheapest_s` is the shortest send that a stage may make of those that it has then, infinite if it has
    none. A stage that has no part of a tensor may still pass it on; `passed_s` is the shortest such send.
    """

    def __init__(self, stages: StageTable, least: int = 3) -> None:
        sets, count = stages.sets, len(stages.end)
        cost_s = sets.tables[0].cost_s
        self.nets = np.flatnonzero((sets.sizes >= least) & (cost_s > 0)).tolist()
        self.received, self.received_s, self.made, self.made_s = np.zeros((4, count))
        self.cheapest_s, self.passed_s = np.full((2, count), np.inf)
        for net in self.nets:
            counts, size, seconds = sets.counts[net], sets.sizes[net], float(cost_s[net])
            arrives = np.flatnonzero((counts > 0)[stages.start])
            arrives = arrives[counts[stages.start[arrives]] < counts[stages.end[arrives]]]
            self.received[arrives] += 1
            self.received_s[arrives] += seconds
            leaves = np.flatnonzero(((counts > 0) & (counts < size))[stages.end])
            self.passed_s[leaves] = np.minimum(self.passed_s[leaves], seconds)
            before = counts[stages.start[leaves]]
            has = leaves[before < counts[stages.end[leaves]]]
            self.cheapest_s[has] = np.minimum(self.cheapest_s[has], seconds)
            makes = leaves[before == 0]
            self.made[makes] += 1
            self.made_s[makes] += seconds


class RoomToHandOn:
    """The seconds that stages with a tensor of several readers have left of the target, to hand it on.

    A stage that reads such a tensor takes one send of it from the room; what it receives is in its own load.
    The stage that makes the tensor gives the one send that its load counts. A stage without a part of it
    gives what is left after a receive of its own, and takes that send. The rule does not ask which of several
    such tensors a stage has to send, so a chain with room is worth a try and no more. A chain without room is
    none by the real rules either, if its nodes are not joined.
    """

    first = 0.0

    def __init__(self, stages: StageTable, readers: Readers, target_s: float) -> None:
        left_s = np.maximum(target_s - stages.load_s, 0.0)
        passing_s = np.maximum(left_s - 2 * readers.passed_s, 0.0)
        self.slack = _SLACK * stages.most * target_s
        self.taken = readers.received_s
        self.given = readers.made_s + np.where(readers.cheapest_s < np.inf, left_s, passing_s)


class SendsToHandOn:
    """The same account in numbers of sends: a send is whole, and takes at least as long as the cheapest."""

    first = 0.0
    slack = _SLACK

    def __init__(self, stages: StageTable, readers: Readers, target_s: float) -> None:
        left_s = np.maximum(target_s - stages.load_s, 0.0) + _SLACK * target_s
        sends, passing = np.floor(left_s / readers.cheapest_s), np.floor(left_s / readers.passed_s) - 2
        self.taken = readers.received
        self.given = readers.made + np.maximum(np.maximum(sends, passing), 0.0)


def readers_of_many(stages: StageTable) -> Readers | None:
    """Returns the tensors that are surely on several stages, or None where there are none."""
    readers = Readers(stages, least=_MANY + 1)
    return readers if readers.nets else None


def fastest_chain(
    stages: StageTable, deadline: Any, *, num_stages: int | None = None
) -> tuple[float, Integers] | None:
    """Returns the load of the slowest stage of the fastest chain, and the stage of each node on it.

    The chain has `num_stages`, or any number that there are. Returns None where none is within the target of
    the table. Raises OutOfTime.
    """
    slowest_s = [_first(stages, np.inf, 0.0)]
    for _ in range(num_stages or stages.most):
        if deadline.left_s == 0:
            raise OutOfTime
        reached_s = np.full(len(stages.sets), np.inf)
        if len(stages.end):
            each_s = np.maximum(slowest_s[-1][stages.start], stages.load_s)
            reached_s[stages.reached] = np.minimum.reduceat(each_s, stages.first_to)
        slowest_s.append(reached_s)
    of_all_s = [float(reached_s[-1]) for reached_s in slowest_s]
    count = num_stages or int(np.argmin(of_all_s))
    if of_all_s[count] == np.inf:
        return None

    def leads(stages_so_far: int, to: Integers) -> Flags:
        each_s = np.maximum(slowest_s[stages_so_far][stages.start[to]], stages.load_s[to])
        here: Flags = each_s == each_s.min()
        return here

    return of_all_s[count], _walked_back(stages, count, leads)


def roomiest_chain(
    stages: StageTable, target_s: float, room: Room, deadline: Any, *, num_stages: int | None = None
) -> Integers | None:
    """Returns the stage of each node on the chain with the most room at its end, of `num_stages` or of any
    number that there are.

    Returns None where no chain is within the target and always has room. Raises OutOfTime.
    """
    is_within = stages.load_s <= target_s * (1 + _SLACK)
    accounts = [_first(stages, -np.inf, room.first)]

    def after(account: Floats, to: Any) -> Floats:
        left = account[stages.start[to]] - room.taken[to]
        left = np.where(is_within[to] & (left >= -room.slack), left + room.given[to], -np.inf)
        return left

    for _ in range(num_stages or stages.most):
        if deadline.left_s == 0:
            raise OutOfTime
        account = np.full(len(stages.sets), -np.inf)
        if len(stages.end):
            account[stages.reached] = np.maximum.reduceat(after(accounts[-1], slice(None)), stages.first_to)
        accounts.append(account)
    at_end = [float(account[-1]) for account in accounts]
    count = num_stages or int(np.argmax(at_end))
    if at_end[count] == -np.inf:
        return None

    def leads(stages_so_far: int, to: Integers) -> Flags:
        left = after(accounts[stages_so_far], to)
        here: Flags = left == left.max()
        return here

    return _walked_back(stages, count, leads)


def _first(stages: StageTable, unreached: float, first: float) -> Floats:
    """Returns an amount for each down-set before the first stage."""
    amounts = np.full(len(stages.sets), unreached)
    amounts[0] = first
    return amounts


def _walked_back(stages: StageTable, count: int, leads: Any) -> Integers:
    """Returns the stage of each node on a chain of `count` stages, of which `leads` says which stage of those
    to a set is on it."""
    cuts, at = [], len(stages.sets) - 1
    for stages_so_far in reversed(range(count)):
        low, high = np.searchsorted(stages.end, [at, at + 1])
        to = np.arange(low, high)
        at = int(stages.start[to[np.flatnonzero(leads(stages_so_far, to))[0]]])
        cuts.append(at)
    return stages.sets.cut_at(cuts[:-1])
