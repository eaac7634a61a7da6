"""Facts about values by the names of operators, for programs traced without example inputs."""

from __future__ import annotations

from collections.abc import Set
from itertools import count

import torch
from torch import fx, nn

from .facts import Facts, fake_mode
from .lift import Draft
from .nodes import operator_name

_SIZES = {"size", "dim", "numel", "ndimension", "len", "stride", "storage_offset"}
_WITHOUT_GRADIENT = {
    "detach",
    "argmax",
    "argmin",
    "argsort",
    "zeros_like",
    "ones_like",
    "long",
    "int",
    "bool",
}
_VIEWS = {
    "view",
    "reshape",
    "flatten",
    "transpose",
    "permute",
    "squeeze",
    "unsqueeze",
    "expand",
    "select",
    "t",
}
_VIEWS |= {
    "narrow",
    "chunk",
    "split",
    "unbind",
    "contiguous",
    "view_as",
    "expand_as",
    "detach",
    "getitem",
    "to",
}


def assume(draft: Draft, trainable: Set[str]) -> Facts:
    """Returns facts by name: which operators return views, and which a gradient does not flow through."""
    facts = Facts(fake_mode())
    fresh = count()
    for node in draft.graph.nodes:
        name = operator_name(node)
        if node.op == "output":
            continue
        operands = node.all_input_nodes
        if _is_size(node, facts):
            facts.values[node.name] = 0
        facts.storages[node.name] = frozenset({next(fresh)})
        if _is_in_place(node, draft) and operands:
            facts.written[node.name] = (operands[0],)
        if operands and (name in _VIEWS or facts.written.get(node.name)):
            facts.aliases[node.name] = (operands[0],)
            facts.storages[node.name] = facts.storages[operands[0].name]
        if name not in _WITHOUT_GRADIENT and not node.meta.get("no_grad") and node.name not in facts.values:
            reached = any(operand.name in facts.assumed_gradients for operand in operands)
            if reached or _owns_trainable(node, draft, trainable):
                facts.assumed_gradients.add(node.name)
    return facts


def _is_size(node: fx.Node, facts: Facts) -> bool:
    if node.op == "call_function" and operator_name(node) == "getattr":
        return len(node.args) > 1 and node.args[1] in {"shape", "ndim", "dtype", "device"}
    if node.op == "call_method" and node.target in _SIZES:
        return True
    operands = node.all_input_nodes
    return node.op == "call_function" and bool(operands) and all(o.name in facts.values for o in operands)


def _is_in_place(node: fx.Node, draft: Draft) -> bool:
    if node.op == "call_module":
        return bool(getattr(draft.values[str(node.target)], "inplace", False))
    name = operator_name(node)
    by_name = name.endswith("_") and not name.endswith("__")
    return (
        by_name or name in {"iadd", "imul", "isub", "itruediv", "setitem"} or bool(node.kwargs.get("inplace"))
    )


def _owns_trainable(node: fx.Node, draft: Draft, trainable: Set[str]) -> bool:
    if node.op == "get_attr":
        return str(node.target) in trainable
    module = draft.values.get(str(node.target)) if node.op == "call_module" else None
    return isinstance(module, nn.Module) and any(p.requires_grad for p in module.parameters())


def assumed_dtype(node: fx.Node, draft: Draft) -> torch.dtype:
    """Returns int64 for what an embedding looks up, and the default type for everything else."""
    for reader in node.users:
        module = draft.values.get(str(reader.target)) if reader.op == "call_module" else None
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or operator_name(reader) == "embedding":
            return torch.int64
    return torch.get_default_dtype()
