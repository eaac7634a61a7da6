"""Windows: the stages that a node can be on at all, if no stage may take longer than a target T.

A node's ancestors are on its own stage or earlier ones, so the stages up to its own must have the time and
the memory for all of them. The same holds from the other end for its descendants. The time that a stage has
for work, its room, is T less its `fixed_s` and less the transfers that it cannot escape (`_inescapable`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pd2bw_fx.passes.partition.instance import Flags, Floats, Instance, Integers
from pd2bw_fx.passes.partition.integer_program.assignment import Windows

_ROUNDS = 3
# Makes capacities a hair larger, so that rounding never excludes what fits exactly.
_SLACK = 1 + 1e-9


class Reach:
    """Ancestors and descendants of every node: entry [v, u] is 1 where u comes before v."""

    def __init__(self, num_nodes: int, edges: tuple[tuple[int, int], ...]) -> None:
        self.edges_forward = sorted(edges, key=lambda edge: edge[0])
        bits = np.zeros((num_nodes, (num_nodes + 7) // 8), dtype=np.uint8)
        for u, v in sorted(edges, key=lambda edge: edge[1]):
            bits[v] |= bits[u]
            bits[v, u >> 3] |= np.uint8(128 >> (u & 7))
        self._before = np.unpackbits(bits, axis=1, count=num_nodes).astype(np.float64)

    def up_to(self, amount: Floats) -> Floats:
        """Returns the sum of each node's own amount and those of all its ancestors."""
        return amount + self._before @ amount

    def from_on(self, amount: Floats) -> Floats:
        """Returns the sum of each node's own amount and those of all its descendants."""
        return amount + amount @ self._before

    def comes_before(self, one: int, other: int) -> bool:
        return bool(self._before[other, one])

    def among(self, nodes: Integers) -> Flags:
        """Returns a table of some nodes whose entry [v, u] says that u comes before v."""
        among: Flags = self._before[np.ix_(nodes, nodes)] > 0
        return among

    def related(self, node: int) -> Flags:
        """Returns which nodes come before or after this one."""
        related: Flags = (self._before[node] > 0) | (self._before[:, node] > 0)
        return related

    def between(self, one: int, other: int) -> list[int]:
        """Returns the nodes on all paths from the earlier of two nodes to the later one."""
        first, last = (one, other) if self._before[other, one] else (other, one)
        on_the_way: list[int] = np.flatnonzero(self._before[:, first] * self._before[last]).tolist()
        return on_the_way

    def between_sums(self, node: int, amount: Any) -> Any:
        """Returns, for each other node, the sum of the amounts of nodes on paths between the two."""
        earlier = (self._before[node] * amount) @ self._before
        later = self._before @ (self._before[:, node] * amount)
        return earlier + later

    def beyond(self, node: int, other: int) -> Flags:
        """Returns which nodes lie on the far side of `other`, seen from `node`; itself included."""
        before = self._before[other] if self._before[node, other] else self._before[:, other]
        beyond: Flags = before > 0
        beyond[other] = True
        return beyond


@dataclass(frozen=True, slots=True, eq=False)
class Lost:
    """The transfer time of each stage that no assignment escapes, so that a run of stages loses their sum.

    The first stage of a run is only certain to lose `first_s`, and the last one `last_s`, because they may
    transfer to and from other stages than their neighbours.
    """

    run_s: Floats
    first_s: Floats
    last_s: Floats

    @classmethod
    def nothing(cls, num_stages: int) -> Lost:
        zero = np.zeros(num_stages)
        return cls(zero, zero, zero)


def windows_for(instance: Instance, target_s: float, reach: Reach) -> Windows | None:
    """Returns windows that every assignment within `target_s` keeps to, or None where there is none."""
    room_s = target_s - instance.besides_s
    if not instance.may_be_empty and (room_s < 0).any():
        return None
    windows = _closed(instance, room_s, reach, _timeless_windows(instance, reach))
    if not np.isfinite(target_s):
        return windows
    lost = Lost.nothing(instance.num_stages)
    for _ in range(_ROUNDS):
        if windows is None:
            return None
        windows = _time_windows(instance, room_s, lost, reach, windows)
        windows = _closed(instance, room_s, reach, windows)
        if windows is None or instance.overlap:
            return windows
        more = _inescapable(instance, room_s, reach, windows)
        if more.run_s.sum() <= lost.run_s.sum():
            break
        lost = more
    return windows


