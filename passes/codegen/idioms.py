"""Runs of operators that are one function of torch: F.normalize."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from .expression import Scene, Source, call
from .scopes import Scope

_ATEN = torch.ops.aten
# input / input.norm(p, dim, keepdim=True).clamp_min(eps).expand_as(input)
_NORMALIZE = (
    _ATEN.linalg_vector_norm.default,
    _ATEN.clamp_min.default,
    _ATEN.expand_as.default,
    _ATEN.div.Tensor,
)


def normalizations(items: Sequence[fx.Node | Scope]) -> Iterator[list[fx.Node]]:
    """Yields the operators of each F.normalize whose operators stand together.

    If they stood apart, one call would compute some of them at another time.
    """
    for end in range(len(_NORMALIZE), len(items) + 1):
        nodes = [item for item in items[end - len(_NORMALIZE) : end] if isinstance(item, fx.Node)]
        if nodes and normalization(nodes[-1]) == nodes:
            yield nodes


def normalization(ratio: fx.Node) -> list[fx.Node] | None:
    """Returns the operators of an F.normalize that ends with this one, else None.

    There is none where anything else reads what the other operators make.
    """
    nodes = [ratio]
    for target in reversed(_NORMALIZE):
        if nodes[0].target is not target or nodes[0].kwargs:
            return None
        inner = nodes[0].args[1 if target is _NORMALIZE[-1] else 0]
        if not isinstance(inner, fx.Node):
            return None
        nodes.insert(0, inner)
    given, norm, clamped, expanded, _ = nodes
    if any(len(node.users) != 1 for node in (norm, clamped, expanded)):
        return None
    is_of_one_input = expanded.args == (clamped, given) and ratio.args == (given, expanded)
    is_kept = len(norm.args) == 4 and norm.args[3] is True  # keepdim
    if not (is_of_one_input and is_kept and _are_numbers(*norm.args[1:3], *clamped.args[1:])):
        return None
    return nodes[1:]


def _are_numbers(*values: Any) -> bool:
    return all(
        _are_numbers(*value) if isinstance(value, list | tuple) else type(value) in (int, float)
        for value in values
    )


def normalized(nodes: Sequence[fx.Node], scene: Scene) -> Source:
    norm, clamped, *_ = nodes
    given, power, dimensions, _ = norm.args
    assert isinstance(dimensions, list | tuple)
    dim = dimensions[0] if len(dimensions) == 1 else tuple(dimensions)
    words = {"p": (power, 2), "dim": (dim, 1), "eps": (clamped.args[1], 1e-12)}
    return call("F.normalize", scene, given, **{w: v for w, (v, default) in words.items() if v != default})
