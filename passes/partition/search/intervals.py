"""Upper bounds: the best way to cut one topological order into intervals, by dynamic program.

The costs of all n^2 / 2 intervals come at once: a net costs an interval that has some of its members but not
all, which is a union of rectangles in the plane (first position, end position), summed by differences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from pd2bw_fx.passes.partition.instance import Flags, Floats, Instance, Integers

_NEVER = np.inf
_MAX_PLACES = 1000
_ROUGH_PLACES = 100


def best_cut(instance: Instance, order: Sequence[int]) -> Integers | None:
    """The stage of every node where `order` is cut best, or None where no cut of it was found that fits.

    Tensors are priced as if they came from the stage before and went to the stage after; with several
    readers that is a guess where links are unlike or stages jumped, so the caller evaluates what it gets.
    Long orders are cut twice: at the cheapest place of each short stretch, then anywhere near those cuts.
    """
    n = instance.num_nodes
    if n <= _MAX_PLACES:
        return _best_cut_at(instance, order, np.arange(n + 1))
    width = -(-n // (_MAX_PLACES // 2))
    places = _cheapest_places(instance, order, width)
    stage_of = _best_cut_at(instance, order, places)
    if stage_of is None:
        return None
    cuts = np.flatnonzero(np.diff(stage_of[np.asarray(order)])) + 1
    around = (cuts[:, None] + np.arange(-2 * width, 2 * width + 1)[None, :]).ravel()
    places = np.unique(np.concatenate((places[:: 1 + len(around) // 100], around, [0, n])))
    finer = _best_cut_at(instance, order, places[(places >= 0) & (places <= n)])
    return stage_of if finer is None else finer


def rough_cut(instance: Instance, order: Sequence[int]) -> Integers | None:
    """Returns what `best_cut` does, with cuts only at the cheapest place of each of a hundred stretches."""
    n = instance.num_nodes
    if n <= _ROUGH_PLACES:
        return _best_cut_at(instance, order, np.arange(n + 1))
    return _best_cut_at(instance, order, _cheapest_places(instance, order, -(-n // _ROUGH_PLACES)))


def _best_cut_at(instance: Instance, order: Sequence[int], places: Integers) -> Integers | None:
    """Returns the best way to cut `order` at some of these places, which begin and end with its ends."""
    n, k = len(places) - 1, instance.num_stages
    rectangles = _Rectangles(instance, order, places)
    reached = np.full(n + 1, _NEVER)
    reached[0] = 0.0
    cuts = np.zeros((k, n + 1), dtype=np.int64)
    ends = np.arange(n + 1)
    through = np.empty((n + 1, n + 1))
    for stage in range(k):
        np.maximum(reached[:, None], rectangles.load_s(stage), out=through)
        if instance.may_be_empty:
            through[ends, ends] = reached
        cuts[stage] = through.argmin(axis=0)
        reached = through[cuts[stage], ends]
    if not np.isfinite(reached[n]):
        return None
    stage_of = np.zeros(instance.num_nodes, dtype=np.int64)
    end = n
    for stage in reversed(range(k)):
        start = int(cuts[stage, end])
        stage_of[np.asarray(order[places[start] : places[end]], dtype=np.int64)] = stage
        end = start
    return stage_of


def _cheapest_places(instance: Instance, order: Sequence[int], width: int) -> Integers:
    """Returns the place with the least crossing cost out of every `width` neighbours, and both ends."""
    n = instance.num_nodes
    position = np.empty(n, dtype=np.int64)
    position[np.asarray(order, dtype=np.int64)] = np.arange(n)
    price = np.zeros(n + 1)
    per_net = instance.cost_s.max(axis=(1, 2), initial=0.0)
    for net, cost_s in zip(instance.nets, per_net.tolist(), strict=True):
        members = position[list(net.members)]
        price[members.min() + 1] += cost_s
        price[min(members.max() + 1, n)] -= cost_s
    price = price.cumsum()[1:n]  # the cost of cutting before each of positions 1..n-1
    cheapest = [start + int(price[start : start + width].argmin()) + 1 for start in range(0, n - 1, width)]
    return np.array([0, *cheapest, n], dtype=np.int64)


class _Rectangles:
    """Interval costs of one order: entry [i, j] is for the nodes in stretches i..j-1; infinite for i >= j.

    The time goes into grids of n^2 numbers, so each one is made once and only if it is needed. Stages that
    cost the same share their grids, and memory that cannot bind is not added up.
    """

    def __init__(self, instance: Instance, order: Sequence[int], places: Integers) -> None:
        self.instance = instance
        self.size = n = len(places) - 1
        self.position = np.empty(instance.num_nodes, dtype=np.int64)  # each node's stretch between places
        self.position[np.asarray(order, dtype=np.int64)] = np.repeat(np.arange(n), np.diff(places))
        self.corners, self.nets, self.starts = self._corners()
        self.no_interval = np.tri(n + 1, dtype=bool)  # i >= j
        self._grids: dict[tuple[str, bytes], Floats] = {}

    def load_s(self, stage: int) -> Floats:
        """Returns the load of every interval on this stage, infinite if it does not fit. It is read-only."""
        instance = self.instance
        work_s = self._by_stretch(instance.work_s[stage])
        if instance.recompute is True:
            work_s = work_s + self._by_stretch(instance.again_s[stage])
        link_costs = self._link_costs(stage)
        memory = self._memory_key(stage)
        besides = instance.besides_s[stage].tobytes()
        parts = work_s.tobytes(), besides, link_costs.tobytes(), memory, self._forbidden_key(stage)
        key = b"".join(parts)
        if ("load", key) not in self._grids:
            load_s = _between(work_s) + instance.besides_s[stage]
            self._add_links(load_s, link_costs)
            if memory:
                self._add_memory(load_s, stage)
            if instance.forbidden is not None:
                load_s[_between(self._by_stretch(instance.forbidden[stage].astype(np.float64))) > 0] = _NEVER
            load_s[self.no_interval] = _NEVER
            self._grids["load", key] = load_s
        return self._grids["load", key]

    def _add_links(self, load_s: Floats, link_costs: Floats) -> None:
        links_s = self._grid("links", link_costs.tobytes(), lambda: self._summed(link_costs))
        if self.instance.overlap:
            np.maximum(load_s, links_s, out=load_s)
        else:
            load_s += links_s

    def _add_memory(self, load_s: Floats, stage: int) -> None:
        """Makes loads infinite where the interval does not fit, and adds one more forward where it fits only
        if it recomputes. The formulas are those of `Instance`."""
        instance = self.instance
        in_flight = float(instance.in_flight[stage])
        held = self._grid("held", b"", self._held)
        saved = self._grid("saved", b"", lambda: _between(self._by_stretch(instance.saved_bytes)))
        fixed = _between(self._by_stretch(instance.static_bytes[stage])) + in_flight * held
        fixed += self._shared([float(shared.num_bytes[stage]) for shared in instance.shared])
        workspace = self._grid("workspace", b"", lambda: self._most(instance.workspace_bytes))
        stepped = self._grid("stepped", b"", lambda: self._most(instance.stepped_bytes))
        apart_kept = apart_again = np.zeros(1)
        if instance.gradients_wait[stage]:
            gradients = self._grid("gradients", b"", self._gradients)
            apart_kept = np.minimum(gradients, held + saved)
            apart_again = np.minimum(gradients, held + saved if instance.updates_each[stage] else held)
        num_gone = in_flight if instance.flushes[stage] else 1.0  # finished when the optimizer steps
        stepped_kept, stepped_again = stepped - num_gone * (held + saved), stepped - num_gone * held - saved
        kept = fixed + in_flight * saved + np.maximum(workspace - apart_kept, stepped_kept)
        recomputed = fixed + saved + np.maximum(workspace - apart_again, stepped_again)
        limit = instance.limit_bytes[stage]
        if instance.recompute != "auto":
            load_s[(recomputed if instance.recompute else kept) > limit] = _NEVER
            return
        again = kept > limit
        if instance.overlap:
            links_s = self._summed(self._link_costs(stage))
            work_s = self._by_stretch(instance.work_s[stage] + instance.again_s[stage])
            load_s[again] = np.maximum(_between(work_s) + instance.besides_s[stage], links_s)[again]
        else:
            load_s[again] += _between(self._by_stretch(instance.again_s[stage]))[again]
        load_s[recomputed > limit] = _NEVER

    def _link_costs(self, stage: int) -> Floats:
        """Returns each corner's cost: a producer pays to the next stage, its readers to the one before."""
        before, after = max(stage - 1, 0), min(stage + 1, self.instance.num_stages - 1)
        costs = self.instance.cost_s[self.nets, stage]
        if stage in (before, after):
            # The first stage receives nothing and the last sends nothing, so any cost will do for that.
            before = after = after if stage == before else before
        paid: Floats = np.where(self.starts, costs[:, after], costs[:, before])
        return paid

    def _memory_key(self, stage: int) -> bytes:
        """Returns what the memory of a stage depends on, as a key; empty where all nodes together fit."""
        instance = self.instance
        in_flight = float(instance.in_flight[stage])
        most = (
            instance.static_bytes[stage].sum()
            + sum(float(shared.num_bytes[stage]) for shared in instance.shared)
            + in_flight * (instance.saved_bytes.sum() + sum(net.held_bytes for net in instance.nets))
            + np.maximum(instance.workspace_bytes, instance.stepped_bytes).max(initial=0.0)
        )
        if most <= instance.limit_bytes[stage]:
            return b""
        again_s = instance.again_s[stage].tobytes() if instance.recompute == "auto" else b""
        shared = [float(shared.num_bytes[stage]) for shared in instance.shared]
        flags = [
            float(of[stage]) for of in (instance.gradients_wait, instance.updates_each, instance.flushes)
        ]
        rules = [in_flight, instance.limit_bytes[stage], *flags, *shared]
        key: bytes = np.array(rules).tobytes() + instance.static_bytes[stage].tobytes() + again_s
        return key

    def _forbidden_key(self, stage: int) -> bytes:
        forbidden = self.instance.forbidden
        return b"" if forbidden is None else forbidden[stage].tobytes()

    def _grid(self, kind: str, key: bytes, make: Callable[[], Floats]) -> Floats:
        if (kind, key) not in self._grids:
            self._grids[kind, key] = make()
        return self._grids[kind, key]

    def _corners(self) -> tuple[Integers, Integers, Flags]:
        """Returns rectangles of intervals that have some members of a net and not all, the net of each, and
        whether its intervals have the net's first member."""
        corners: list[tuple[int, int, int, int]] = []
        nets: list[int] = []
        starts: list[bool] = []
        n = self.size
        for index, net in enumerate(self.instance.nets):
            members = sorted(set(self.position[list(net.members)].tolist()))
            before = -1
            for place in members:
                first = place == members[0]
                # [low, high) of first positions, then of end positions.
                corners.append((before + 1, place + 1, place + 1, members[-1] + 1 if first else n + 1))
                nets.append(index)
                starts.append(first)
                before = place
        return (
            np.asarray(corners, dtype=np.int64).reshape(-1, 4),
            np.asarray(nets, dtype=np.int64),
            np.asarray(starts, dtype=bool),
        )

    def _summed(self, weights: Floats) -> Floats:
        return _painted(self.corners, weights, self.size)

    def _by_stretch(self, values: Floats) -> Floats:
        return np.bincount(self.position, values, self.size).astype(np.float64)

    def _most(self, values: Floats) -> Floats:
        largest = np.zeros(self.size)
        np.maximum.at(largest, self.position, values)
        return _largest(largest)

    def _held(self) -> Floats:
        held_bytes = np.array([float(net.held_bytes) for net in self.instance.nets])[self.nets]
        return self._summed(held_bytes)

    def _gradients(self) -> Floats:
        own = _between(self._by_stretch(self.instance.gradient_bytes))
        return own + self._shared([shared.gradient_bytes for shared in self.instance.shared])

    def _shared(self, num_bytes: Sequence[float]) -> Floats:
        """Returns the sum of these bytes over shared parameters with a node in the interval."""
        return self._grid("shared", np.array(num_bytes).tobytes(), lambda: self._held_once(num_bytes))

    def _held_once(self, num_bytes: Sequence[float]) -> Floats:
        n = self.size
        corners, weights = [], []
        for shared, amount in zip(self.instance.shared, num_bytes, strict=True):
            before = -1
            for place in sorted(set(self.position[list(shared.nodes)].tolist())):
                corners.append((before + 1, place + 1, place + 1, n + 1))
                weights.append(amount)
                before = place
        return _painted(np.asarray(corners, dtype=np.int64).reshape(-1, 4), np.asarray(weights), n)


