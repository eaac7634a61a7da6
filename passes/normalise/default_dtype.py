"""Types that come from torch's default, written into the program where that default is not float32.

    torch.linspace(0, 1, 8)   ->  torch.linspace(0, 1, 8, dtype=torch.float64)
    torch.arange(8) / 2       ->  torch.arange(8).to(torch.float64) / 2

The program then computes the same in a process whose default type is float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.operator_schemas import get_signature_for_torch_op

from .facts import Facts
from .lift import Draft
from .nodes import argument, operator_name

_COMPLEX = {torch.float64: torch.complex128, torch.float16: torch.complex32}
_GIVEN_BY_NUMBERS = {"where"}  # whose operands that are tensors do not decide the type


def write_default_dtype(draft: Draft, facts: Facts) -> bool:
    """Writes the types that come from the default; returns whether there were any."""
    default = torch.get_default_dtype()
    if default == torch.float32:
        return False
    are_any = False
    for node in list(draft.graph.nodes):
        value = facts.values.get(node.name)
        if node.op != "call_function" or not isinstance(value, torch.Tensor):
            continue
        if value.dtype not in (default, _COMPLEX.get(default)):
            continue
        operands = [facts.values.get(operand.name) for operand in node.all_input_nodes]
        types = {operand.dtype for operand in operands if isinstance(operand, torch.Tensor)}
        if any(found.is_floating_point or found.is_complex for found in types):
            continue
        if _takes_dtype(node):
            if _dtype(node) is None:
                node.kwargs = {**node.kwargs, "dtype": value.dtype}
                are_any = True
        elif types and operator_name(node) not in _GIVEN_BY_NUMBERS:
            _convert_operands(draft.graph, node, facts, default)
            are_any = True
    return are_any


def _takes_dtype(node: fx.Node) -> bool:
    if isinstance(node.target, torch._ops.OpOverload):
        return any(entry.name == "dtype" for entry in node.target._schema.arguments)
    signatures = get_signature_for_torch_op(node.target) if callable(node.target) else None
    return any("dtype" in signature.parameters for signature in signatures or ())


def _dtype(node: fx.Node) -> Any:
    if isinstance(node.target, torch._ops.OpOverload):
        return argument(node, "dtype")
    return node.kwargs.get("dtype")


def _convert_operands(graph: fx.Graph, node: fx.Node, facts: Facts, dtype: torch.dtype) -> None:
    for operand in node.all_input_nodes:
        if isinstance(facts.values.get(operand.name), torch.Tensor):
            with graph.inserting_before(node):
                converted = graph.call_function(torch.ops.aten.to.dtype, (operand, dtype))
            converted.meta = {key: value for key, value in node.meta.items() if key != "val"}
            node.replace_input_with(operand, converted)
