"""Tensors that a custom function makes of numbers (indices by numpy, for example).

Small ones are written out in its code, larger ones become operands of the function.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from pd2bw_fx.program import written_by_schema

_MOST_NUMBERS = 64
_SAME_CONSTANT = (
    torch.ops.aten.lift_fresh_copy.default,
    torch.ops.aten.lift_fresh.default,
    torch.ops.aten.detach_.default,
)


def write_out_constants(joint: fx.GraphModule, early: set[fx.Node]) -> dict[fx.Node, Tensor]:
    """Rewrites the constants of a joint graph, and returns new placeholders for large ones with their values.

    Constants of a few numbers become calls of torch.tensor, which are added to `early` for constants in it.
    """
    operands = dict[fx.Node, Tensor]()
    for node in joint.graph.find_nodes(op="get_attr"):
        value = getattr(joint, str(node.target))
        if not isinstance(value, Tensor) or isinstance(value, FakeTensor) or value.requires_grad:
            continue
        with joint.graph.inserting_before(node):
            if value.numel() <= _MOST_NUMBERS:
                made = _called(joint.graph, node, value)
                early |= {made} if node in early else set()
            else:
                made = joint.graph.placeholder(node.name.strip("_"))
                made.meta = {"val": value}
                operands[made] = value
        node.replace_all_uses_with(made)
        joint.graph.erase_node(node)
        while copy := next((user for user in made.users if user.target in _SAME_CONSTANT), None):
            copy.replace_all_uses_with(made)
            joint.graph.erase_node(copy)
    if any(place in operands for node in joint.graph.nodes for place in written_by_schema(node)):
        raise ValueError("it writes to a tensor that it keeps")
    return operands


def _called(graph: fx.Graph, node: fx.Node, value: Tensor) -> fx.Node:
    kind: dict[str, Any] = {"dtype": value.dtype} | ({"device": value.device} if value.dim() else {})
    made = graph.call_function(torch.tensor, (value.tolist(),), kind)
    made.meta = dict(node.meta)
    return made
