"""Upper bounds: the best way to cut one topological order into intervals, by dynamic program.

The costs of all n^2 / 2 intervals come at once: a net costs an interval that has some of its members but not
all, which is a union of rectangles in the plane (first position, end position), summed by differences.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .instance import Floats, Instance, Integers

_NEVER = np.inf


def best_cut(instance: Instance, order: Sequence[int]) -> Integers | None:
    """The stage of every node where `order` is cut best, or None where no cut of it fits in memory.

    Tensors are priced as if they came from the stage before and went to the stage after; with several
    readers that is a guess where links are unlike or stages jumped, so the caller evaluates what it gets.
    """
    n, k = instance.num_nodes, instance.num_stages
    rectangles = _Rectangles(instance, order)
    reached = np.full(n + 1, _NEVER)
    reached[0] = 0.0
    cuts = np.zeros((k, n + 1), dtype=np.int64)
    ends = np.arange(n + 1)
    for stage in range(k):
        through = np.maximum(reached[:, None], rectangles.load_s(stage))
        if instance.may_be_empty:
            through[ends, ends] = reached
        cuts[stage] = through.argmin(axis=0)
        reached = through[cuts[stage], ends]
    if not np.isfinite(reached[n]):
        return None
    stage_of = np.zeros(n, dtype=np.int64)
    end = n
    for stage in reversed(range(k)):
        start = int(cuts[stage, end])
        stage_of[np.asarray(order[start:end], dtype=np.int64)] = stage
        end = start
    return stage_of


class _Rectangles:
    """Interval costs of one order: entry [i, j] is for the nodes at positions i..j-1; infinite for i >= j."""

    def __init__(self, instance: Instance, order: Sequence[int]) -> None:
        self.instance = instance
        self.order = np.asarray(order, dtype=np.int64)
        n = instance.num_nodes
        position = np.empty(n, dtype=np.int64)
        position[self.order] = np.arange(n)
        corners: list[tuple[int, int, int, int]] = []
        nets: list[int] = []
        starts: list[bool] = []
        for index, net in enumerate(instance.nets):
            members = np.sort(position[list(net.members)]).tolist()
            before = -1
            for place in members:
                first = place == members[0]
                # [low, high) of first positions, then of end positions.
                corners.append((before + 1, place + 1, place + 1, members[-1] + 1 if first else n + 1))
                nets.append(index)
                starts.append(first)
                before = place
        self.corners = np.asarray(corners, dtype=np.int64).reshape(-1, 4)
        self.nets = np.asarray(nets, dtype=np.int64)
        self.starts = np.asarray(starts, dtype=bool)
        self.below = np.tri(n + 1, dtype=bool)  # i >= j: no interval
        self.held = self._summed(np.array([float(net.held_bytes) for net in instance.nets])[self.nets])
        self.shared = self._shared()
        self.workspace = self._largest(instance.workspace_bytes[self.order])

    def load_s(self, stage: int) -> Floats:
        """Load of every interval on this stage; infinite where it does not fit in memory."""
        instance, order = self.instance, self.order
        before, after = max(stage - 1, 0), min(stage + 1, instance.num_stages - 1)
        costs = np.where(
            self.starts, instance.cost_s[self.nets, stage, after], instance.cost_s[self.nets, stage, before]
        )
        links_s = self._summed(costs)
        work_s = _between(instance.work_s[stage, order])
        again_s = _between(instance.again_s[stage, order])
        in_flight = float(instance.in_flight[stage])
        saved = _between(instance.saved_bytes[order])
        fixed = _between(instance.static_bytes[order]) + self.shared + in_flight * self.held + self.workspace
        limit = instance.limit_bytes[stage]
        kept_fits = fixed + in_flight * saved <= limit
        again_fits = fixed + saved <= limit
        if instance.recompute == "auto":
            compute_s = np.where(kept_fits, work_s, np.where(again_fits, work_s + again_s, _NEVER))
        elif instance.recompute:
            compute_s = np.where(again_fits, work_s + again_s, _NEVER)
        else:
            compute_s = np.where(kept_fits, work_s, _NEVER)
        load_s = np.maximum(compute_s, links_s) if instance.overlap else compute_s + links_s
        if instance.forbidden is not None:
            load_s[_between(instance.forbidden[stage, order].astype(np.float64)) > 0] = _NEVER
        load_s[self.below] = _NEVER
        return load_s

    def _summed(self, weights: Floats) -> Floats:
        return _painted(self.corners, weights, self.instance.num_nodes)

    def _shared(self) -> Floats:
        n = self.instance.num_nodes
        position = np.empty(n, dtype=np.int64)
        position[self.order] = np.arange(n)
        corners, weights = [], []
        for shared in self.instance.shared:
            before = -1
            for place in np.sort(position[list(shared.nodes)]).tolist():
                corners.append((before + 1, place + 1, place + 1, n + 1))
                weights.append(float(shared.num_bytes))
                before = place
        return _painted(np.asarray(corners, dtype=np.int64).reshape(-1, 4), np.asarray(weights), n)

    def _largest(self, values: Floats) -> Floats:
        n = len(values)
        grid = np.zeros((n + 1, n + 1))
        grid[:, 1:] = np.triu(np.broadcast_to(values, (n + 1, n)))
        largest: Floats = np.maximum.accumulate(grid, axis=1)
        return largest


def _painted(corners: Integers, weights: Floats, n: int) -> Floats:
    """The sum of weights over all rectangles that cover each point of the (n + 1)^2 grid."""
    size = n + 2
    flat = np.zeros(size * size)
    if len(corners):
        i0, i1, j0, j1 = corners.T
        for i, j, sign in ((i0, j0, 1.0), (i1, j0, -1.0), (i0, j1, -1.0), (i1, j1, 1.0)):
            flat += sign * np.bincount(i * size + j, weights, size * size)
    grid = flat.reshape(size, size).cumsum(axis=0).cumsum(axis=1)
    painted: Floats = np.maximum(grid[: n + 1, : n + 1], 0.0)
    return painted


def _between(values: Floats) -> Floats:
    """Entry [i, j]: the sum of values i..j-1."""
    sums = np.concatenate(([0.0], values.cumsum()))
    return sums[None, :] - sums[:, None]
