"""A forward and a backward that were traced as one joint graph, split into two graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx


@dataclass(frozen=True, slots=True)
class Halves:
    """The nodes of a joint graph, sorted into its forward and its backward."""

    given: dict[fx.Node, str]  # placeholders of the forward's operands, with the names that they get
    gradients: dict[fx.Node, str]  # placeholders of the gradients, with the names that they get
    early: Sequence[fx.Node]  # the other nodes of the forward
    late: Sequence[fx.Node]  # the other nodes of the backward

    def saved(self, wanted: Sequence[fx.Node | None]) -> list[fx.Node]:
        """Returns the tensors of the forward that the backward reads, in the forward's order."""
        read: set[fx.Node] = set()
        waiting = [node for node in wanted if node is not None]
        waiting += [node for node in self.late if node.is_impure()]  # they may write what is wanted
        seen = set(waiting)
        while waiting:
            node = waiting.pop()
            if node in self.gradients:
                continue
            if self._is_of_forward(node) and not _is_size(node):
                read.add(node)
                continue
            for operand in self._operands(node):
                if operand not in seen:
                    seen.add(operand)
                    waiting.append(operand)
        return [node for node in (*self.given, *self.early) if node in read]

    def forward(self, results: Sequence[fx.Node], saved: Sequence[fx.Node]) -> fx.Graph:
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for node, name in self.given.items():
            copies[node] = _placeholder(graph, name, node)
        for node in self.early:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output((tuple(copies[r] for r in results), tuple(copies[s] for s in saved)))
        graph.eliminate_dead_code()
        return graph

    def backward(self, saved: Sequence[fx.Node], wanted: Sequence[fx.Node | None]) -> fx.Graph:
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in saved:
            copies[node] = _placeholder(graph, self.given.get(node, node.name), node)
        for node, name in self.gradients.items():
            copies[node] = _placeholder(graph, name, node)
        for node in (*self.early, *self.late):
            if node in copies or (self._is_of_forward(node) and not _is_size(node)):
                continue
            stands = self._size_elsewhere(node)
            if stands is not None:
                bearer, dimension = stands
                size = graph.call_function(torch.ops.aten.sym_size.int, (copies[bearer], dimension))
                size.meta = dict(node.meta)
                copies[node] = size
            elif all(operand in copies for operand in node.all_input_nodes):
                copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(None if node is None else copies[node] for node in wanted))
        graph.eliminate_dead_code()
        return graph

    def _is_of_forward(self, node: fx.Node) -> bool:
        return node in self.given or node in self.early

    def _operands(self, node: fx.Node) -> list[fx.Node]:
        stands = self._size_elsewhere(node)
        return node.all_input_nodes if stands is None else [stands[0]]

    def _size_elsewhere(self, node: fx.Node) -> tuple[fx.Node, int] | None:
        """Returns a gradient, and its dimension, of the size that `node` reads, so as not to save a tensor.

        None where the node reads no size, or no gradient has it.
        """
        if node.target is not torch.ops.aten.sym_size.int:
            return None
        size = str(node.meta["val"])
        for gradient in self.gradients:
            sizes = [str(extent) for extent in gradient.meta["val"].shape]
            if size in sizes:
                return gradient, sizes.index(size)
        return None


def _placeholder(graph: fx.Graph, name: str, like: fx.Node) -> fx.Node:
    node = graph.placeholder(name)
    node.meta = {"val": like.meta["val"]}
    return node


def _is_size(node: fx.Node) -> bool:
    return isinstance(
        node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool | int | float | bool
    )
