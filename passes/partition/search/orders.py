"""Topological orders to cut: those of a graph alone, and others near an assignment that is to be improved.

The best cut of an order (`intervals.py`) takes milliseconds. If the order has an assignment's stages one
after another, its best cut is never slower than that assignment. Within a stage the order of the nodes is
free, and a branch may often move earlier or later as a whole. Each such order offers other cuts.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence

from pd2bw_fx.passes.partition.instance import Instance, Integers

_NUM_MOVED = (0, 0, 0, 1, 2, 4, 8)  # branches that leave their stage; one of these is drawn for each order
_SHORT_MOVE = 1.5  # stages
_SHORT_SHARE = 0.7  # of the moves; the others may go anywhere
_DEPTH_FIRST_SHARE = 0.7  # of the orders; the others have their branches side by side
_STRAYING = (0.1, 0.5, 3.0, 20.0)  # steps that a depth-first order may go back; one of these is drawn


def topological_orders(instance: Instance) -> list[Sequence[int]]:
    """Returns the given order and two others that finish one branch after another, where they differ."""
    given = list(range(instance.num_nodes))
    deep = _depth_first(instance.num_nodes, instance.edges)
    late = _depth_first(instance.num_nodes, [(v, u) for u, v in instance.edges])[::-1]
    return [given, *(order for order in (deep, late) if order != given)]


def _depth_first(num_nodes: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """Returns a topological order that goes on from each node to what it has just made possible."""
    waiting = [0] * num_nodes
    readers: list[list[int]] = [[] for _ in range(num_nodes)]
    for u, v in edges:
        readers[u].append(v)
        waiting[v] += 1
    ready = [node for node in reversed(range(num_nodes)) if waiting[node] == 0]
    order = []
    while ready:
        node = ready.pop()
        order.append(node)
        for reader in sorted(readers[node], reverse=True):
            waiting[reader] -= 1
            if waiting[reader] == 0:
                ready.append(reader)
    return order


class Shuffler:
    """Draws topological orders, the same ones in every process. Nodes are numbered in a topological order."""

    def __init__(self, num_nodes: int, edges: Sequence[tuple[int, int]]) -> None:
        self._draw = random.Random(0)
        self._readers: list[list[int]] = [[] for _ in range(num_nodes)]
        self._waiting = [0] * num_nodes
        before: list[list[int]] = [[] for _ in range(num_nodes)]
        for u, v in edges:
            self._readers[u].append(v)
            self._waiting[v] += 1
            before[v].append(u)
        self._branch = list(range(num_nodes))  # the first node of the row that a node is in
        for v, reads in enumerate(before):
            if len(reads) == 1 and len(self._readers[reads[0]]) == 1:
                self._branch[v] = self._branch[reads[0]]
        self._branches = sorted(set(self._branch))

    def order(self, stage_of: Integers) -> list[int]:
        """Returns an order with one stage after another. Within a stage, branches are side by side or one
        after another; some branches are moved to other stages."""
        wanted = self._wanted(stage_of)
        chance = {branch: self._draw.random() for branch in self._branches}
        goes_on = self._draw.random() < _DEPTH_FIRST_SHARE
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
                    if goes_on:  # depth first: what has just become possible comes next
                        place = straying * place - len(order)
                    heapq.heappush(ready, (wanted[reader], place, reader))
        return order

    def _wanted(self, stage_of: Integers) -> list[float]:
        """Returns the stage that each node is wanted on: its own, except for a few branches."""
        draw = self._draw
        last = float(max(stage_of))
        moves: dict[int, float] = {}
        for branch in draw.choices(self._branches, k=draw.choice(_NUM_MOVED)):
            far = _SHORT_MOVE if draw.random() < _SHORT_SHARE else last
            moves[branch] = draw.uniform(-far, far)
        at = [float(stage) for stage in stage_of]
        return [place + moves.get(branch, 0.0) for place, branch in zip(at, self._branch, strict=True)]
