"""Topological orders to cut: of a graph by itself, and near an assignment that is to become better.

To cut an order best (`intervals.py`) takes milliseconds. Where it has an assignment's stages one after the
other the outcome is never worse than that. In which order a stage holds its nodes is free, and a branch may
often go earlier or later as a whole: each such order offers other cuts.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence

import networkx as nx

from pd2bw_fx.passes.partition.instance import Instance, Integers

_MOVED = (0, 0, 0, 1, 2, 4, 8)  # branches that leave their stage, in orders that come by turns
_ONE_STAGE = 1.5
_NEAR = 0.7  # of the branches that move, those that move by about a stage
_IN_DEPTH = 0.7  # of the orders
_STRAYING = (0.1, 0.5, 3.0, 20.0)  # steps that an order in depth may go back for another branch


def topological_orders(instance: Instance) -> list[Sequence[int]]:
    """The given order, and where it is not the only one, one branch after the other in two ways."""
    given = list(range(instance.num_nodes))
    graph = nx.DiGraph(instance.edges)
    graph.add_nodes_from(given)
    deep = _depth_first(graph)
    late = _depth_first(graph.reverse(copy=False))[::-1]
    return [given, *(order for order in (deep, late) if order != given)]


def _depth_first(graph: nx.DiGraph) -> list[int]:
    """Topological, and from each node on to what has just become possible."""
    waiting = dict(graph.in_degree())
    ready = sorted((node for node, count in waiting.items() if count == 0), reverse=True)
    order = []
    while ready:
        node = ready.pop()
        order.append(node)
        for reader in sorted(graph.successors(node), reverse=True):
            waiting[reader] -= 1
            if waiting[reader] == 0:
                ready.append(reader)
    return order


class Shuffler:
    """Draws topological orders; the same ones in every process. Nodes of a graph are in such an order."""

    def __init__(self, num_nodes: int, edges: Sequence[tuple[int, int]]) -> None:
        self._draw = random.Random(0)
        self._readers: list[list[int]] = [[] for _ in range(num_nodes)]
        self._waiting = [0] * num_nodes
        before: list[list[int]] = [[] for _ in range(num_nodes)]
        for u, v in edges:
            self._readers[u].append(v)
            self._waiting[v] += 1
            before[v].append(u)
        self._branch = list(range(num_nodes))  # of a row of nodes that alone follow one another: its first
        for v, reads in enumerate(before):
            if len(reads) == 1 and len(self._readers[reads[0]]) == 1:
                self._branch[v] = self._branch[reads[0]]
        self._branches = sorted(set(self._branch))

    def order(self, stage_of: Integers) -> list[int]:
        """Stage by stage, branches side by side or each on to its end; now and then some leave theirs."""
        wanted = self._wanted(stage_of)
        chance = {branch: self._draw.random() for branch in self._branches}
        goes_on = self._draw.random() < _IN_DEPTH
        straying = self._draw.choice(_STRAYING)
        waiting = self._waiting.copy()
        ready = [(wanted[v], chance[self._branch[v]], v) for v, count in enumerate(waiting) if count == 0]
        heapq.heapify(ready)
        order: list[int] = []
        while ready:
            _, _, node = heapq.heappop(ready)
            order.append(node)
            for reader in self._readers[node]:
                waiting[reader] -= 1
                if waiting[reader] == 0:
                    place = chance[self._branch[reader]]
                    if goes_on:  # what has just become possible comes first
                        place = straying * place - len(order)
                    heapq.heappush(ready, (wanted[reader], place, reader))
        return order

    def _wanted(self, stage_of: Integers) -> list[float]:
        """Where each node is to be, in stages: where it is, but for a few branches."""
        draw = self._draw
        last = float(max(stage_of))
        moves: dict[int, float] = {}
        for branch in draw.choices(self._branches, k=draw.choice(_MOVED)):
            far = _ONE_STAGE if draw.random() < _NEAR else last
            moves[branch] = draw.uniform(-far, far)
        at = [float(stage) for stage in stage_of]
        return [place + moves.get(branch, 0.0) for place, branch in zip(at, self._branch, strict=True)]