def _largest(values: Floats) -> Floats:
    """Returns a grid whose entry [i, j] is the largest of values i..j-1."""
    n = len(values)
    grid = np.zeros((n + 1, n + 1))
    grid[:, 1:] = np.triu(np.broadcast_to(values, (n + 1, n)))
    largest: Floats = np.maximum.accumulate(grid, axis=1)
    return largest


def _painted(corners: Integers, weights: Floats, n: int) -> Floats:
    """Returns, for each point of the (n + 1)^2 grid, the sum of the weights of rectangles that cover it."""
    size = n + 2
    i0, i1, j0, j1 = corners.T
    at = np.concatenate((i0 * size + j0, i1 * size + j0, i0 * size + j1, i1 * size + j1))
    signed = np.concatenate((weights, -weights, -weights, weights))
    grid = np.bincount(at, signed, size * size).astype(np.float64).reshape(size, size)
    grid.cumsum(axis=0, out=grid)
    grid.cumsum(axis=1, out=grid)
    # Rounding may leave a hair below zero.
    return np.maximum(grid, 0.0, out=grid)[: n + 1, : n + 1]


def _between(values: Floats) -> Floats:
    """Returns a grid whose entry [i, j] is the sum of values i..j-1."""
    sums = np.concatenate(([0.0], values.cumsum()))
    return sums[None, :] - sums[:, None]
