"""The load of a device as a cut of a network, so that the least load around a node is a minimum cut.

Nodes that the device has are on the side of the source, all others on that of the sink. Each node has an arc
to the sink with its work as capacity, which is cut if the device has the node. A tensor with ends on both
sides is cut once, whichever of them are where.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import networkx as nx

_HOLDING, _REST = "holding", "rest"


class LoadNetwork:
    """The network. A tensor of three or more ends has two nodes of its own, with one arc between them."""

    def __init__(self, work: Mapping[int, float], tensors: Iterable[tuple[tuple[int, ...], float]]) -> None:
        """Takes tensors as pairs of their ends, in order, and their cost."""
        self._graph = nx.DiGraph()
        for node, amount in work.items():
            self._graph.add_edge(node, _REST, capacity=amount)
        together: dict[tuple[int, ...], float] = {}
        for ends, cost in tensors:
            together[ends] = together.get(ends, 0) + cost
        for ends, cost in together.items():
            if len(ends) == 2:
                self._graph.add_edge(*ends, capacity=cost)
                self._graph.add_edge(*reversed(ends), capacity=cost)
                continue
            self._graph.add_edge(("in", ends), ("out", ends), capacity=cost)
            self._graph.add_edges_from((end, ("in", ends)) for end in ends)
            self._graph.add_edges_from((("out", ends), end) for end in ends)

    def least(self, held: Iterable[int], away: Iterable[int] = ()) -> tuple[float, set[int]]:
        """Returns the least load of a device that has the nodes `held` and not those `away`, and the largest
        set of nodes that it can have at that load. The load is infinite where no device can."""
        graph = self._graph.copy()
        graph.add_edges_from((_HOLDING, node) for node in held)
        graph.add_edges_from(((node, _REST) for node in away), capacity=math.inf)
        try:
            value, (near, _) = nx.minimum_cut(
                graph, _HOLDING, _REST, flow_func=nx.algorithms.flow.boykov_kolmogorov
            )
        except nx.NetworkXUnbounded:
            return math.inf, set()
        return float(value), {node for node in near if isinstance(node, int)}
