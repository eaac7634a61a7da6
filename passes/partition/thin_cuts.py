"""Makes the cuts of an assignment thinner where that costs its slowest stage nothing.

The search looks at the slowest stage alone. Between others it may leave an operator in a stage by itself,
away from all that it works with, or cut where more crosses than has to:

    stage 1   .. wi | act  wo  add ..        32 MiB cross behind `wi`
    stage 1   .. | wi  act  wo  add ..       half a MiB before it, if stage 2 has the time and the memory

Nodes are moved to the stages of their neighbours, with what has to move with them, as long as that takes
stages and links less time in all, everything fits, and no stage becomes slower than the slowest one is. The
squares of the stages' times have to add up to less, too: where times are estimates, a stage that is given
much to do for little to send may turn out to be the slowest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from .choices import Deadline
from .instance import Floats, Instance, Integers, Loads, Net, evaluate, respects_edges
from .route import loads_of

_MOST_MOVED = 24  # nodes at once
_LEAST_GAIN = 1e-9  # of the sums over all stages: less is rounding


def with_thin_cuts(instance: Instance, stage_of: Integers, deadline: Deadline) -> Integers:
    """Returns an assignment that is no slower, with less to send. After the deadline no more is moved."""
    graph, loads = _Graph(instance), loads_of(instance, stage_of)
    is_better = True
    while is_better:
        is_better = False
        for node in graph.at_cuts(stage_of):
            for moved, target in graph.moves(stage_of.tolist(), node):
                if deadline.left_s == 0:
                    return stage_of
                tried = stage_of.copy()
                tried[moved] = target
                after = _loads_if_as_fast(instance, tried, loads.bottleneck_s)
                if after is not None and _is_better(after, loads):
                    stage_of, loads, is_better = tried, after, True
                    break
    return stage_of


def _loads_if_as_fast(instance: Instance, stage_of: Integers, bottleneck_s: float) -> Loads | None:
    """Returns what an assignment costs, or None where it is plain before values are routed that it does not
    fit or is slower."""
    straight = evaluate(instance, stage_of)
    if not straight.fits or not respects_edges(instance, stage_of):
        return None
    if (straight.work_s + straight.again_s).max() > bottleneck_s:
        return None
    return loads_of(instance, stage_of)


def _is_better(after: Loads, before: Loads) -> bool:
    if after.bottleneck_s > before.bottleneck_s or not after.fits:
        return False
    new_s, old_s = _stages_s(after), _stages_s(before)
    return all(new < (1 - _LEAST_GAIN) * old for new, old in zip(_sums(new_s), _sums(old_s), strict=True))


def _stages_s(loads: Loads) -> Floats:
    """Returns the time of each stage and its links, whether links run beside the work or not."""
    return loads.work_s + loads.again_s + loads.send_s + loads.receive_s


def _sums(times_s: Floats) -> tuple[float, float]:
    return float(times_s.sum()), float(np.square(times_s).sum())


class _Graph:
    """The neighbours of nodes, and what moving some of them saves."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        nodes = range(instance.num_nodes)
        self._before: list[list[int]] = [[] for _ in nodes]
        self._behind: list[list[int]] = [[] for _ in nodes]
        for u, v in instance.edges:
            self._before[v].append(u)
            self._behind[u].append(v)
        self._nets: list[list[int]] = [[] for _ in nodes]
        for number, net in enumerate(instance.nets):
            for node in dict.fromkeys(net.members):
                self._nets[node].append(number)

    def at_cuts(self, stage_of: Integers) -> list[int]:
        """Returns the nodes with a neighbour in another stage."""
        stages = stage_of.tolist()
        crossing = (edge for edge in self._instance.edges if stages[edge[0]] != stages[edge[1]])
        return sorted({node for edge in crossing for node in edge})

    def moves(self, stages: list[int], node: int) -> Iterator[tuple[list[int], int]]:
        """Yields moves of a node, with nodes around it, that promise to save time: nodes and their new stage.

        Those that promise most come first; smaller ones may fit where larger ones do not.
        """
        own = stages[node]
        around = {stages[other] for other in (*self._before[node], *self._behind[node])} - {own}
        for target in sorted(around, key=lambda stage: abs(stage - own)):
            for moved in reversed(self._groups(stages, node, target)):
                yield moved, target

    def _groups(self, stages: list[int], node: int, target: int) -> list[list[int]]:
        """Returns larger and larger groups of nodes around this one, each of which saves more than those
        before it.

        To a later stage it goes with all that reads it in its own stage, and may take along what only these
        read; to an earlier one with all that it reads there, and what reads only these.
        """
        own, is_later = stages[node], target > stages[node]
        needed, taken = (self._behind, self._before) if is_later else (self._before, self._behind)

        def is_past(other: int) -> bool:
            return stages[other] >= target if is_later else stages[other] <= target

        group, waiting = dict[int, None](), [node]
        while waiting:
            member = waiting.pop()
            if member in group:
                continue
            if stages[member] != own or len(group) == _MOST_MOVED:
                return []
            group[member] = None
            waiting += [other for other in needed[member] if not is_past(other)]
        found, most_s = list[list[int]](), 0.0
        while len(group) <= _MOST_MOVED:
            saved_s = self._saved_s(stages, group, target)
            if saved_s > most_s:
                found.append(list(group))
                most_s = saved_s
            free = [
                other
                for other in dict.fromkeys(other for member in group for other in taken[member])
                if other not in group
                and stages[other] == own
                and all(reader in group or is_past(reader) for reader in needed[other])
            ]
            if not free:
                break
            group[max(free, key=lambda other: self._saved_s(stages, [*group, other], target))] = None
        return found

    def _saved_s(self, stages: list[int], group: Iterable[int], target: int) -> float:
        """Returns the time that a move saves if values are sent straight to the stages that read them."""
        instance, moved = self._instance, dict.fromkeys(group, target)
        saved_s = 0.0
        for node in moved:
            saved_s += float(instance.work_s[stages[node], node] - instance.work_s[target, node])
        for number in {number for node in moved for number in self._nets[node]}:
            net = instance.nets[number]
            before = {member: stages[member] for member in net.members}
            saved_s += self._net_s(number, net, before) - self._net_s(
                number, net, {member: moved.get(member, stage) for member, stage in before.items()}
            )
        return saved_s

    def _net_s(self, number: int, net: Net, stages: dict[int, int]) -> float:
        source = stages[net.producer]
        targets = sorted({stages[reader] for reader in net.consumers} - {source})
        if not targets:
            return 0.0
        costs = self._instance.cost_s[number]
        sent = targets if self._instance.per_destination else targets[:1]
        return float(sum(costs[source, t] for t in sent) + sum(costs[t, source] for t in targets))
