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
_LAST = {*_SCATTERS, _ATEN.view_as_complex.default}
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
} | {f"aten.{name}.{kind}" for name in ("eq", "ne", "lt", "le", "gt", "ge") for kind in ("Scalar", "Tensor")}


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
        write = _write(node) if node.target in _LAST else None
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
    scatter = _scatter(last)
    base = scatter.whole if scatter is not None else None
    while True:
        step = None if scatter is None else _step(scatter.node, _SCATTERS, is_of_pairs=scatter.is_of_pairs)
        if scatter is None or step is None:
            return None
        steps.append(step)
        inner += scatter.own
        within = _scatter(scatter.value)
        part = within.whole if within is not None else None
        if within is None or part is None or part.target not in _PARTS:
            break
        if _operand(part, 0) is not scatter.whole or _step(part, _PARTS) != step:
            break
        inner += [part, within.last]
        scatter = within
    value = scatter.value
    number, made = _number(value, {base, *inner})
    written = number if made else value
    places = places_of(steps)
    if places is None or base is None or not isinstance(written, fx.Node | int | float | complex):
        return None
    return PartWrite((*inner, *made, last), base, places, written)


@dataclass(frozen=True, slots=True)
class _Scatter:
    """An operator that puts a value into a part of a whole; complex numbers are put there as pairs.

    `last` makes the result, and `own` are the other operators, of which nobody else reads.
    """

    node: fx.Node
    last: fx.Node
    whole: fx.Node
    value: Any
    own: Sequence[fx.Node] = ()

    @property
    def is_of_pairs(self) -> bool:
        return self.last is not self.node


def _scatter(last: Any) -> _Scatter | None:
    if not isinstance(last, fx.Node):
        return None
    is_complex = last.target is _ATEN.view_as_complex.default
    node = _operand(last, 0) if is_complex else last
    whole = _operand(node, 0) if node is not None and node.target in _SCATTERS else None
    if node is None or whole is None:
        return None
    value = node.args[1]
    if not is_complex:
        return _Scatter(node, last, whole, value)
    pairs = [each for each in (whole, value) if isinstance(each, fx.Node)]
    wholes = [_operand(each, 0) for each in pairs if each.target is _ATEN.view_as_real.default]
    if len(wholes) < 2 or wholes[0] is None:
        return None
    return _Scatter(node, last, wholes[0], wholes[1], (*pairs, node))


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


def _step(
    node: fx.Node, kinds: Mapping[Any, tuple[str, Sequence[str]]], *, is_of_pairs: bool = False
) -> Step | None:
    """Returns which part an operator takes or writes, in dimensions of numbers where it is of pairs."""
    name, operands = kinds[node.target]
    values: dict[str, Any] = dict(zip(operands, node.args, strict=False)) | node.kwargs
    if is_of_pairs:
        within_pairs = node.meta["val"].dim() - 1
        if values.get("dim", 0) in (-1, within_pairs):
            return None
        if values.get("dim", 0) < 0:
            values["dim"] += 1
    return step_of(name, {word: value for word, value in values.items() if (word, value) != ("step", 1)})
