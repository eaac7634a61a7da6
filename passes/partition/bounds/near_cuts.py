"""The down-sets at which an assignment within a target can be cut, where a graph has too many to list all.

For k devices that are alike, let D[j] be what devices 1..j have together. An assignment within the target T
keeps to these limits, with the work w and what its tensors cost:

    work and transfers of devices 1..j       w(D[j]) + before(D[j]) + least before it  <=  j T
    of those behind them                 W - w(D[j]) + behind(D[j]) + least behind it  <=  (k - j) T
    of all devices                           W + in_all(D[j]) + least of other cuts    <=  k T

`before`, `behind` and `in_all` are prices of the nodes that D[j] has, which no assignment goes below
(`charges.py`), and the least of another cut is by its own prices. The nearer T is to a bound, the less room
is left, and the fewer sets have so little work and cost beyond the least. So a bound, and often the optimum,
can be proven from below where the graph has billions of down-sets.

For each cut, linear programs say which nodes its down-set must have and cannot have (`closures.py`): first by
the prices of their solutions, then by trying single nodes. This makes the least costs of all cuts larger, and
with them the room smaller, and so on. Where nodes have been settled, new prices may charge more. Then the
down-sets that are left are listed, at the ends of the pipeline first, where there are fewest. What all listed
sets have in common narrows the other cuts, and what the cheapest of them costs is the least.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np

from pd2bw_fx.passes.partition.instance import Flags, Floats, Instance, Integers

from .charges import Charges, charges_within
from .closures import Closures, Limit
from .cut_graph import CutGraph
from .downsets import OutOfTime

_SLACK = 1e-9  # of the limits: rounding never excludes what fits exactly
_ROUNDS = 12
_SETTLED = 0.05  # of the open nodes: after so many new charges are looked for
_WORTH_A_ROUND = 0.1  # of the open nodes: a round that settles less is the last
_PLACES = 3  # the cuts with the most open nodes: where a node to branch on is looked for
_NODES = 8  # of a cut, that are tried for it
_OF_THE_DEARER = 1 / 6  # of how much dearer a node makes the other half
_WORTHWHILE = 0.02  # a round that raises costs by less, and settles less of the open nodes, is the last


def applies_to(instance: Instance) -> bool:
    """Returns whether all devices are alike and pay once for each tensor that they have a part of."""
    return (
        instance.num_stages > 1
        and instance.may_be_empty
        and not instance.per_destination
        and not instance.overlap
        and bool((instance.work_s == instance.work_s[0]).all())
        and bool((instance.cost_s == instance.cost_s[:, :1, :1]).all())
        and bool((instance.limit_bytes == instance.limit_bytes[0]).all())
        and instance.fixed_s is None
    )


@dataclass(frozen=True, slots=True, eq=False)
class Listed:
    """Down-sets by their members (sets, nodes), the empty and the full one among them, and whether these are
    all that an assignment within the target can be cut at."""

    member: Flags
    are_all: bool


class NearCuts:
    """The cuts of all assignments to `num_stages` devices within a target.

    `can` and `must` say which nodes each of the sets D[0] .. D[k] can and must have.
    """

    def __init__(self, graph: CutGraph, num_stages: int, target_s: float) -> None:
        self._graph = graph
        self._k = k = num_stages
        self._target_s = target_s
        self._can = np.ones((k + 1, graph.size), dtype=bool)
        self._must = np.zeros((k + 1, graph.size), dtype=bool)
        self._can[0], self._must[k] = False, True
        self._least_s = np.zeros(k + 1)  # that a cut adds to all devices together, beyond their work
        self._is_refuted = False
        self._is_near = False
        self._charges = Charges.plain(graph, k)
        self._open_when_charged = np.inf
        self._listed: dict[int, Flags] = {}  # all down-sets of a cut, by the nodes of the graph
        for j in range(1, k):
            self._can[j, graph.node] = graph.up_to_s <= j * target_s * (1 + _SLACK)
            self._must[j, graph.node] = graph.from_on_s > (k - j) * target_s * (1 + _SLACK)
        self._close()

    def keep_near(self, stage_of: Integers, radius_s: float) -> None:
        """Leaves the cuts of an assignment and those near it: on the way from its cut to a node that may be
        on the other side is at most so much work. What is listed then is not all that there is."""
        self._is_near = True
        graph, work_s = self._graph, self._graph.work_s[self._graph.node]
        for j in range(1, self._k):
            within = stage_of < j
            entering = ~within & (graph.reach.up_to(work_s * ~within) <= radius_s)
            leaving = within & (graph.reach.from_on(work_s * within) <= radius_s)
            self._can[j, graph.node] &= within | entering
            self._must[j, graph.node] |= within & ~leaving
        self._close()

    @property
    def num_open(self) -> int:
        """The nodes of all cuts that may be on either side."""
        return int((self._can & ~self._must).sum())

    def is_refuted(self, deadline: Any) -> bool:
        """Narrows the cuts by prices, until little changes, and returns whether none is left at some place.

        Raises OutOfTime.
        """
        for _ in range(_ROUNDS):
            if deadline.left_s == 0:
                raise OutOfTime
            num_open = self.num_open
            self._charge(deadline)
            for j in range(1, self._k):
                if not self._is_refuted:
                    self._bound(j)
            self._close()
            if self._is_refuted or self.num_open > (1 - _WORTH_A_ROUND) * num_open:
                break
        return self._is_refuted

    def halves(self) -> tuple[NearCuts, NearCuts]:
        """Returns the cuts without a node at one place, and those with it. The node makes both cost more."""
        num_open = (self._can & ~self._must).sum(axis=1)
        best = -1.0, 0, 0
        for j in np.argsort(-num_open, kind="stable")[:_PLACES].tolist():
            if num_open[j]:
                best = max(best, self._dearest(j), key=lambda one: one[0])
        _, j, node = best
        without, with_it = self._copy(), self._copy()
        without._can[j, node] = False
        with_it._must[j, node] = True
        for half in (without, with_it):
            half._close()
        return without, with_it

    def _dearest(self, j: int) -> tuple[float, int, int]:
        """Returns how much dearer a node makes the cut either way, and cut and node."""
        cut = _Cut(self._graph, self._can[j], self._must[j], self._limits(j))
        own, nodes = cut.nodes_of_instance()
        if len(own) == 0:  # only the first or last member of a tensor is open
            return 0.0, j, int(cut.open[0])
        among = self._graph.reach.among(own)
        before, behind = among.sum(axis=0), among.sum(axis=1)
        order = np.lexsort((-np.maximum(before, behind), -np.minimum(before, behind)))
        nodes = nodes[order[:_NODES]]
        cheapest = cut.potentials[0]
        dearer = np.clip(cut.closures.least_with(nodes) - cheapest.least, 0.0, cheapest.room)
        scores = dearer.min(axis=1) + _OF_THE_DEARER * dearer.max(axis=1)
        at = int(scores.argmax())
        return float(scores[at]), j, int(cut.open[nodes[at]])

    def _copy(self) -> NearCuts:
        other = copy.copy(self)
        other._can, other._must, other._least_s = self._can.copy(), self._must.copy(), self._least_s.copy()
        other._listed = {}
        return other

    def listed(self, most: int, deadline: Any) -> Listed | None:
        """Lists the cuts, or returns None, which proves that there are none.

        Where one place has more than `most`, nothing is listed, or near an assignment the cheapest ones are.
        Raises OutOfTime.
        """
        if not self._is_near:
            self._try_nodes(deadline)
        found, are_all = [], True
        stages = range(1, self._k)
        inwards = dict.fromkeys(j for pair in zip(stages, reversed(stages), strict=True) for j in pair)
        for j in inwards:
            self._charge(deadline)
            self._bound(j)  # narrows the cut, so that fewer nodes are open below
            self._close()
            cut = None if self._is_refuted else self._bound(j)
            if cut is None or self._is_refuted:
                return None
            taken, is_complete = cut.closures.within(
                cut.potentials, most, deadline, or_the_best=self._is_near
            )
            if not is_complete and not self._is_near:
                return Listed(np.zeros((0, len(self._graph.node)), dtype=bool), are_all=False)
            sets = np.repeat(cut.must[None], len(taken), axis=0)
            sets[:, cut.open] = taken
            found.append(sets[:, self._graph.node])
            are_all &= is_complete
            if is_complete:
                self._listed[j] = sets
                self._least_s[j] = max(self._least_s[j], self._cheapest_s(j, self._charges))
                self._can[j] &= sets.any(axis=0)
                self._must[j] |= sets.all(axis=0)
                self._is_refuted |= len(sets) == 0
                self._close()
            if self._is_refuted:
                return None
        ends = self._can[:1, self._graph.node], self._must[-1:, self._graph.node]
        return Listed(_distinct(np.concatenate((*ends, *found))), are_all)

    def _try_nodes(self, deadline: Any) -> None:
        for _ in range(_ROUNDS):
            num_open, least_s = int((self._can & ~self._must).sum()), float(self._least_s.sum())
            self._charge(deadline)
            for j in range(1, self._k):
                if not self._is_refuted:
                    self._try_nodes_of(j, deadline)
            self._close()
            if self._is_refuted:
                return
            is_settling = (self._can & ~self._must).sum() < (1 - _WORTHWHILE) * num_open
            if not is_settling and self._least_s.sum() < (1 + _WORTHWHILE) * least_s:
                return

    def _try_nodes_of(self, j: int, deadline: Any) -> None:
        cut = self._bound(j)
        if self._is_refuted:
            return
        own, nodes = cut.nodes_of_instance()
        never, always = cut.closures.refuted(nodes, self._graph.reach.among(own), deadline)
        self._can[j, cut.open[never]] = False
        self._must[j, cut.open[always]] = True

    def _bound(self, j: int) -> _Cut:
        """Raises the least costs of one cut, and narrows what it can and must have."""
        cut = _Cut(self._graph, self._can[j], self._must[j], self._limits(j))
        for potential in cut.potentials:
            self._can[j, cut.open[potential.taken > potential.room]] = False
            self._must[j, cut.open[potential.left > potential.room]] = True
            self._is_refuted |= potential.room < 0
        self._least_s[j] = max(self._least_s[j], cut.least(self._charges.in_all[j]))
        return cut

    def _charge(self, deadline: Any) -> None:
        """Looks for prices by which the cuts cost more, where enough nodes were settled since the last."""
        num_open = int((self._can & ~self._must).sum())
        if num_open == 0 or num_open > (1 - _SETTLED) * self._open_when_charged:
            return
        self._open_when_charged = num_open
        limits = [self._limits(j)[1:] if j else [] for j in range(self._k)]
        left_s = float(deadline.left_s)
        found = charges_within(self._graph, self._can, self._must, limits, self._target_s, left_s)
        least_s = np.zeros(self._k + 1)
        for j in range(1, self._k):
            here = [Limit(found.in_all[j], np.inf), *limits[j]]
            cut = _Cut(self._graph, self._can[j], self._must[j], here)
            least_s[j] = max(cut.least(found.in_all[j]), self._cheapest_s(j, found))
        if least_s.sum() > self._least_s.sum():
            self._charges, self._least_s = found, least_s

    def _cheapest_s(self, j: int, charges: Charges) -> float:
        """Returns the least of what the listed sets of a cut cost, where all of them are listed."""
        sets = self._listed.get(j, ())
        return float((sets @ charges.in_all[j]).min()) - _SLACK * self._target_s if len(sets) else -np.inf

    def _limits(self, j: int) -> list[Limit]:
        graph, k, target_s = self._graph, self._k, self._target_s
        slack_s = k * target_s * _SLACK
        charges, least_s = self._charges, self._least_s
        others_s = least_s.sum() - least_s[j]
        before_s, behind_s = least_s[:j].sum(), least_s[j + 1 :].sum()
        limits = [
            Limit(charges.in_all[j], k * target_s - graph.total_s - others_s + slack_s),
            Limit(charges.before[j] + graph.work_s, j * target_s - before_s + slack_s),
            Limit(charges.behind[j] - graph.work_s, (k - j) * target_s - behind_s - graph.total_s + slack_s),
        ]
        num_bytes, limit = float(graph.num_bytes.sum()), graph.limit_bytes * (1 + _SLACK)
        if num_bytes > limit:
            limits += [
                Limit(graph.num_bytes, j * limit),
                Limit(-graph.num_bytes, (k - j) * limit - num_bytes),
            ]
        return limits

    def _close(self) -> None:
        self._graph.close(self._can, self._must)
        np.logical_or.accumulate(self._must, axis=0, out=self._must)
        np.logical_and.accumulate(self._can[::-1], axis=0, out=self._can[::-1])
        self._is_refuted |= bool((self._must & ~self._can).any())


def _distinct(member: Flags) -> Flags:
    rows = dict.fromkeys(row.tobytes() for row in np.packbits(member, axis=1))
    packed = np.frombuffer(b"".join(rows), dtype=np.uint8).reshape(len(rows), -1)
    return np.unpackbits(packed, axis=1, count=member.shape[1]).astype(bool)


class _Cut:
    """One cut: the closures of the nodes that are open, with what the others cost taken off the limits."""

    def __init__(self, graph: CutGraph, can: Flags, must: Flags, limits: list[Limit]) -> None:
        self.must = must.copy()
        self.open = np.flatnonzero(can & ~must)
        number = np.full(graph.size, -1)
        number[self.open] = np.arange(len(self.open))
        self._number_of_node = number[graph.node]
        arcs = number[graph.arcs]
        arcs = arcs[(arcs >= 0).all(axis=1)]
        here = [
            Limit(limit.prices[self.open], limit.at_most - float(limit.prices[must].sum()))
            for limit in limits
        ]
        self.closures = Closures(len(self.open), arcs, graph.follows[self.open], here)
        self.potentials = self.closures.potentials()

    def nodes_of_instance(self) -> tuple[Integers, Integers]:
        """Returns the instance's nodes that are open, and their places among all open nodes."""
        own = np.flatnonzero(self._number_of_node >= 0)
        return own, self._number_of_node[own]

    def least(self, prices: Floats) -> float:
        """Returns what the down-set costs at least, by the prices of the first limit."""
        return float(prices[self.must].sum()) + self.potentials[0].least
