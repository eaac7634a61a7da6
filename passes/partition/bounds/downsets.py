"""Enumerates all assignments of a graph with few down-sets, by a dynamic program over these.

A down-set is a set of nodes that has, with each node, all nodes that come before it. What stages 0..s hold
together is one, so an assignment is a chain of down-sets, and each stage is the difference of two neighbours
in it. The cost of a stage depends on these two alone, provided that each stage pays once for a tensor that it
has a part of (`per_destination` is False).

Devices of one kind are alike. So the dynamic program keeps, for each down-set and each number of devices of
the second kind, the fewest devices of the first kind that reach the down-set within the target. This covers
every order of the devices. A graph that is a row has one down-set more than nodes. One with w long branches
side by side has about (length of a branch) ** w, which is what limits the method.

A down-set D is not continued if D + v, with one node v more, is reached by no more devices, and a cut there
costs no more than a cut at D and v's work together. Any continuation of D can do without v: the stage X that
has v then has the load f(X - v) = f(X) - work(v) + c(X - v) - c(X), where c is the cost of cut tensors, and
c(X - v) + c(D) <= c(X) + c(D + v), because c is symmetric and submodular.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pd2bw_fx.passes.partition.instance import Flags, Floats, Instance, Integers, within_reach

_MAX_CELLS = 200_000_000  # down-sets times nodes or tensors, a byte each in the tables
_UNREACHED = 10**6  # more devices than there are
_PAIRS_AT_ONCE = 1_000_000  # sets and nodes that are compared in one go


@dataclass(frozen=True, slots=True, eq=False)
class DeviceKind:
    """`count` devices that are alike, described by `stage` of an instance, which has such a device."""

    instance: Instance
    stage: int
    count: int


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """An assignment, and the kind of device of each of its stages, as an index of `DownSets.kinds`."""

    stage_of: Integers
    kinds: tuple[int, ...]


class OutOfTime(Exception):
    """Raised when the deadline passes before the answer is known."""


class DownSets:
    """The table of all down-sets, which can be asked about one target after another.

    There are one or two `kinds` of devices. `member` (sets, nodes) says which nodes each set has.
    """

    def __init__(self, kinds: Sequence[DeviceKind], member: Flags) -> None:
        self.kinds = tuple(kinds)
        instance = kinds[0].instance
        work = member @ _in_whole_parts(instance.work_s[kinds[0].stage])
        order = np.lexsort((member.sum(axis=1), work))  # subsets come before the sets that include them
        self.member = member[order]
        self.words = _words(self.member)  # (words, sets)
        self.counts = _counts(self.member, instance)  # (nets, sets): members of a net in the set
        self.sizes = np.array([len(net.members) for net in instance.nets], dtype=np.int64)
        self.partly = partly = (self.counts > 0) & (self.counts < self.sizes[:, None])
        self.tables = [_Table(kind, self.member, partly) for kind in self.kinds]
        self._sums: dict[tuple[str, bytes], Floats] = {}
        self.up_to_s: Floats = np.maximum.accumulate(self.tables[0].work_s)
        self.rate = _rate(self.kinds)

    @classmethod
    def of(cls, kinds: Sequence[DeviceKind], *, max_sets: int, deadline: Any = None) -> DownSets | None:
        """Returns None where there are more than `max_sets`, or the tables would be too large.

        Raises OutOfTime.
        """
        instance = kinds[0].instance
        width = max(instance.num_nodes, len(instance.nets), 1)
        max_sets = min(max_sets, _MAX_CELLS // width)
        sets = down_sets(instance.num_nodes, instance.edges, max_sets, deadline)
        return None if sets is None else cls(kinds, _members(sets, instance.num_nodes))

    def within_reach(self, target_s: float) -> DownSets:
        """Returns down-sets that can be asked about this target and smaller ones near it (`within_reach`)."""
        kinds = [replace(kind, instance=within_reach(kind.instance, target_s)) for kind in self.kinds]
        if all(kind.instance is own.instance for kind, own in zip(kinds, self.kinds, strict=True)):
            return self
        return DownSets(kinds, self.member)

    def __len__(self) -> int:
        return int(self.member.shape[0])

    @functools.cached_property
    def crossing(self) -> list[Integers]:
        """The nets that are partly in each set."""
        return [np.flatnonzero(column) for column in self.partly.T]

    def of_nodes(self, each: Floats) -> Floats:
        """Returns the sum over each set's nodes. Other orders of the devices ask for most sums again."""
        return self._summed("nodes", each, lambda: self.member @ each)

    def of_crossing(self, each: Floats) -> Floats:
        """Returns the sum over the nets that are partly in each set."""
        return self._summed("crossing", each, lambda: each @ self.partly)

    def _summed(self, over: str, each: Floats, add_up: Callable[[], Floats]) -> Floats:
        key = over, each.tobytes()
        if key not in self._sums:
            self._sums[key] = add_up()
        return self._sums[key]

    def chain_within(self, target_s: float, deadline: Any) -> Chain | None:
        """Returns an assignment with no stage over the target, or None, which proves that there is none.

        Raises OutOfTime.
        """
        few = self.kinds[1].count if len(self.kinds) > 1 else 0
        most = self.kinds[0].count
        fewest = np.full((few + 1, len(self)), _UNREACHED, dtype=np.int64)
        slowest_s = np.full((few + 1, len(self)), np.inf)  # of the stages so far, among the fewest
        came = np.zeros((few + 1, len(self), 2), dtype=np.int64)  # from which set, by which kind
        fewest[0, 0], slowest_s[0, 0] = 0, 0.0
        enough = self.enough(target_s)
        is_reached = bytearray(len(self))
        reach: npt.NDArray[np.uint8] = np.frombuffer(is_reached, dtype=np.uint8)
        at = num_seen = 0
        # Few of the sets are reached. A bytearray finds the next one without a look at each.
        while 0 <= at < len(self) - 1:
            if num_seen % 256 == 0 and deadline.left_s == 0:
                raise OutOfTime
            num_seen += 1
            rows, with_it = [], _UNREACHED
            better = fewest[:, self._dominating.of(at)].tolist()
            for row, count in enumerate(fewest[:, at].tolist()):
                with_it = min(with_it, *better[row], _UNREACHED)
                if count <= most and count < with_it:
                    rows.append(row)
            for kind in range(len(self.kinds) if rows else 0):
                steps = [(row, row + kind, int(fewest[row, at]) + 1 - kind) for row in rows]
                steps = [step for step in steps if step[1] <= few and step[2] <= most]
                starts = {step: int(enough[step[1]][most - step[2]]) for step in steps}
                if not steps:
                    continue
                reached, load_s = self.reached(at, kind, target_s, min(starts.values()))
                for row, to, count in steps:
                    worst_s = np.maximum(load_s, slowest_s[row, at])
                    known = fewest[to, reached]
                    is_better = (known > count) | ((known == count) & (slowest_s[to, reached] > worst_s))
                    fewest[to, reached[is_better]] = count
                    slowest_s[to, reached[is_better]] = worst_s[is_better]
                    came[to, reached[is_better]] = at, kind
                    reach[reached] = 1
            at = is_reached.find(1, at + 1)
        ends = [row for row in range(few + 1) if fewest[row, -1] <= most]
        return self._chain(min(ends, key=lambda row: slowest_s[row, -1]), came) if ends else None

    @functools.cached_property
    def _dominating(self) -> _Dominating:
        return _Dominating(self)

    def enough(self, target_s: float) -> list[Integers]:
        """Returns the first set that the devices left can finish, by [devices of the second kind
        used][devices of the first kind left]."""
        work_s = self.up_to_s
        few = self.kinds[1].count if len(self.kinds) > 1 else 0
        left = np.arange(self.kinds[0].count + 1)
        room = [left + (few - used) * (self.rate if few > used else 0.0) for used in range(few + 1)]
        return [
            np.searchsorted(work_s, work_s[-1] - target_s * devices * (1 + 1e-9)).astype(np.int64)
            for devices in room
        ]

    def reached(self, at: int, kind: int, target_s: float, start: int) -> tuple[Integers, Floats]:
        """Returns the sets, from number `start` on, that one stage of this kind can reach from set `at`, and
        the loads of that stage."""
        table = self.tables[kind]
        slack_s = target_s * 1e-12
        start = max(at + 1, start)
        work_s = self.up_to_s
        reach_s = target_s * (self.rate if kind else 1.0) * (1 + 1e-9)
        end = int(np.searchsorted(work_s, work_s[at] + reach_s, side="right"))
        near = slice(start, max(start, end))
        load_s = table.work_s[near] - table.work_s[at]
        fits = (load_s <= target_s + slack_s) & (
            table.num_bytes[near] - table.num_bytes[at] <= table.limit_bytes
        )
        fits &= table.barred[near] == table.barred[at]
        candidates = np.flatnonzero(fits)
        for word, own in zip(self.words, self.words[:, at], strict=True):
            if own:
                candidates = candidates[(word[near][candidates] & own) == own]
        load_s = load_s[candidates]
        candidates = candidates + start
        load_s += table.cut_s[candidates]
        for net in np.flatnonzero(self.partly[:, at]):
            counts = self.counts[net, candidates]
            # `cut_s` counts tensors that are cut at the new set. Of those cut at set `at`, the stage pays for
            # the ones that it has a part of.
            own_part = (counts > self.counts[net, at]).astype(np.float64) - (counts < self.sizes[net])
            load_s += table.cost_s[net] * own_part
        within = load_s <= target_s + slack_s
        return candidates[within], load_s[within]

    def _chain(self, row: int, came: Integers) -> Chain:
        at = len(self) - 1
        steps: list[tuple[int, int]] = []
        while at > 0:
            before, kind = (int(entry) for entry in came[row, at])
            steps.append((at, kind))
            row, at = row - kind, before
        return Chain(self.cut_at([end for end, _ in steps[1:]]), tuple(kind for _, kind in reversed(steps)))

    def cut_at(self, sets: Sequence[int]) -> Integers:
        """Returns the stage of each node where stages 0, 1, .. end with these sets."""
        stage_of: Integers = (~self.member[list(sets)]).sum(axis=0)
        return stage_of


