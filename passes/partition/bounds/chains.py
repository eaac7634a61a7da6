"""Finds the chain of down-sets that leaves most room for transfers, for stages that are all alike.

Every stage of a chain is within the target if it pays once for each tensor that it has a part of. That does
not count the further sends of a tensor which several stages read. So a chain has an account of room for
sends, in seconds. Each stage takes some room and gives some, by the rule of a `Room`, and the account never
falls below zero. Of two chains that reach the same down-set with as many stages, the one with more room is
continued.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from pd2bw_fx.passes.partition.instance import Floats, Integers

from .downsets import Chain, DownSets, OutOfTime

_MANY = 8  # nodes of a tensor: with more, its readers are on several stages


class Room(Protocol):
    """A rule that says how much room stages take and give. A chain begins with `first_s`."""

    first_s: float

    def of_stages(self, at: int, ends: Integers, load_s: Floats) -> tuple[Floats, Floats]:
        """Returns the seconds that stages from down-set `at` up to each of `ends` take, and those that they
        give.

        What a stage takes has to be there before it; what it gives is there for the stages after it.
        """


class RoomInAll:
    """The time for transfers that the target leaves all stages together.

    A tensor is transferred once for every stage but one that has a part of it, and each transfer takes time
    at both its ends.
    """

    def __init__(self, sets: DownSets, target_s: float) -> None:
        self._sets = sets
        table = sets.tables[0]
        self.first_s = sets.kinds[0].count * target_s - float(table.work_s[-1])

    def of_stages(self, at: int, ends: Integers, load_s: Floats) -> tuple[Floats, Floats]:
        sets = self._sets
        arriving_s = np.zeros(len(ends))
        for net in sets.crossing[at]:
            arriving_s += 2 * sets.tables[0].cost_s[net] * (sets.counts[net, ends] > sets.counts[net, at])
        return arriving_s, np.zeros(len(ends))


class RoomToHandOn:
    """The time that stages with a tensor of many readers have left of the target, to hand it on.

    A stage that reads such a tensor takes one send of it from the room; what it receives is in its own load.
    The stage that makes the tensor gives the one send that its load counts. The rule does not ask which of
    several such tensors a stage has to send, so a chain with room is worth a try and no more.
    """

    first_s = 0.0

    def __init__(self, sets: DownSets, target_s: float) -> None:
        self._sets = sets
        self._target_s = target_s
        self.tensors = np.flatnonzero(sets.sizes > _MANY).tolist()

    def of_stages(self, at: int, ends: Integers, load_s: Floats) -> tuple[Floats, Floats]:
        sets = self._sets
        taken_s, given_s = np.zeros(len(ends)), np.zeros(len(ends))
        may_send = np.zeros(len(ends), dtype=bool)
        for net in self.tensors:
            cost_s, before, counts = sets.tables[0].cost_s[net], sets.counts[net, at], sets.counts[net, ends]
            has_part = (counts > before) & (counts < sets.sizes[net])
            may_send |= has_part
            if before:
                taken_s += cost_s * (counts > before)
            else:
                given_s += cost_s * has_part
        return taken_s, given_s + np.where(may_send, self._target_s - load_s, 0.0)


def roomiest_chain(
    sets: DownSets, target_s: float, room: Room, deadline: Any, *, num_stages: int | None = None
) -> Chain | None:
    """Returns the chain with the most room at its end, of `num_stages` or of any number that there are.

    Returns None where no chain is within the target and always has room. Raises OutOfTime.
    """
    most = sets.kinds[0].count
    room_s = np.full((most + 1, len(sets)), -np.inf)  # [stages so far, set]
    came = np.zeros((most + 1, len(sets)), dtype=np.int64)
    room_s[0, 0] = room.first_s
    enough = sets.enough(target_s)[0]
    slack_s = most * target_s * 1e-9
    for at in range(len(sets) - 1):
        if at % 256 == 0 and deadline.left_s == 0:
            raise OutOfTime
        so_far_s = room_s[:most, at]
        counts = np.flatnonzero(so_far_s > -np.inf)
        if num_stages is None:
            with_fewer_s = np.maximum.accumulate(np.concatenate(([-np.inf], so_far_s[:-1])))
            counts = counts[so_far_s[counts] > with_fewer_s[counts]]
        if len(counts) == 0:
            continue
        ends, load_s = sets.reached(at, 0, target_s, int(enough[most - counts[0] - 1]))
        taken_s, given_s = room.of_stages(at, ends, load_s)
        for count in counts.tolist():
            left_s = so_far_s[count] - taken_s
            after_s = np.where(left_s >= -slack_s, left_s + given_s, -np.inf)
            better = after_s > room_s[count + 1, ends]
            room_s[count + 1, ends[better]] = after_s[better]
            came[count + 1, ends[better]] = at
    count = int(room_s[:, -1].argmax()) if num_stages is None else num_stages
    if room_s[count, -1] == -np.inf:
        return None
    cuts = [len(sets) - 1]
    while cuts[-1] > 0:
        cuts.append(int(came[count, cuts[-1]]))
        count -= 1
    return Chain(sets.cut_at(cuts[1:-1]), (0,) * (len(cuts) - 1))
