"""Copies of state that a later forward writes, for operators whose gradient is computed from it.

    self.scale.mul_(0.9).add_(spread)          self.scale.mul_(0.9).add_(spread)
    return x / self.scale                ->    return x / self.scale.clone()

A single process runs the backward before it writes the state again; a pipeline runs forwards of other
microbatches in between.
"""

from __future__ import annotations

import torch
from torch import fx

from .facts import Facts
from .lift import Draft
from .nodes import operator_name

_UNSAVED = {"embedding", "embedding_bag", "_embedding_bag"}  # their backward does not read the table


def copy_written_state(draft: Draft, facts: Facts) -> bool:
    """Has operators with a gradient read copies of buffers and parameters that the program writes.

    Returns whether there are any such operators.
    """
    writes = (node for nodes in facts.written.values() for node in nodes)
    written = {storage for node in writes for storage in facts.storages[node.name]}
    state = draft.graph.find_nodes(op="get_attr")
    written &= {storage for node in state for storage in facts.storages[node.name]}
    found = False
    for node in list(draft.graph.nodes):
        if node.op != "call_function" or facts.is_view(node.name) or not facts.requires_grad(node.name):
            continue
        for operand in node.all_input_nodes:
            is_own = operand in facts.written.get(node.name, ())
            is_saved = operator_name(node) not in _UNSAVED or not facts.requires_grad(operand.name)
            if is_saved and not is_own and facts.storages[operand.name] & written:
                _copy(draft.graph, operand, node)
                found = True
    return found


def _copy(graph: fx.Graph, operand: fx.Node, reader: fx.Node) -> None:
    with graph.inserting_before(reader):
        copy = graph.call_function(torch.ops.aten.clone.default, (operand,))
    copy.meta = dict(reader.meta) | {"val": operand.meta.get("val")}
    reader.replace_input_with(operand, copy)