class _Dominating:
    """The sets with one node more that dominate each set: no continuation of theirs costs more."""

    def __init__(self, sets: DownSets) -> None:
        instance = sets.kinds[0].instance
        has = np.ascontiguousarray(sets.member.T)
        bits = _words(np.eye(instance.num_nodes, dtype=bool))
        # Larger sets are looked up by a hash, and then compared in full.
        factors = np.random.default_rng(0).integers(2**64, size=(len(bits), 1), dtype=np.uint64)
        hashes = (sets.words * factors).sum(axis=0)
        by_hash = np.argsort(hashes)
        before: list[list[int]] = [[] for _ in range(instance.num_nodes)]
        for u, v in instance.edges:
            before[v].append(u)
        rounding_s = 1e-12 * float(sets.tables[0].work_s[-1])
        smaller, larger = [], []
        most = max(1, _PAIRS_AT_ONCE // len(sets))
        for start in range(0, instance.num_nodes, most):
            nodes = range(start, min(start + most, instance.num_nodes))
            may_follow = np.stack([~has[node] & has[before[node]].all(axis=0) for node in nodes])
            node, at = np.nonzero(may_follow)
            node += start
            words = sets.words[:, at] | bits[:, node]
            place = np.searchsorted(hashes, (words * factors).sum(axis=0), sorter=by_hash)
            with_it = by_hash[np.minimum(place, len(sets) - 1)]  # another set, where not all are listed
            is_no_worse = (sets.words[:, with_it] == words).all(axis=0)
            for kind, table in zip(sets.kinds, sets.tables, strict=True):
                work_s = kind.instance.work_s[kind.stage, node]
                is_no_worse &= table.cut_s[with_it] <= table.cut_s[at] + work_s + rounding_s
            smaller.append(at[is_no_worse])
            larger.append(with_it[is_no_worse])
        of = np.concatenate(smaller)
        order = np.argsort(of, kind="stable")
        self._larger = np.concatenate(larger)[order]
        self._starts = np.searchsorted(of[order], np.arange(len(sets) + 1))

    def of(self, at: int) -> Integers:
        larger: Integers = self._larger[self._starts[at] : self._starts[at + 1]]
        return larger


def _in_whole_parts(work_s: Floats) -> Integers:
    """Returns work as integers that add up to 2**61.

    The last digit of a sum of floats depends on its order. A set might then seem to have less work than a
    subset which lacks a node of no work.
    """
    total_s = float(work_s.sum())
    return np.round(work_s * (2.0**61 / total_s if total_s > 0 else 0.0)).astype(np.int64)


def _rate(kinds: Sequence[DeviceKind]) -> float:
    """Returns how many seconds of the first kind's work the second kind does in one second, at most."""
    if len(kinds) == 1:
        return 0.0
    first, second = (kind.instance.work_s[kind.stage] for kind in kinds)
    some = first > 0
    if (second[some] == 0).any():
        return np.inf
    return float((first[some] / second[some]).max(initial=0.0))


class _Table:
    """The sums over each down-set, by what one kind of device costs."""

    def __init__(self, kind: DeviceKind, member: Flags, partly: Flags) -> None:
        instance, stage = kind.instance, kind.stage
        self.work_s: Floats = member @ instance.work_s[stage]
        self.num_bytes: Floats = member @ instance.static_bytes[stage]
        self.limit_bytes = float(instance.limit_bytes[stage])
        forbidden = np.zeros(instance.num_nodes) if instance.forbidden is None else instance.forbidden[stage]
        self.barred: Floats = member @ forbidden.astype(np.float64)
        other = 1 if stage == 0 and instance.num_stages > 1 else 0
        self.cost_s: Floats = instance.cost_s[:, stage, other]
        self.cut_s: Floats = self.cost_s @ partly


def down_sets(
    num_nodes: int, edges: Sequence[tuple[int, int]], max_sets: int, deadline: Any = None
) -> list[int] | None:
    """Returns all down-sets as bit masks, or None where there are more than `max_sets`. Nodes are in a
    topological order. Raises OutOfTime."""
    found = down_sets_and_ready(num_nodes, edges, max_sets, deadline)
    return None if found is None else list(found)


def down_sets_and_ready(
    num_nodes: int, edges: Sequence[tuple[int, int]], max_sets: int, deadline: Any = None
) -> dict[int, tuple[int, ...]] | None:
    """Returns the down-sets of `down_sets`, smaller ones first, each with the nodes of which one more makes
    another."""
    before, after = _neighbours(num_nodes, edges)
    if _are_more_than(max_sets, before, after):
        return None
    found: dict[int, tuple[int, ...]] = {}
    level: dict[int, tuple[int, ...]] = {0: tuple(v for v in range(num_nodes) if not before[v])}
    while level:
        if deadline is not None and deadline.left_s == 0:
            raise OutOfTime
        found |= level
        larger: dict[int, tuple[int, ...]] = {}
        for members, ready in level.items():
            for node in ready:
                grown = members | 1 << node
                if grown in larger:
                    continue
                more = [v for v in after[node] if before[v] & ~grown == 0]
                larger[grown] = (*(v for v in ready if v != node), *more)
        level = larger
    return found


def has_few_down_sets(num_nodes: int, edges: Sequence[tuple[int, int]], max_sets: int) -> bool:
    """Returns whether there are at most `max_sets`, which are counted without listing them."""
    return not _are_more_than(max_sets, *_neighbours(num_nodes, edges))


def _neighbours(num_nodes: int, edges: Sequence[tuple[int, int]]) -> tuple[list[int], list[list[int]]]:
    """Returns the nodes right before each node, as a bit mask, and those right after it."""
    before = [0] * num_nodes
    after: list[list[int]] = [[] for _ in range(num_nodes)]
    for u, v in edges:
        assert u < v
        before[v] |= 1 << u
        after[u].append(v)
    return before, after


def _are_more_than(max_sets: int, before: Sequence[int], after: Sequence[Sequence[int]]) -> bool:
    """Counts down-sets without listing them: those of the nodes so far are told apart only by their nodes
    that later ones need. No node makes them fewer, so counting stops soon where there are too many."""
    in_all, counts, needed = 1, {0: 1}, 0
    needed_until = [0] * len(after)  # the nodes that each node is the last to need
    for node, readers in enumerate(after):
        needed_until[max(readers, default=node)] |= 1 << node
    for node, own in enumerate(before):
        needed = (needed | 1 << node) & ~needed_until[node]
        grown: dict[int, int] = {}
        for members, count in counts.items():
            left = members & needed
            grown[left] = grown.get(left, 0) + count
            if own & ~members == 0:
                taken = (members | 1 << node) & needed
                grown[taken] = grown.get(taken, 0) + count
                in_all += count
        if in_all > max_sets:
            return True
        counts = grown
    return in_all > max_sets


def _members(sets: Sequence[int], num_nodes: int) -> Flags:
    num_bytes = (num_nodes + 7) // 8
    raw = b"".join(members.to_bytes(num_bytes, "little") for members in sets)
    packed = np.frombuffer(raw, dtype=np.uint8).reshape(len(sets), num_bytes)
    return np.unpackbits(packed, axis=1, count=num_nodes, bitorder="little").astype(bool)


def _words(member: Flags) -> npt.NDArray[np.uint64]:
    packed = np.packbits(member, axis=1)
    padded = np.zeros((len(packed), -(-packed.shape[1] // 8) * 8), dtype=np.uint8)
    padded[:, : packed.shape[1]] = packed
    return np.ascontiguousarray(padded.view(np.uint64).T)


def _counts(member: Flags, instance: Instance) -> npt.NDArray[np.uint16]:
    counts = np.zeros((len(instance.nets), len(member)), dtype=np.uint16)
    has = np.ascontiguousarray(member.T)
    for at, net in enumerate(instance.nets):
        has[list(net.members)].sum(axis=0, out=counts[at])
    return counts
