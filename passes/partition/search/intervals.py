"""Upper bounds: the best way to cut one topological order into intervals, by dynamic program.

The costs of all n^2 / 2 intervals come at once: a net costs an interval that has some of its members but not
all, which is a union of rectangles in the plane (first position, end position), summed by differences.
Other orders of the devices have most of these tables alike, and share them (`IntervalTables`).
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from pd2bw_fx.passes.partition.instance import Flags, Floats, Instance, Integers

_NEVER = np.inf
_MAX_PLACES = 1000
_ROUGH_PLACES = 100
_MAX_TABLE_BYTES = 200_000_000

_Array: TypeAlias = npt.NDArray[Any]


class IntervalTables:
    """Tables of the intervals of orders, for several instances one after another.

    What instances have alike is kept for the next one. Where there are more than `max_bytes`, the tables that
    were not used for longest are made anew.
    """

    def __init__(self, max_bytes: int = _MAX_TABLE_BYTES) -> None:
        self.kept = _Kept(max_bytes)
        self._of: dict[tuple[bytes, bytes], _Rectangles] = {}
        self._numbers = itertools.count()

    def of(self, instance: Instance, order: Integers, places: Integers) -> _Rectangles:
        """Returns the tables of one order that is cut at these places."""
        key = order.tobytes(), places.tobytes()
        known = self._of.get(key)
        if known is not None and _have_tables_alike(known.instance, instance):
            known.instance = instance
            return known
        self._of[key] = _Rectangles(instance, order, places, self.kept, next(self._numbers))
        return self._of[key]


class _Kept:
    """Arrays by their keys, those that were used last."""

    def __init__(self, max_bytes: int) -> None:
        self.num_made = 0
        self.left_bytes = max_bytes
        self._arrays: OrderedDict[tuple[Any, ...], tuple[_Array, ...]] = OrderedDict()

    def of(self, key: tuple[Any, ...], make: Callable[[], tuple[_Array, ...]]) -> tuple[_Array, ...]:
        """Returns what is kept under the key, or makes it."""
        if key in self._arrays:
            self._arrays.move_to_end(key)
            return self._arrays[key]
        made = self._arrays[key] = make()
        self.num_made += 1
        self.left_bytes -= _num_bytes(made)
        while self.left_bytes < 0 and len(self._arrays) > 1:
            _, forgotten = self._arrays.popitem(last=False)
            self.left_bytes += _num_bytes(forgotten)
        return made


def _num_bytes(arrays: tuple[_Array, ...]) -> int:
    return sum(array.nbytes for array in arrays)


def _have_tables_alike(one: Instance, other: Instance) -> bool:
    """Returns whether instances are alike in all that the keys of `_Rectangles` leave out."""
    return (
        one.nets == other.nets
        and one.recompute == other.recompute
        and one.overlap == other.overlap
        and one.may_be_empty == other.may_be_empty
        and [(of.nodes, of.gradient_bytes) for of in one.shared]
        == [(of.nodes, of.gradient_bytes) for of in other.shared]
        and np.array_equal(one.gradient_bytes, other.gradient_bytes)
        and np.array_equal(one.saved_bytes, other.saved_bytes)
        and np.array_equal(one.workspace_bytes, other.workspace_bytes)
        and np.array_equal(one.stepped_bytes, other.stepped_bytes)
    )


def best_cut(
    instance: Instance, order: Sequence[int], tables: IntervalTables | None = None
) -> Integers | None:
    """The stage of every node where `order` is cut best, or None where no cut of it was found that fits.

    Tensors are priced as if they came from the stage before and went to the stage after; with several
    readers that is a guess where links are unlike or stages jumped, so the caller evaluates what it gets.
    Long orders are cut twice: at the cheapest place of each short stretch, then anywhere near those cuts.
    `tables` are for calls with other instances.
    """
    n, nodes = instance.num_nodes, np.asarray(order, dtype=np.int64)
    tables = IntervalTables() if tables is None else tables
    if n <= _MAX_PLACES:
        return _best_cut_at(instance, nodes, np.arange(n + 1), tables)
    width = -(-n // (_MAX_PLACES // 2))
    places = _cheapest_places(instance, nodes, width)
    stage_of = _best_cut_at(instance, nodes, places, tables)
    if stage_of is None:
        return None
    cuts = np.flatnonzero(np.diff(stage_of[nodes])) + 1
    around = (cuts[:, None] + np.arange(-2 * width, 2 * width + 1)[None, :]).ravel()
    places = np.unique(np.concatenate((places[:: 1 + len(around) // 100], around, [0, n])))
    finer = _best_cut_at(instance, nodes, places[(places >= 0) & (places <= n)], tables)
    return stage_of if finer is None else finer


def rough_cut(
    instance: Instance, order: Sequence[int], tables: IntervalTables | None = None
) -> Integers | None:
    """Returns what `best_cut` does, with cuts only at the cheapest place of each of a hundred stretches."""
    n, nodes = instance.num_nodes, np.asarray(order, dtype=np.int64)
    tables = IntervalTables() if tables is None else tables
    if n <= _ROUGH_PLACES:
        return _best_cut_at(instance, nodes, np.arange(n + 1), tables)
    places = _cheapest_places(instance, nodes, -(-n // _ROUGH_PLACES))
    return _best_cut_at(instance, nodes, places, tables)


def _best_cut_at(
    instance: Instance, order: Integers, places: Integers, tables: IntervalTables
) -> Integers | None:
    """Returns the best way to cut `order` at some of these places, which begin and end with its ends."""
    n, k = len(places) - 1, instance.num_stages
    rectangles = tables.of(instance, order, places)
    reached = np.full(n + 1, _NEVER)
    reached[0] = 0.0
    cuts: list[Integers] = []
    for stage in range(k):
        reached, starts = rectangles.ends(stage, reached)
        cuts.append(starts)
    if not np.isfinite(reached[n]):
        return None
    stage_of = np.zeros(instance.num_nodes, dtype=np.int64)
    end = n
    for stage in reversed(range(k)):
        start = int(cuts[stage][end])
        stage_of[order[places[start] : places[end]]] = stage
        end = start
    return stage_of


def _cheapest_places(instance: Instance, order: Integers, width: int) -> Integers:
    """Returns the place with the least crossing cost out of every `width` neighbours, and both ends."""
    n = instance.num_nodes
    position = np.empty(n, dtype=np.int64)
    position[order] = np.arange(n)
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
    cost the same share their grids, also with those of other orders of the devices, and memory that cannot
    bind is not added up. The keys have all that grids are made of but what `_have_tables_alike` compares.
    """

    def __init__(
        self, instance: Instance, order: Integers, places: Integers, kept: _Kept, number: int
    ) -> None:
        self.instance = instance
        self.size = n = len(places) - 1
        self.position = np.empty(instance.num_nodes, dtype=np.int64)  # each node's stretch between places
        self.position[order] = np.repeat(np.arange(n), np.diff(places))
        self.corners, self.nets, self.starts = self._corners()
        self._kept = kept
        self._number = number  # of these tables, among all that are kept together

    def ends(self, stage: int, reached: Floats) -> tuple[Floats, Integers]:
        """Returns the slowest stage of the best way to end this stage at each place, and where it begins.

        `reached` is the slowest stage of the best way to begin it there.
        """
        parts = self._parts(stage)

        def make() -> tuple[_Array, ...]:
            through = np.maximum(reached, self._load_s(stage, parts))
            if self.instance.may_be_empty:
                np.fill_diagonal(through, reached)
            starts = through.argmin(axis=1)
            return through[np.arange(self.size + 1), starts], starts

        # Orders of the devices that begin alike are the same so far.
        found, starts = self._kept.of((self._number, "ends", reached.tobytes(), *parts), make)
        return found, starts

    def _parts(self, stage: int) -> tuple[bytes, ...]:
        """Returns what the load of a stage depends on, as a key."""
        instance = self.instance
        return (
            self._work_s(stage).tobytes(),
            instance.besides_s[stage].tobytes(),
            self._link_costs(stage).tobytes(),
            self._memory_key(stage),
            self._forbidden_key(stage),
        )

    def _work_s(self, stage: int) -> Floats:
        work_s = self._by_stretch(self.instance.work_s[stage])
        if self.instance.recompute is True:
            work_s = work_s + self._by_stretch(self.instance.again_s[stage])
        return work_s

    def _load_s(self, stage: int, parts: tuple[bytes, ...]) -> Floats:
        """Returns the load of every interval on this stage, by [end, start], infinite if it does not fit. It
        is read-only."""

        def make() -> Floats:
            load_s = _between(self._work_s(stage)) + self.instance.besides_s[stage]
            self._add_links(load_s, self._link_costs(stage))
            if self._memory_key(stage):
                self._add_memory(load_s, stage)
            if self.instance.forbidden is not None:
                forbidden = self.instance.forbidden[stage].astype(np.float64)
                load_s[_between(self._by_stretch(forbidden)) > 0] = _NEVER
            load_s[self._grid("no interval", (), lambda: np.tri(self.size + 1, dtype=bool))] = _NEVER
            return np.ascontiguousarray(load_s.T)

        return self._grid("load", parts, make)

    def _add_links(self, load_s: Floats, link_costs: Floats) -> None:
        links_s = self._grid("links", (link_costs.tobytes(),), lambda: self._summed(link_costs))
        if self.instance.overlap:
            np.maximum(load_s, links_s, out=load_s)
        else:
            load_s += links_s

    def _add_memory(self, load_s: Floats, stage: int) -> None:
        """Makes loads infinite where the interval does not fit, and adds one more forward where it fits only
        if it recomputes. The formulas are those of `Instance`."""
        instance = self.instance
        in_flight = float(instance.in_flight[stage])
        held = self._grid("held", (), self._held)
        saved = self._grid("saved", (), lambda: _between(self._by_stretch(instance.saved_bytes)))
        fixed = _between(self._by_stretch(instance.static_bytes[stage])) + in_flight * held
        fixed += self._shared([float(shared.num_bytes[stage]) for shared in instance.shared])
        workspace = self._grid("workspace", (), lambda: self._most(instance.workspace_bytes))
        stepped = self._grid("stepped", (), lambda: self._most(instance.stepped_bytes))
        apart_kept = apart_again = np.zeros(1)
        if instance.gradients_wait[stage]:
            gradients = self._grid("gradients", (), self._gradients)
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

    def _grid(self, kind: str, key: tuple[bytes, ...], make: Callable[[], _Array]) -> _Array:
        (grid,) = self._kept.of((self._number, kind, *key), lambda: (make(),))
        return grid

    def _corners(self) -> tuple[Integers, Integers, Flags]:
        """Returns rectangles of intervals that have some members of a net and not all, the net of each, and
        whether its intervals have the net's first member."""
        n, nets = self.size, self.instance.nets
        sizes = np.array([1 + len(net.consumers) for net in nets], dtype=np.int64)
        nodes = np.fromiter(itertools.chain.from_iterable(net.members for net in nets), np.int64, sizes.sum())
        found = np.unique(np.repeat(np.arange(len(nets)), sizes) * n + self.position[nodes])
        of, place = found // n, found % n
        starts = np.diff(of, prepend=-1) > 0
        first, past = np.flatnonzero(starts), np.flatnonzero(np.diff(of, append=len(nets)) > 0)
        before = np.where(starts, -1, np.roll(place, 1))
        last = np.repeat(place[past], past - first + 1)
        # [low, high) of first positions, then of end positions.
        until = np.where(starts, last + 1, n + 1)
        return np.stack((before + 1, place + 1, place + 1, until), axis=1), of, starts

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
        return self._grid("shared", (np.array(num_bytes).tobytes(),), lambda: self._held_once(num_bytes))

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
