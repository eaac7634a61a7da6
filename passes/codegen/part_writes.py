"""Assignments to parts of a tensor, which a trace has as operators that make another tensor.

mask[:-4, 2:] = 1.0        part = mask[:-4]
                           filled = part.slice_scatter(torch.full_like(part[:, 2:], 1.0), dim=1, start=2)
                           mask = mask.slice_scatter(filled, end=-4)

They are written as assignments again where the body itself makes the tensor, by an operator that keeps
nothing of it for the backward, and nothing else reads it as it was before. What is assigned may have a
gradient.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .expression import Scene
from .scopes import Scope
from .subscripts import Step, places_of, step_of, subscripted
from .wording import statement_of

_ATEN = torch.ops.aten
_SCATTERS = {
    _ATEN.slice_scatter.default: ("slice", ("self", "src", "dim", "start", "end", "step")),
    _ATEN.select_scatter.default: ("select", ("self", "src", "dim", "index")),
}
_PARTS = {
    _ATEN.slice.Tensor: ("slice", ("self", "dim", "start", "end", "step")),
    _ATEN.select.int: ("select", ("self", "dim", "index")),
}
_MAKING = {
    f"aten.{name}.default"
    for name in (
        "new_zeros",
        "new_ones",
        "new_full",
        "zeros",
        "ones",
        "full",
        "zeros_like",
        "ones_like",
        "clone",
    )
}


@dataclass(frozen=True, slots=True)
class PartWrite:
    """The operators of `base[places] = value`; the last of them makes what the base then is."""

    nodes: tuple[fx.Node, ...]
    base: fx.Node
    places: Sequence[int | slice | None]
    value: fx.Node | complex

    def spelled(self, scene: Scene) -> str:
        return f"{subscripted(self.base, self.places, scene)} = {scene.text(self.value)}"


def part_writes(items: Sequence[fx.Node | Scope]) -> dict[fx.Node, PartWrite]:
    """Finds such assignments among the items of a body, by their last operators."""
    found: dict[fx.Node, PartWrite] = {}
    own = {item for item in items if isinstance(item, fx.Node)}
    for node in own:
        write = _write(node) if node.target in _SCATTERS else None
        if write is None or not own.issuperset((*write.nodes, write.base)):
            continue
        inside = set(write.nodes)
        if all(inside.issuperset(made.users) for made in (write.base, *write.nodes[:-1])):
            found[node] = write
    new = {node for node in own if str(node.target) in _MAKING}
    return {node: write for node, write in found.items() if _first(write.base, found) in new}


def _first(base: fx.Node, found: Mapping[fx.Node, PartWrite]) -> fx.Node:
    """Returns what a tensor was before the first assignment to a part of it."""
    while base in found:
        base = found[base].base
    return base


def _write(last: fx.Node) -> PartWrite | None:
    statement = statement_of(last)
    if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Subscript):
        return None
    inner, steps = list[fx.Node](), list[Step]()
    scatter, base = last, _operand(last, 0)
    while True:
        whole, value = _operand(scatter, 0), scatter.args[1]
        step = _step(scatter, _SCATTERS)
        if step is None or whole is None:
            return None
        steps.append(step)
        part = _operand(value, 0) if isinstance(value, fx.Node) and value.target in _SCATTERS else None
        if not isinstance(value, fx.Node) or part is None or part.target not in _PARTS:
            break
        if _operand(part, 0) is not whole or _step(part, _PARTS) != step:
            break
        inner += [part, value]
        scatter = value
    number, made = _number(value, {base, *inner})
    written = number if made else value
    places = places_of(steps)
    if places is None or base is None or not isinstance(written, fx.Node | int | float | complex):
        return None
    return PartWrite((*inner, *made, last), base, places, written)


def _operand(node: fx.Node, place: int) -> fx.Node | None:
    operand = node.args[place]
    return operand if isinstance(operand, fx.Node) else None


def _number(value: Any, wholes: Set[fx.Node | None]) -> tuple[Any, list[fx.Node]]:
    """Returns the number that a part of one of these tensors is filled with, and the operators that do so."""
    if not isinstance(value, fx.Node) or value.target is not _ATEN.full_like.default or value.kwargs:
        return None, []
    made, like = [value], _operand(value, 0)
    while like is not None and like not in wholes and like.target in _PARTS:
        made.append(like)
        like = _operand(like, 0)
    number = value.args[1]
    is_filled = like in wholes and isinstance(number, int | float | complex)
    return (number, made) if is_filled else (None, [])


def _step(node: fx.Node, kinds: Mapping[Any, tuple[str, Sequence[str]]]) -> Step | None:
    name, operands = kinds[node.target]
    values = dict(zip(operands, node.args, strict=False)) | node.kwargs
    return step_of(name, {word: value for word, value in values.items() if (word, value) != ("step", 1)})
