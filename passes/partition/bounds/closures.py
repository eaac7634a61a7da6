"""All closures of a graph that keep to some limits, by what they cost beyond the least.

A closure is a set of nodes that has, with each node, all nodes that come before it. If every node has a
price, the closure of least price is a linear program with whole solutions (J. C. Picard, "Maximal closure of
a graph and applications to combinatorial problems", Management Science 22, 1976). With any multipliers
p[a, b] >= 0 of its rows x[a] >= x[b], a closure x has the price

    sum of price[v] x[v]  =  sum of r[v] x[v] + sum of p[a, b] (x[a] - x[b])

where r[v] is the price less the p[v, b] and plus the p[a, v]. So no closure has a lower price than the sum of
all negative r[v]. What it has beyond that is a sum of terms that are never negative, and are known one by one
as nodes are taken or left: r[v] > 0 of a node taken, -r[v] > 0 of a node left, and p[a, b] where a is taken
and b is left. No tolerance of the solver goes into this, because it holds for all multipliers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pd2bw_fx.passes.linear_programs import ClosureProgram
from pd2bw_fx.passes.partition.instance import Flags, Floats, Integers

from .downsets import OutOfTime

_BITS, _ONE = 64, np.uint64(1)  # of a word
_MORE_PARTIAL = 10  # times as many partial closures as whole ones, most of which turn out too dear


@dataclass(frozen=True, slots=True, eq=False)
class Limit:
    """The price of each node, and the most that a closure may cost by these prices."""

    prices: Floats
    at_most: float


@dataclass(frozen=True, slots=True, eq=False)
class Potential:
    """No closure costs less than `least` by the prices of a limit, and the limit leaves `room` beyond that.

    A node costs `taken` or `left` of the room, and an arc `crossed` where it leads out of the closure.
    """

    least: float
    room: float
    taken: Floats
    left: Floats
    crossed: Floats


class Closures:
    """The closures of a graph with nodes in a topological order and `arcs` (arcs, 2), that keep to `limits`.

    A closure that has all nodes before a node of `follows` has that node too.
    """

    def __init__(self, num_nodes: int, arcs: Integers, follows: Flags, limits: Sequence[Limit]) -> None:
        self._num_nodes = num_nodes
        self._arcs = arcs
        self._follows = follows
        self._limits = limits
        self._arcs_to: list[list[int]] = [[] for _ in range(num_nodes)]
        for number, to in enumerate(arcs[:, 1].tolist()):
            self._arcs_to[to].append(number)

    def potentials(self) -> list[Potential]:
        """Returns a potential for each limit, for closures that keep to the others."""
        return [self._prices(at).potential() for at in range(len(self._limits))]

    def least(self, prices: Floats) -> float:
        """Returns a lower bound on the price of all closures that keep to the limits, by other prices."""
        return _Prices(self._arcs, Limit(prices, 0.0), self._limits).potential().least

    def _prices(self, number: int) -> _Prices:
        others = [*self._limits[:number], *self._limits[number + 1 :]]
        return _Prices(self._arcs, self._limits[number], others)

    def refuted(self, nodes: Integers, before: Flags, deadline: Any) -> tuple[Integers, Integers]:
        """Returns which of the `nodes` no closure takes, and which ones none leaves, by the first limit.

        `before[b, a]` says that a comes before b, by their places in `nodes`. A closure that takes a node
        takes all nodes before it. So where one node is refuted all behind it are, and where it is not, those
        before it are not either: each program settles many nodes. Raises OutOfTime.
        """
        prices = self._prices(0)

        def never_with(value: float) -> Callable[[int], bool]:
            return lambda at: prices.is_refuted(int(nodes[at]), value)

        never = _settled(before, never_with(1.0), deadline)
        always = _settled(before.T, never_with(0.0), deadline)
        return nodes[never], nodes[always]

    def least_with(self, nodes: Integers) -> Floats:
        """Returns what closures that leave each node, and that take it, cost at least by the first limit."""
        prices = self._prices(0)
        return np.array([[prices.least_with(node, value) for value in (0.0, 1.0)] for node in nodes.tolist()])

    def within(
        self, potentials: Sequence[Potential], most: int, deadline: Any, *, or_the_best: bool
    ) -> tuple[Flags, bool]:
        """Returns closures (closures, nodes) that keep to all limits, and whether these are all of them.

        Nodes are taken or left one after another. With `or_the_best` at most `most` partial closures are
        continued, those that cost least beyond the first potential. Without it none is returned where there
        are more than `most`, or far more partial ones on the way. Raises OutOfTime.
        """
        # All of it is copied at every node, so a node is a bit: (words, closures).
        taken = np.zeros((1 + self._num_nodes // _BITS, 1), dtype=np.uint64)
        beyond = np.zeros((len(potentials), 1))
        rooms = np.array([[potential.room] for potential in potentials])
        crossed = np.array([potential.crossed for potential in potentials])
        are_all = True
        for node in range(self._num_nodes):
            if deadline.left_s == 0:
                raise OutOfTime
            arcs = self._arcs_to[node]
            word, bit = np.divmod(self._arcs[arcs, 0], _BITS)
            before = taken[word] & (_ONE << bit.astype(np.uint64))[:, None] != 0  # (arcs, closures)
            can_take: Flags = np.logical_and.reduce(before, axis=0)
            with_it = np.flatnonzero(can_take)
            without = np.flatnonzero(~can_take) if self._follows[node] else np.arange(len(can_take))
            taking = np.array([[potential.taken[node]] for potential in potentials])
            leaving = np.array([[potential.left[node]] for potential in potentials])
            leaving = leaving + crossed[:, arcs] @ before[:, without].astype(np.float64)
            grown = np.concatenate((beyond[:, with_it] + taking, beyond[:, without] + leaving), axis=1)
            kept = np.flatnonzero((grown <= rooms).all(axis=0))
            is_last = node == self._num_nodes - 1
            if len(kept) > most * (1 if or_the_best or is_last else _MORE_PARTIAL):
                are_all = False
                if not or_the_best:
                    return np.zeros((0, self._num_nodes), dtype=bool), False
                kept = np.sort(kept[np.argsort(grown[0, kept], kind="stable")[:most]])
            came = np.concatenate((with_it, without))[kept]
            taken, beyond = taken[:, came], grown[:, kept]
            taken[node // _BITS, kept < len(with_it)] |= _ONE << np.uint64(node % _BITS)
        as_bytes = np.ascontiguousarray(taken.T, dtype="<u8").view(np.uint8)
        flags = np.unpackbits(as_bytes, axis=1, count=self._num_nodes, bitorder="little").astype(bool)
        return flags, are_all


def _settled(onwards: Flags, is_refuted: Callable[[int], bool], deadline: Any) -> Flags:
    """Returns which nodes are refuted. With a node all nodes v are for which `onwards[v, node]`."""
    refuted = np.zeros(len(onwards), dtype=bool)
    is_open = np.ones(len(onwards), dtype=bool)
    while is_open.any():
        if deadline.left_s == 0:
            raise OutOfTime
        nodes = np.flatnonzero(is_open)
        among = onwards[np.ix_(nodes, nodes)]
        at = int(nodes[np.minimum(among.sum(axis=0), among.sum(axis=1)).argmax()])
        if is_refuted(at):
            settled = onwards[:, at] & is_open
            refuted |= settled
            refuted[at] = True
        else:
            settled = onwards[at] & is_open
        is_open &= ~settled
        is_open[at] = False
    return refuted


class _Prices:
    """Bounds on the price of closures that keep to limits by other prices."""

    def __init__(self, arcs: Integers, limit: Limit, others: Sequence[Limit]) -> None:
        self._arcs = arcs
        self._limit = limit
        self._others = others
        limits = [(other.prices, other.at_most) for other in others]
        self._program = ClosureProgram(limit.prices, arcs, limits)

    def potential(self) -> Potential:
        reduced, multipliers, allowed = self._reduced()
        least = float(np.minimum(reduced, 0.0).sum()) - allowed
        taken, left = np.maximum(reduced, 0.0), np.maximum(-reduced, 0.0)
        return Potential(least, self._limit.at_most - least, taken, left, multipliers)

    def is_refuted(self, node: int, value: float) -> bool:
        """Returns whether no closure within the limits has this node (value 1), or is without it (0)."""
        return self.least_with(node, value) > self._limit.at_most

    def least_with(self, node: int, value: float) -> float:
        self._program.fix(node, value, value)
        reduced, _, allowed = self._reduced()
        self._program.fix(node, 0.0, 1.0)
        own = float(reduced[node])
        least = float(np.minimum(reduced, 0.0).sum()) - min(own, 0.0) + value * own
        return least - allowed

    def _reduced(self) -> tuple[Floats, Floats, float]:
        """Returns the r[v] of the module's docstring with the other limits' multipliers in the prices, the
        multipliers of arcs, and what the other limits allow by theirs."""
        multipliers, factors = self._program.multipliers()
        reduced, allowed = self._limit.prices.copy(), 0.0
        for factor, other in zip(factors.tolist(), self._others, strict=True):
            reduced += factor * other.prices
            allowed += factor * other.at_most
        np.subtract.at(reduced, self._arcs[:, 0], multipliers)
        np.add.at(reduced, self._arcs[:, 1], multipliers)
        return reduced, multipliers, allowed
