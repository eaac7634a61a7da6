"""A backward in two halves, as in zero-bubble schedules (arXiv 2401.10241).

I   from the stage's outputs to its inputs, so that the stage before can go on; the gradients that reach
    operators with weights are kept
W   from there to the weights, any time later

    output <- matmul <- gelu <- matmul <- input         I runs along this row
                |                 |
                W2                W1                    W runs each of these steps alone

An output may be computed from weights alone and also be used in its own stage: no gradient of an input passes
it. W begins there with the output's own gradient, and adds what comes from the operators above it.

    output <- matmul <- gelu <- input
                |
    output <-  norm
                |
                W1                                      W runs from the matmul and from the norm
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Gradients = tuple[Tensor | None, ...]


@dataclass(slots=True)
class _Group:
    """Operators that share weights, the gradients that reached them, and the weights' own nodes.

    `reached` has everything that reaches an operator that the first half `passed`. For an output that it did
    not pass, it has only the output's own gradient.
    """

    operators: list[Node]
    weights: list[Node]
    reached: dict[Node, Gradients] = field(default_factory=dict)
    passed: set[Node] = field(default_factory=set)


@dataclass(slots=True)
class WeightHalf:
    """The second half of a backward, whose first half `input_half` has run."""

    groups: list[_Group]
    whole: tuple[list[GradientEdge], list[Tensor]] | None = None

    def run(self) -> None:
        """Adds the gradients of the weights to their `grad`."""
        if self.whole is not None:
            torch.autograd.backward(*self.whole)
        for group in self.groups:
            _run_group(group)


def input_half(roots: list[GradientEdge], gradients: list[Tensor], inputs: Sequence[Tensor]) -> WeightHalf:
    """Sets the inputs' `grad`; returns what is left to do: everything, if no input needs a gradient."""
    if not inputs:
        return WeightHalf([], (roots, gradients))
    nodes = [edge.node for edge in roots]
    readers = _readers(nodes)
    leaves = {_leaf(tensor) for tensor in inputs}
    on_the_way = _above(leaves, readers)
    groups = _groups(nodes, readers, leaves, on_the_way)
    handles = [node.register_prehook(_keeper(group, node)) for group in groups for node in group.operators]
    try:
        found = torch.autograd.grad(roots, list(inputs), gradients, retain_graph=True, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    for tensor, gradient in zip(inputs, found, strict=True):
        tensor.grad = gradient
    _reach_the_rest(groups, roots, gradients, on_the_way)
    return WeightHalf(groups)


def reaches(roots: Sequence[GradientEdge], tensor: Tensor) -> bool:
    """Returns whether a backward from there comes to this leaf, with or without a gradient for it."""
    nodes, leaf = [edge.node for edge in roots], _leaf(tensor)
    return leaf in nodes or leaf in _readers(nodes)


def _run_group(group: _Group) -> None:
    edges, gradients = [], []
    for node, reached in group.reached.items():
        for index, gradient in enumerate(reached):
            if gradient is not None:
                edges.append(GradientEdge(node, index))
                gradients.append(gradient)
    if not edges:
        return
    handles = []
    if len(group.reached) > 1:
        # One operator may lie on the way from another: what arrives that way is in its own share already,
        # unless the first half did not pass it.
        handles = [node.register_prehook(_setter(group.reached[node])) for node in group.passed]
    try:
        targets = [GradientEdge(node, 0) for node in group.weights]
        found: tuple[Tensor | None, ...] = torch.autograd.grad(
            edges, targets, gradients, retain_graph=True, allow_unused=True
        )
    finally:
        for handle in handles:
            handle.remove()
    taken = {_storage(gradient) for gradient in gradients}
    for node, gradient in zip(group.weights, found, strict=True):
        parameter: Tensor = node.variable  # type: ignore[attr-defined]
        if gradient is None:
            continue
        if parameter.grad is not None:
            gradient = parameter.grad + gradient
        if _storage(gradient) in taken or not _lies_as(gradient, parameter):
            gradient = _laid_as(gradient, parameter)
        taken.add(_storage(gradient))
        parameter.grad = gradient


def _lies_as(gradient: Tensor, parameter: Tensor) -> bool:
    """Returns whether a gradient lies in memory as autograd leaves it.

    Fused optimizers do not check strides.
    """
    return gradient.is_sparse or gradient.stride() == _strides(parameter)


def _laid_as(gradient: Tensor, parameter: Tensor) -> Tensor:
    if gradient.is_sparse:
        return gradient.clone()
    laid = torch.empty_strided(
        gradient.shape, _strides(parameter), dtype=gradient.dtype, device=gradient.device
    )
    return laid.copy_(gradient)


def _strides(parameter: Tensor) -> tuple[int, ...]:
    """Returns the strides of a parameter's gradient, which are dense even where the parameter's are not."""
    if torch.ops.aten.is_non_overlapping_and_dense(parameter):
        return parameter.stride()
    return torch.empty(parameter.shape, device="meta").stride()


def _storage(gradient: Tensor) -> int:
    return id(gradient) if gradient.is_sparse else gradient.untyped_storage().data_ptr()


def _leaf(tensor: Tensor) -> Node:
    node = get_gradient_edge(tensor).node
    assert node is not None
    return node


def _readers(roots: Sequence[Node]) -> dict[Node, list[Node]]:
    """Returns, for each node below the roots, the nodes that pass it gradients."""
    readers: dict[Node, list[Node]] = defaultdict(list)
    seen, queue = set(roots), deque(dict.fromkeys(roots))
    while queue:
        node = queue.popleft()
        for below, _ in node.next_functions:
            if below is not None:
                readers[below].append(node)
                if below not in seen:
                    seen.add(below)
                    queue.append(below)
    return readers


def _above(leaves: set[Node], readers: dict[Node, list[Node]]) -> set[Node]:
    seen, queue = set(leaves), deque(leaves)
    while queue:
        for node in readers.get(queue.popleft(), []):
            if node not in seen:
                seen.add(node)
                queue.append(node)
    return seen


def _groups(
    roots: Sequence[Node], readers: dict[Node, list[Node]], leaves: set[Node], on_the_way: set[Node]
) -> list[_Group]:
    """Returns groups of weights, each with the operators at which a backward to them begins.

    Weights that share such an operator are in one group.
    """
    of_operator: dict[Node, _Group] = {}
    groups: list[_Group] = []
    outputs, ends = set(roots), dict.fromkeys((*readers, *roots))
    for weight in [node for node in ends if hasattr(node, "variable") and node not in leaves]:
        users = _users(weight, outputs, readers, on_the_way)
        known = list({id(g): g for u in users if (g := of_operator.get(u)) is not None}.values())
        group = _Group([], [])
        for other in known:
            group.operators += other.operators
            group.weights += other.weights
            groups.remove(other)
        group.operators += [user for user in users if user not in group.operators]
        group.weights.append(weight)
        of_operator |= dict.fromkeys(group.operators, group)
        groups.append(group)
    return groups


def _users(
    weight: Node, roots: set[Node], readers: dict[Node, list[Node]], on_the_way: set[Node]
) -> list[Node]:
    """Returns the first nodes above a weight that gradients of inputs pass too, and outputs below them."""
    found: dict[Node, None] = {}
    seen, queue = {weight}, deque([weight])
    while queue:
        node = queue.popleft()
        if node in roots:
            found[node] = None
        for reader in readers.get(node, []):
            if reader in on_the_way:
                found[reader] = None
            elif reader not in seen:
                seen.add(reader)
                queue.append(reader)
    return list(found)


def _reach_the_rest(
    groups: list[_Group], roots: list[GradientEdge], gradients: list[Tensor], on_the_way: set[Node]
) -> None:
    """Gives groups the gradients of outputs that depend on no input, which the first half has not passed."""
    for group in groups:
        for node in group.operators:
            if node in on_the_way or node in group.reached:
                continue
            reached: dict[int, Tensor] = {}
            for edge, gradient in zip(roots, gradients, strict=True):
                if edge.node is node:
                    number = edge.output_nr
                    reached[number] = reached[number] + gradient if number in reached else gradient
            if reached:
                group.reached[node] = tuple(reached.get(number) for number in range(max(reached) + 1))


def _keeper(group: _Group, node: Node) -> Any:
    def keep(gradients: Gradients) -> None:
        group.reached[node] = gradients
        group.passed.add(node)

    return keep


def _setter(kept: Gradients) -> Any:
    def replaced(gradients: Gradients) -> Gradients:
        return kept

    return replaced