def _timeless_windows(instance: Instance, reach: Reach) -> Windows:
    n, k = instance.num_nodes, instance.num_stages
    everywhere = Windows(np.zeros(n, dtype=np.int64), np.full(n, k - 1, dtype=np.int64))
    if not instance.may_be_empty:
        # No stage is empty: each stage before a node's own has a node that is no descendant of it, and each
        # stage after it one that is no ancestor.
        one = np.ones(n)
        others_first = np.rint(n - reach.from_on(one)).astype(np.int64)
        others_last = np.rint(n - reach.up_to(one)).astype(np.int64)
        everywhere = Windows(np.maximum(0, k - 1 - others_last), np.minimum(k - 1, others_first))
    if not np.isfinite(instance.limit_bytes).all():
        return everywhere
    return _narrowed(everywhere, instance.static_bytes.min(axis=0), instance.limit_bytes, reach)


def _time_windows(instance: Instance, room_s: Floats, lost: Lost, reach: Reach, windows: Windows) -> Windows:
    unit, ratio = _in_seconds_of_the_first(instance)
    bounded = np.isfinite(ratio)
    rate = np.where(bounded, ratio, 1.0)

    def capacity(lost_s: Floats) -> Floats:
        left: Floats = np.where(bounded, np.maximum(0.0, room_s - lost_s) * rate, np.inf)
        return left

    run = capacity(lost.run_s)
    before = np.concatenate(([0.0], run.cumsum()[:-1]))
    after = np.concatenate(([0.0], run[::-1].cumsum()[:-1]))
    return _narrowed_to(
        windows,
        unit,
        up_to=before + capacity(lost.last_s),
        from_on=after + capacity(lost.first_s)[::-1],
        reach=reach,
    )


def _in_seconds_of_the_first(instance: Instance) -> tuple[Floats, Floats]:
    """Returns the work in seconds of stage 0, and the most of these that each stage does in one second."""
    work_s = instance.work_s + (instance.again_s if instance.recompute is True else 0.0)
    unit = work_s[0]
    some = unit > 0
    ratio = np.full(instance.num_stages, np.inf)
    for stage in range(instance.num_stages):
        if some.any() and (work_s[stage][some] > 0).all():
            ratio[stage] = (unit[some] / work_s[stage][some]).max()
    return unit, ratio


def _narrowed(windows: Windows, amount: Floats, capacity: Floats, reach: Reach) -> Windows:
    return _narrowed_to(
        windows, amount, up_to=capacity.cumsum(), from_on=capacity[::-1].cumsum(), reach=reach
    )


def _narrowed_to(
    windows: Windows, amount: Floats, *, up_to: Floats, from_on: Floats, reach: Reach
) -> Windows:
    """Narrows windows by an amount of each node: `up_to[s]` is what stages 0..s have room for together, and
    `from_on` the same, counted from the last stage."""
    k = len(up_to)
    # Both grow with the number of stages, except for what a run loses at its end.
    first = np.searchsorted(np.maximum.accumulate(up_to) * _SLACK, reach.up_to(amount))
    last = k - 1 - np.searchsorted(np.maximum.accumulate(from_on) * _SLACK, reach.from_on(amount))
    return Windows(np.maximum(windows.first, first), np.minimum(windows.last, last))


def _closed(instance: Instance, room_s: Floats, reach: Reach, windows: Windows) -> Windows | None:
    """Narrows windows whose ends a node does not fit on by itself, and then along the edges."""
    k = instance.num_stages
    first, last = windows.first.copy(), windows.last.copy()
    fits = _fits_alone(instance, room_s)
    for stage in range(k):
        first[(first == stage) & ~fits[stage]] = stage + 1
    for stage in reversed(range(k)):
        last[(last == stage) & ~fits[stage]] = stage - 1
    for u, v in reach.edges_forward:
        first[v] = max(first[v], first[u])
    for u, v in reversed(reach.edges_forward):
        last[u] = min(last[u], last[v])
    return None if (first > last).any() else Windows(first, last)


def _fits_alone(instance: Instance, room_s: Floats) -> Flags:
    time = instance.work_s <= room_s[:, None] * _SLACK
    memory = instance.static_bytes <= instance.limit_bytes[:, None]
    fits: Flags = time & memory
    if instance.forbidden is not None:
        fits &= ~instance.forbidden
    return fits


