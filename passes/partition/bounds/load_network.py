"""What a device has to do for a set of nodes, as a cut: the least load around a node is a minimum cut.

A node that the device has not lies at the sink, and one that it has is cut off from there, which costs its
work; a tensor that lies on both sides is cut once, whoever of its ends is where.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import networkx as nx

_HOLDING, _REST = "holding", "rest"


class LoadNetwork:
    """Nodes with arcs of their work to the sink, and tensors: two more nodes each where several read it."""

    def __init__(self, work: Mapping[int, float], tensors: Iterable[tuple[tuple[int, ...], float]]) -> None:
        """Tensors come with their ends, in order."""
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
        """The least load of a device with these nodes and without those, and the most it has then."""
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
