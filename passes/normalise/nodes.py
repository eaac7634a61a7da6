"""What a node's target and schema tell: its name, what it writes, whether it is random."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from pd2bw_fx.assumptions import is_assumption
from pd2bw_fx.drawing import function_draws, layer_draws, operator_draws
from pd2bw_fx.graph import NOTED_OF_CALLS
from pd2bw_fx.program import written_by_schema


def operator_name(node: fx.Node) -> str:
    """Returns the name of the operator ("add_" of aten.add_.Tensor), function or method that a node calls.

    "" for inputs, weights and whole layers, which have the author's names.
    """
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._opname
    if node.op == "call_method":
        return str(node.target)
    return getattr(node.target, "__name__", "") if node.op == "call_function" else ""


def put_in_place(node: fx.Node, other: fx.Node) -> None:
    """Replaces `node` by `other` for all readers and erases it; calls keep their names for the value."""
    for kind in NOTED_OF_CALLS:
        if kind in node.meta:
            other.meta[kind] = {**node.meta[kind], **other.meta.get(kind, {})}
    node.replace_all_uses_with(other)
    node.graph.erase_node(node)


def writes(node: fx.Node) -> tuple[fx.Node, ...]:
    """Returns the nodes whose values this one changes in place."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return ()
    return written_by_schema(node) + _hidden_writes(node)


def _hidden_writes(node: fx.Node) -> tuple[fx.Node, ...]:
    """Returns the running statistics of norms, which write them though their schema does not say so."""
    if operator_name(node) not in {"batch_norm", "native_batch_norm", "instance_norm"} or not node.args[5]:
        return ()
    return tuple(arg for arg in node.args[3:5] if isinstance(arg, fx.Node))


def argument(node: fx.Node, name: str) -> Any:
    """Returns an ATen operator's argument by its name in the schema, or its default."""
    assert isinstance(node.target, torch._ops.OpOverload)
    for position, entry in enumerate(node.target._schema.arguments):
        if entry.name == name:
            if position < len(node.args):
                return node.args[position]
            return node.kwargs.get(name, entry.default_value)
    return None


def asserts_assumption(node: fx.Node) -> bool:
    """Whether the node asserts that the trace is right for a run."""
    return node.target is torch.ops.aten._assert_async.msg and is_assumption(node.args[1])


_DRAWING = {"rand", "randn", "randint", "randperm", "bernoulli", "normal", "multinomial", "rand_like"}
_DRAWING |= {"randn_like", "randint_like", "uniform", "exponential", "random"}


def is_random(node: fx.Node, module: nn.Module | None) -> bool:
    """Whether the node draws from the random generator; dropout with rate 0 does not."""
    if module is not None:
        return any(layer_draws(layer) for layer in module.modules())
    if isinstance(node.target, torch._ops.OpOverload):
        return operator_draws(node.target, node.args, node.kwargs)
    return function_draws(operator_name(node), node.args, node.kwargs)
