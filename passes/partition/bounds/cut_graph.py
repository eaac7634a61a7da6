"""The down-sets of an instance as closures whose price is the cost of the tensors that they cut.

A tensor is cut where its first member is taken and its last one is left. Mostly one member comes before all
others, and one behind them. Where none does, the graph has a node more for it: one that comes before all
members, or one that comes behind them all and follows at once. Then every sum of costs of cut tensors is a
sum of prices of nodes, the cost for the first and less the cost for the last.
"""

from __future__ import annotations

import numpy as np

from pd2bw_fx.passes.partition.instance import Flags, Floats

from .downsets import DeviceKind
from .windows import Reach


class CutGraph:
    """The graph for devices of one kind, which pay once for each tensor that they have a part of.

    `node` has the number of each of the instance's nodes here; `first` and `last` those of each tensor.
    """

    def __init__(self, kind: DeviceKind, reach: Reach) -> None:
        instance, stage = kind.instance, kind.stage
        self.kind = kind
        self.reach = reach
        n = instance.num_nodes
        cost_s = instance.cost_s[:, stage, 1 if stage == 0 and instance.num_stages > 1 else 0]
        members = [sorted(set(net.members)) for net in instance.nets]
        paid = [at for at, net in enumerate(members) if len(net) > 1 and cost_s[at] > 0]
        self.nets = [members[at] for at in paid]
        self.cost_s: Floats = cost_s[paid]
        places = [float(node) for node in range(n)]  # in the order of the new numbers
        arcs = list(instance.edges)
        first, last, openers, closers = [], [], [], []
        for net in self.nets:
            first.append(net[0])
            if not all(reach.comes_before(net[0], other) for other in net[1:]):
                first[-1] = len(places)
                openers.append((len(places), net))
                arcs += [(len(places), node) for node in net]
                places.append(net[0] - 0.5)
            last.append(net[-1])
            if not all(reach.comes_before(other, net[-1]) for other in net[:-1]):
                last[-1] = len(places)
                closers.append((len(places), net))
                arcs += [(node, len(places)) for node in net]
                places.append(net[-1] + 0.5)
        self.size = len(places)
        number = np.empty(self.size, dtype=np.int64)
        number[np.argsort(places, kind="stable")] = np.arange(self.size)
        self.node = number[:n]
        self.first, self.last = number[np.array(first, dtype=int)], number[np.array(last, dtype=int)]
        arcs_here = number[np.array(sorted(set(arcs)), dtype=np.int64).reshape(-1, 2)]
        self.arcs = arcs_here[np.argsort(arcs_here[:, 1], kind="stable")]
        self._openers = [(int(number[at]), self.node[net]) for at, net in openers]
        self._closers = [(int(number[at]), self.node[net]) for at, net in closers]
        self.follows = np.zeros(self.size, dtype=bool)
        self.follows[[at for at, _ in self._closers]] = True
        work_s = instance.work_s[stage]
        self.work_s = self.of_nodes(work_s)
        self.total_s = float(work_s.sum())
        self.num_bytes = self.of_nodes(instance.static_bytes[stage])
        self.limit_bytes = float(instance.limit_bytes[stage])
        self.up_to_s, self.from_on_s = reach.up_to(work_s), reach.from_on(work_s)
        # The most work of a set that is between two members of a tensor and has neither.
        self.beside_s = np.array(
            [self.total_s - self.up_to_s[net].min() - self.from_on_s[net].min() for net in self.nets],
            dtype=np.float64,
        )

    def of_nodes(self, amounts: Floats) -> Floats:
        """Returns amounts of the instance's nodes as prices here."""
        prices = np.zeros(self.size)
        prices[self.node] = amounts
        return prices

    def of_tensors(self, amounts: Floats) -> Floats:
        """Returns prices that add up to the amounts of the tensors that are cut."""
        prices = np.zeros(self.size)
        np.add.at(prices, self.first, amounts)
        np.subtract.at(prices, self.last, amounts)
        return prices

    def close(self, can: Flags, must: Flags) -> None:
        """Narrows, for several closures at once, the nodes that each can and must have (closures, nodes)."""
        for at, net in self._openers:
            can[:, at] &= can[:, net].any(axis=1)
            must[:, at] |= must[:, net].any(axis=1)
        for at, net in self._closers:
            can[:, at] &= can[:, net].all(axis=1)
            must[:, at] |= must[:, net].all(axis=1)
        for a, b in self.arcs.tolist():
            can[:, b] &= can[:, a]
        for a, b in reversed(self.arcs.tolist()):
            must[:, a] |= must[:, b]
