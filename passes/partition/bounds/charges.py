"""What the tensors of an assignment cost at least, as prices of the nodes that each of its cuts has.

Let D[j] be what devices 1..j have together, x[i, v] = 1 where device i has node v, and cut[j] = 1 where D[j]
has the first member of a tensor and not its last. The tensor costs c for each device that has a part of it.
Of all assignments these are true, with s[i] = 1 where device i has a part and another device has one too:

    s[i]           >=  x[i, a] - x[i, b]            for any two members a and b
    sum of s[i]    >=  2 z                          z = 1 where it is cut at all: z >= cut[j]
    sum of s[i]    >=  z + sum of cut[j] / n        fewer than n devices without a part in a row

The least sum of c s[i] over all tensors, for fractions of nodes too and within the limits of each cut, is a
linear program. Any multipliers of its rows, scaled so that those of a tensor add up to c at most, turn the
rows into one price for each node and cut, so that no assignment pays less for its tensors than the sum of
these prices: no tolerance of the solver goes into that. The program says which multipliers make the sum
large. A tensor that may be cut at several places is charged where it is likely to be.

Devices 1..j alone pay at least the terms of their own rows, and once for a tensor that is cut at j: D[j] is
charged once there, less what the cuts before it are charged. The devices behind a cut likewise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pd2bw_fx.passes.linear_programs import RowProgram
from pd2bw_fx.passes.partition.instance import Flags, Floats, Integers

from .closures import Limit
from .cut_graph import CutGraph

_SLACK = 1e-9  # of the works that say how many devices in a row can be without a part


@dataclass(frozen=True, slots=True, eq=False)
class Charges:
    """Prices (cuts, nodes) of D[0] .. D[k].

    No assignment pays less for its tensors than the sum of `in_all` over the nodes of all cuts. Devices 1..j
    pay no less than the sum of `before` for the nodes of D[j] and of `in_all` for the cuts before it. The
    devices behind pay no less than that of `behind`, and of `in_all` for the cuts behind it.
    """

    in_all: Floats
    before: Floats
    behind: Floats

    @classmethod
    def plain(cls, graph: CutGraph, num_stages: int) -> Charges:
        """Charges a cut for its tensors on either side, and knows nothing of other cuts."""
        once = np.repeat(graph.of_tensors(graph.cost_s)[None], num_stages + 1, axis=0)
        return cls(np.zeros_like(once), once, once)


def charges_within(
    graph: CutGraph,
    can: Flags,
    must: Flags,
    limits: Sequence[Sequence[Limit]],
    target_s: float,
    time_limit_s: float,
) -> Charges:
    """Returns charges that are high for what each cut `can` and `must` have, within its `limits`."""
    return _Program(graph, can, must, limits, target_s).charges(time_limit_s)


class _Pairs(NamedTuple):
    """Rows s[i] >= x[i, a] - x[i, b] of a device i: tensors, nodes a and b, and where the multipliers are."""

    net: Integers
    a: Integers
    b: Integers
    rows: slice


class _Program:
    """The linear program, with columns for D[j] (cuts, nodes), s (devices, tensors) and z (tensors).

    A tensor of two members has no s: it costs 2 z.
    """

    def __init__(
        self, graph: CutGraph, can: Flags, must: Flags, limits: Sequence[Sequence[Limit]], target_s: float
    ) -> None:
        self._graph = graph
        self._k = k = len(can) - 1
        self._can, self._must = can, must
        num_nets = len(graph.nets)
        self._wide = np.flatnonzero([len(net) > 2 for net in graph.nets])
        self._steps = self._most_in_a_row(target_s)
        self._first_s = can.size
        self._first_z = can.size + k * num_nets
        costs = np.zeros(self._first_z + num_nets)
        costs[self._first_z :] = 2 * graph.cost_s
        costs[self._first_z + self._wide] = 0.0
        costs[self._s(np.arange(1, k + 1)[:, None], self._wide)] = graph.cost_s[self._wide]
        ones = np.ones(len(costs) - can.size)
        upper, lower = np.concatenate((can.ravel(), ones)), np.concatenate((must.ravel(), 0 * ones))
        self._program = RowProgram(costs, lower, upper)
        for j in range(1, k):
            self._add_closure(j, limits[j])
        self._nested = [self._add_nested(j) for j in range(1, k - 1)]
        self._cut = [self._add_cut(j) for j in range(1, k)]
        pairs = self._pairs()
        self._of_devices = [self._add_device(i, pairs) for i in range(1, k + 1)]
        devices = [(self._s(i, self._wide), 1.0) for i in range(1, k + 1)]
        self._twice = self._program.add(*devices, (self._z(self._wide), -2.0))
        share = 1 / self._steps[self._wide]
        cuts = [
            (self._y(j, of[self._wide]), sign * share)
            for j in range(1, k)
            for of, sign in ((graph.first, -1), (graph.last, 1))
        ]
        self._in_a_row = self._program.add(*devices, (self._z(self._wide), -1.0), *cuts)

    def _y(self, j: int, node: Integers) -> Integers:
        return j * self._graph.size + node

    def _s(self, i: int | Integers, net: Integers) -> Integers:
        return self._first_s + (i - 1) * len(self._graph.nets) + net

    def _z(self, net: Integers) -> Integers:
        return self._first_z + net

    def _most_in_a_row(self, target_s: float) -> Floats:
        """Returns n for each tensor: from one device with a part to the next are at most n steps.

        A device that is passed has only work beside the tensor, and no less work than W - (k - 1) T.
        """
        graph, k = self._graph, self._k
        places = (self._can[1:k, graph.first] & ~self._must[1:k, graph.last]).sum(axis=0)
        least_s = graph.total_s - (k - 1) * target_s
        steps = np.full(len(places), float(k))
        if least_s > 0:
            steps = 1 + np.floor(np.minimum(graph.beside_s / least_s * (1 + _SLACK), k))
        most: Floats = np.maximum(np.minimum(steps, places), 1)
        return most

    def _add_closure(self, j: int, limits: Sequence[Limit]) -> None:
        a, b = self._graph.arcs[
            self._can[j, self._graph.arcs[:, 1]] & ~self._must[j, self._graph.arcs[:, 0]]
        ].T
        self._program.add((self._y(j, a), 1.0), (self._y(j, b), -1.0))
        for limit in limits:
            used = np.flatnonzero(limit.prices)
            self._program.limit(self._y(j, used), limit.prices[used], limit.at_most)

    def _add_nested(self, j: int) -> tuple[Integers, slice]:
        nodes = np.flatnonzero(self._can[j] & ~self._must[j + 1])
        return nodes, self._program.add((self._y(j + 1, nodes), 1.0), (self._y(j, nodes), -1.0))

    def _add_cut(self, j: int) -> tuple[Integers, slice]:
        first, last = self._graph.first, self._graph.last
        nets = np.flatnonzero(self._can[j, first] & ~self._must[j, last])
        taken, left = self._y(j, first[nets]), self._y(j, last[nets])
        return nets, self._program.add((self._z(nets), 1.0), (taken, -1.0), (left, 1.0))

    def _pairs(self) -> Integers:
        """Returns the tensor, a and b of each pair that is asked about: one is the first or last member."""
        pairs = []
        for net in self._wide.tolist():
            members = self._graph.nets[net]
            ends = [(a, b) for a in members for b in (members[0], members[-1]) if a != b]
            pairs += [(net, *pair) for a, b in sorted(set(ends)) for pair in ((a, b), (b, a))]
        rows = np.array(sorted(set(pairs)), dtype=np.int64).reshape(-1, 3)
        return np.column_stack((rows[:, :1], self._graph.node[rows[:, 1:]]))

    def _add_device(self, i: int, pairs: Integers) -> _Pairs:
        net, a, b = pairs[self._can[i, pairs[:, 1]] & ~self._must[i - 1, pairs[:, 1]]].T
        rows = self._program.add(
            (self._s(i, net), 1.0),
            (self._y(i, a), -1.0),
            (self._y(i - 1, a), 1.0),
            (self._y(i, b), 1.0),
            (self._y(i - 1, b), -1.0),
        )
        return _Pairs(net, a, b, rows)

    def charges(self, time_limit_s: float) -> Charges:
        graph, k, found = self._graph, self._k, self._program.multipliers(time_limit_s)
        num_nets, c = len(graph.nets), graph.cost_s
        twice, in_a_row = c.copy(), np.zeros(num_nets)
        twice[self._wide], in_a_row[self._wide] = found[self._twice], found[self._in_a_row]
        of_devices = np.array([np.bincount(p.net, found[p.rows], num_nets) for p in self._of_devices])
        scale = _at_most(c, of_devices.max(axis=0) + twice + in_a_row)
        twice, in_a_row = twice * scale, in_a_row * scale
        left = np.maximum(c - of_devices.max(axis=0) * scale - twice - in_a_row, 0.0)

        of_cuts = np.zeros((k + 1, num_nets))
        for j, (nets, rows) in enumerate(self._cut, start=1):
            of_cuts[j, nets] = found[rows]
        of_cuts *= _at_most(2 * twice + in_a_row, of_cuts.sum(axis=0))
        up_to = np.cumsum(of_cuts, axis=0)
        in_a_row_s = in_a_row / self._steps
        in_all = np.array([graph.of_tensors(of + in_a_row_s) for of in of_cuts])
        once = twice + left + in_a_row_s
        before = np.array([graph.of_tensors(once - of) for of in up_to - of_cuts])
        behind = np.array([graph.of_tensors(once - of) for of in up_to[-1] - up_to])

        # What device i pays for the nodes of D[i], and gets back for those of D[i - 1].
        by_device = np.zeros((k + 2, graph.size))
        for i, pairs in enumerate(self._of_devices, start=1):
            price = found[pairs.rows] * scale[pairs.net]
            np.add.at(by_device[i], pairs.a, price)
            np.subtract.at(by_device[i], pairs.b, price)
        for j, (nodes, rows) in enumerate(self._nested, start=1):
            by_device[j + 1, nodes] -= found[rows]  # D[j + 1] less D[j] is never negative
        before[1:k] += by_device[1:k]
        behind[1:k] -= by_device[2 : k + 1]
        in_all[1:k] += by_device[1:k] - by_device[2 : k + 1]
        return Charges(in_all, before, behind)


def _at_most(limit: Floats, amount: Floats) -> Floats:
    """Returns factors that bring amounts down to a limit."""
    return np.where(amount > limit, limit / np.where(amount > 0, amount, 1.0), 1.0)
