"""What is known of a program's calls: their operators, who reads what, and where a device is needed."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from pd2bw_fx.graph import RETURNED_AT, OperatorGraph
from pd2bw_fx.program import autocast_of

from .cut import Cut, is_size, tensors_read
from .scopes import Scope, module_calls, walk
from .unread_results import operators_of

if TYPE_CHECKING:
    from .stage_tree import StageTree


def whole_calls(graph: OperatorGraph) -> dict[str, set[str]]:
    """Maps each call of the whole program to its operators, without the recomputable ones."""
    assert graph.fx is not None
    calls: dict[str, set[str]] = defaultdict(set)
    for node in graph.fx.graph.nodes:
        if node.name in graph.operators and not graph.operators[node.name].is_replicable:
            for key, _, _ in module_calls(node):
                calls[key].add(node.name)
    return calls


def returning(graph: OperatorGraph) -> set[str]:
    """Collects the keys of the calls whose results are known."""
    assert graph.fx is not None
    return {key for node in graph.fx.graph.nodes for key in node.meta.get(RETURNED_AT, {})}


def unlike_calls(tree: StageTree) -> set[str]:
    """Collects modules whose calls here differ: one is cut, goes another way, or is given its weights.

    torch.func.functional_call gives a module weights, which its call then has as arguments.
    """
    calls: dict[str, list[Scope]] = defaultdict(list)
    for scope in walk(tree.root):
        if scope.function is None:
            calls[scope.path].append(scope)
    return {
        path
        for path, scopes in calls.items()
        if len(scopes) > 1 and len({(operators_of(tree, s), _weights_of(tree, s)) for s in scopes}) > 1
    }


def _weights_of(tree: StageTree, scope: Scope) -> frozenset[str]:
    """Returns the names of a call's own weights; those that it is given are none of them."""
    read = (value for node in scope.nodes for value in tensors_read(tree.graph, node))
    own = (tree.parameter(scope, value) for value in read if value.op == "get_attr")
    return frozenset(name for name in own if name is not None)


def names_device(node: fx.Node) -> bool:
    return any(isinstance(value, torch.device) for value in (*node.args, *node.kwargs.values()))


def follows_device(item: fx.Node | Scope) -> bool:
    """Whether an item is in an autocast region of the device's own type."""
    regions = map(autocast_of, item.nodes if isinstance(item, Scope) else [item])
    return any(region is not None and region[0] is None for region in regions)


def readers(graph: OperatorGraph, stage: Cut) -> dict[fx.Node, list[fx.Node]]:
    readers: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in stage.nodes:
        for operand in () if is_size(graph, node) else tensors_read(graph, node):
            readers[operand].append(node)
    return readers


def copies_a_weight(node: fx.Node) -> bool:
    """Whether a node copies a weight that the forward writes, before it is read (normalise/state.py)."""
    operand = node.args[0] if node.target is torch.ops.aten.clone.default else None
    return isinstance(operand, fx.Node) and operand.op == "get_attr"


def occurrences(value: Any, node: fx.Node) -> int:
    """Counts how often a node stands among an operator's operands."""
    if value is node:
        return 1
    if isinstance(value, list | tuple):
        return sum(occurrences(item, node) for item in value)
    if isinstance(value, dict):
        return sum(occurrences(item, node) for item in value.values())
    if isinstance(value, slice):
        return sum(occurrences(item, node) for item in (value.start, value.stop, value.step))
    return 0