def _inescapable(instance: Instance, room_s: Floats, reach: Reach, windows: Windows) -> Lost:
    """Returns what the transfers of one path through the graph, the spine, take from the stages.

    A stage that has a node of the spine, but not its ends, receives and sends at least the spine's cheapest
    tensors. Any other stage is jumped by an edge of the spine, or lies before its start or after its end. All
    that it can hold is work parallel to that edge, or outside of the start's descendants, or outside of the
    end's ancestors. If this is so little that it fits in the room that the transfers leave, then such a stage
    may be counted as losing the transfers too.
    """
    k = instance.num_stages
    nothing = Lost.nothing(k)
    slowest = instance.work_s.max(axis=0) + (instance.again_s.max(axis=0) if instance.recompute else 0.0)
    upto, onwards, total_s = reach.up_to(slowest), reach.from_on(slowest), float(slowest.sum())
    half_s = float(room_s.max()) / 2
    spine = _widest_path(
        instance,
        starts=_extreme(windows.last, total_s - onwards <= half_s),
        ends=_extreme(-windows.first, total_s - upto <= half_s),
    )
    if k == 1 or not spine or len({net for net, _, _ in spine}) < len(spine):
        return nothing  # No path, or one tensor that would count twice.
    start, end = spine[0][1], spine[-1][2]
    costs = instance.cost_s[[net for net, _, _ in spine]].min(axis=0)
    before_s, after_s = np.zeros(k), np.zeros(k)
    for stage in range(k):
        # The stage of the start itself may receive nothing, that of the end may send nothing.
        if stage > windows.last[start]:
            before_s[stage] = costs[stage, :stage].min()
        if stage < windows.first[end]:
            after_s[stage] = costs[stage, stage + 1 :].min()
    lost_s = before_s + after_s
    parallel_s = max(total_s - upto[u] - onwards[v] for _, u, v in spine)
    outside_s = max(parallel_s, total_s - onwards[start], total_s - upto[end])
    if outside_s > float((room_s - lost_s).min()):
        return nothing
    if instance.may_be_empty:
        return Lost(lost_s, lost_s, lost_s)
    unit, _ = _in_seconds_of_the_first(instance)
    upto, onwards = reach.up_to(unit), reach.from_on(unit)
    parallel = max(float(unit.sum() - upto[u] - onwards[v]) for _, u, v in spine)
    outside = max(parallel, float(unit.sum() - onwards[start]), float(unit.sum() - upto[end]))
    return _from_neighbours(instance, room_s, costs, before_s, after_s, outside)


def _from_neighbours(
    instance: Instance, room_s: Floats, costs: Floats, before_s: Floats, after_s: Floats, outside: float
) -> Lost:
    """Returns larger losses, where each stage receives from the stage before it and sends to the one after.

    This is so if every stage has a node of the spine. A stage without one does at most `outside` of the work
    (in seconds of stage 0). If that falls short of what it could do with one by more than its two neighbours
    gain from other links, then a run of stages does most with no such stage, and the losses hold for all.
    """
    lost_s = before_s + after_s
    stages = np.arange(instance.num_stages - 1)
    previous_s, next_s = before_s.copy(), after_s.copy()
    previous_s[1:] = costs[stages + 1, stages]
    next_s[:-1] = costs[stages, stages + 1]
    run_s = previous_s + next_s
    _, ratio = _in_seconds_of_the_first(instance)
    if np.isfinite(ratio).all():
        gained = ratio * (run_s - lost_s)
        of_neighbours = np.concatenate(([0.0], gained[:-1])) + np.concatenate((gained[1:], [0.0]))
        if (ratio * (room_s - run_s) - outside >= of_neighbours).all():
            return Lost(run_s, before_s + next_s, previous_s + after_s)
    return Lost(lost_s, lost_s, lost_s)


def _extreme(key: Integers, allowed: Flags) -> Flags:
    """Returns those of the allowed nodes whose key is smallest."""
    if not allowed.any():
        return allowed
    extreme: Flags = allowed & (key == key[allowed].min())
    return extreme


def _widest_path(instance: Instance, *, starts: Flags, ends: Flags) -> list[tuple[int, int, int]]:
    """Returns the path whose cheapest tensor is dearest, as (net, from, to); empty where there is none."""
    k, n = instance.num_stages, instance.num_nodes
    apart = ~np.eye(k, dtype=bool)
    price = instance.cost_s[:, apart].min(axis=1, initial=np.inf).tolist()
    width = np.where(starts, np.inf, -np.inf).tolist()
    came: list[tuple[int, int, int] | None] = [None] * n
    order = set(instance.edges)
    steps = sorted(
        (net.producer, index, consumer)
        for index, net in enumerate(instance.nets)
        for consumer in net.consumers
        if (net.producer, consumer) in order
    )
    for u, index, v in steps:
        through = min(width[u], price[index])
        if through > width[v]:
            width[v], came[v] = through, (index, u, v)
    reached = [v for v in np.flatnonzero(ends).tolist() if 0 < width[v] < np.inf]
    if not reached:
        return []
    path = []
    step = came[max(reached, key=lambda v: width[v])]
    while step is not None:
        path.append(step)
        step = came[step[1]]
    return path[::-1]
