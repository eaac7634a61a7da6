"""Linear layers within a map, recognised by the operators that the map makes of them.

    t(weight); mm(x, t); add(mm, bias)  ->  linear(x, weight, bias), a call of the layer that has them

The map runs the layer on single samples; the result is the same layer on whole batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn

from pd2bw_fx.graph import OF_A_MAP

from .lift import Draft
from .nodes import operator_name

_CODE = nn.Linear.forward.__code__
_FRAME = f'  File "{_CODE.co_filename}", line {_CODE.co_firstlineno}, in forward\n    def forward(\n'


def call_mapped_layers(draft: Draft, model: nn.Module) -> None:
    """Rewrites the operators of mapped linear layers as calls; products outside of a map stay as written."""
    layers = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    for node in draft.graph.nodes:
        is_sum = operator_name(node) == "add" and not node.kwargs
        is_sum = is_sum and node.meta.get("of_map") and not node.meta.get("autocast")  # the sum is not cast
        found = _layer_of(node, layers) if is_sum else None
        if found is not None:
            name, operands = found
            node.target, node.args = torch.ops.aten.linear.default, operands
            called = name, f"{nn.Linear.__module__}.{nn.Linear.__qualname__}"
            node.meta["nn_module_stack"] = {**node.meta["nn_module_stack"], f"{node.name}{OF_A_MAP}": called}
            node.meta["stack_trace"] = node.meta.get("stack_trace", "") + _FRAME  # as of any call


def _layer_of(node: fx.Node, layers: Mapping[str, nn.Linear]) -> tuple[str, tuple[Any, ...]] | None:
    """Returns the layer's name and (x, weight, bias), or None if the sum is not a layer's."""
    product: Any = node.args[0]
    bias: Any = node.args[1]
    transposed = _operand(product, "mm", 1)
    weight = _operand(transposed, "t", 0)
    if weight is None or weight.op != "get_attr" or not isinstance(bias, fx.Node) or bias.op != "get_attr":
        return None
    name, _, own = str(weight.target).rpartition(".")
    if name not in layers or own != "weight" or str(bias.target) != f"{name}.bias":
        return None
    return name, (_operand(product, "mm", 0), weight, bias)


def _operand(node: Any, name: str, place: int) -> fx.Node | None:
    """Returns an operand of `node`, or None if it is not an operator of that name."""
    if not isinstance(node, fx.Node) or node.op != "call_function" or operator_name(node) != name:
        return None
    operand = node.args[place]
    return operand if isinstance(operand, fx.Node) else None
