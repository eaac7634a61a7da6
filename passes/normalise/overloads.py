"""The functional overloads of in-place operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from .nodes import operator_name


def functional_overload(node: fx.Node) -> Any:
    """Returns aten.add.Tensor for aten.add_.Tensor, or None if there is none with the same arguments."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    name = operator_name(node)
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None) if name.endswith("_") else None
    if packet is None:
        return None
    wanted = _kinds(node.target)
    own = node.target._overloadname
    names = sorted(packet.overloads(), key=lambda other: other != own)
    return next((found for found in (getattr(packet, n) for n in names) if _kinds(found) == wanted), None)


def _kinds(overload: torch._ops.OpOverload) -> list[tuple[str, str]]:
    """Returns names and types of the arguments, to tell overloads apart.

    pow_.Scalar raises a tensor to a number, and pow.Scalar a number to a tensor.
    """
    return [(argument.name, str(argument.type)) for argument in overload._schema.arguments]


def defaults_left_out(node: fx.Node) -> dict[str, Any]:
    """Returns defaults of an in-place call that the functional form does not have: p of bernoulli_."""
    assert isinstance(node.target, torch._ops.OpOverload)
    given = node.target._schema.arguments[len(node.args) :]
    own = {
        argument.name
        for argument in functional_overload(node)._schema.arguments
        if argument.has_default_value()
    }
    return {a.name: a.default_value for a in given if a.name not in own and a.name not in node.kwargs}
