"""What autograd recorded of one call: which results can be differentiated, and with respect to what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def differentiable(result: Any) -> list[Tensor]:
    values = result if isinstance(result, list | tuple) else [result]
    return [value for value in values if isinstance(value, Tensor) and _has_derivative(value)]


def _has_derivative(value: Tensor) -> bool:
    """Not so for what torch marks as needing a gradient to say later that it has no derivative of it."""
    return value.requires_grad and type(value.grad_fn).__name__ != "NotImplemented"


def gradients(
    outputs: Sequence[Tensor], wanted: Sequence[Tensor], seeds: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    """As `torch.autograd.grad`; nothing for what torch has no derivative of, which it may say no earlier: the
    results may be read as numbers, or for their size."""
    try:
        return torch.autograd.grad(outputs, wanted, seeds, allow_unused=True)
    except NotImplementedError:
        return [None] * len(wanted)


def leaves(outputs: list[Tensor]) -> list[Tensor]:
    """The leaves that these outputs' gradients flow to, parameters of a layer among them."""
    found: dict[int, Tensor] = {}
    todo, seen = [output.grad_fn for output in outputs], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            found[id(variable)] = variable
        todo += [following for following, _ in node.next_functions]
    return list(found.values())
