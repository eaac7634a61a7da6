"""What autograd recorded of one call: which results can be differentiated, and with respect to what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_NO_FORMULA = "no autograd formula was registered"  # torch's words for a user's operator without a backward


def differentiable(result: Any) -> list[Tensor]:
    values = result if isinstance(result, list | tuple) else [result]
    return [value for value in values if isinstance(value, Tensor) and _has_derivative(value)]


def _has_derivative(value: Tensor) -> bool:
    """Returns whether a value can be differentiated.

    Torch marks some results as needing a gradient, and only says in the backward that it has no derivative.
    """
    return value.requires_grad and type(value.grad_fn).__name__ != "NotImplemented"


def gradients(
    outputs: Sequence[Tensor],
    wanted: Sequence[Tensor],
    seeds: Sequence[Tensor],
    *,
    retain_graph: bool = False,
) -> Sequence[Tensor | None]:
    """Returns what `torch.autograd.grad` does, or None for all if torch has no derivative.

    It may only say so then; the results may be meant to be read as numbers, or for their size.
    """
    try:
        return torch.autograd.grad(outputs, wanted, seeds, retain_graph=retain_graph, allow_unused=True)
    except NotImplementedError:
        return [None] * len(wanted)
    except RuntimeError as error:
        if _NO_FORMULA not in str(error):
            raise
        return [None] * len(wanted)


def leaves(outputs: list[Tensor]) -> list[Tensor]:
    """Returns the leaves that these outputs' gradients flow to, parameters of a layer included."""
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
