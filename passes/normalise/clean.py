"""What only the tracer needed is taken out: assertions, guards, identity casts, dead code."""

from __future__ import annotations

import torch
from torch import fx

from .lift import Draft

_GUARDS = {
    "_assert_tensor_metadata",
    "_assert_async",
    "_assert_scalar",
    "_functional_assert_async",
    "_functional_assert_scalar",
    "sym_constrain_range",
    "sym_constrain_range_for_size",
    "_check",
    "_assert",
}


def operator_name(node: fx.Node) -> str:
    """ "add_" of aten.add_.Tensor; the function's or method's name where it is no ATen operator."""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._opname
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def remove_guards(draft: Draft) -> None:
    for node in reversed(list(draft.graph.nodes)):
        if node.op == "call_function" and operator_name(node) in _GUARDS and not node.users:
            draft.graph.erase_node(node)


def remove_identities(draft: Draft) -> None:
    """Aliases, and casts to the type that the tensor has: the same values, the same gradient."""
    for node in list(draft.graph.nodes):
        if node.op == "call_function" and _is_identity(node):
            node.replace_all_uses_with(node.args[0])
            draft.graph.erase_node(node)


def _is_identity(node: fx.Node) -> bool:
    name, operand = operator_name(node), node.args[0] if node.args else None
    if not isinstance(operand, fx.Node) or not isinstance(node.target, torch._ops.OpOverload):
        return False
    if name == "alias":
        return True
    if (
        name not in {"to", "_to_copy", "type_as"}
        or node.kwargs.get("copy")
        or node.kwargs.get("memory_format")
    ):
        return False
    before, after = operand.meta.get("val"), node.meta.get("val")
    return (
        name != "_to_copy"
        and isinstance(before, torch.Tensor)
        and isinstance(after, torch.Tensor)
        and (before.dtype, before.device, before.layout) == (after.dtype, after.device, after.layout)
    )


def remove_dead_code(draft: Draft) -> None:
    """Nodes whose value nobody reads; what writes in place stays, for its effect is on another value."""
    for node in reversed(list(draft.graph.nodes)):
        if node.op in {"placeholder", "output"} or node.users or writes(node):
            continue
        draft.graph.erase_node(node)


def writes(node: fx.Node) -> tuple[fx.Node, ...]:
    """The nodes whose values this one changes in place, by its schema."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return ()
    schema = node.target._schema
    written = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        written += [value] if isinstance(value, fx.Node) else []
    return tuple(written) + _hidden_writes(node)


def _hidden_writes(node: fx.Node) -> tuple[fx.Node, ...]:
    """Running statistics: aten.batch_norm and aten.instance_norm write them without saying so."""
    position = {"batch_norm": 3, "instance_norm": 3}.get(operator_name(node))
    if position is None or not node.args[5]:
        return ()
    return tuple(arg for arg in node.args[position : position + 2] if isinstance(arg, fx.Node))
