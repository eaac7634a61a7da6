"""Subscripts: what an author writes as one is several operators in a row, from first dimensions to last.

h[:, 1:, 0]         slice, select
h[:, 0, None]       select, unsqueeze
h[row, place, None]     unsqueeze, index

They are written as one again where each is read by the next alone and torch would take that one apart into
the same operators.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .expression import Scene, Source, Special, subscript
from .wording import is_a_subscript

_OPERANDS = {
    torch.ops.aten.slice.Tensor: ("slice", ("self", "dim", "start", "end", "step")),
    torch.ops.aten.select.int: ("select", ("self", "dim", "index")),
    torch.ops.aten.unsqueeze.default: ("unsqueeze", ("self", "dim")),
}
_WHOLE = slice(None)
_MOST_PLACES = 6  # from there on, a method with the number of its dimension is easier to read
_INDICES = (torch.int32, torch.int64)


@dataclass(frozen=True, slots=True)
class Step:
    """One operator of a subscript: what stands at a dimension of its operand. None is a new dimension."""

    dimension: int
    place: int | slice | None


def basic_subscript(name: str) -> Special:
    """Spells a slice or a selection, together with what is before it, as one subscript."""

    def spelled(values: Mapping[str, Any], scene: Scene) -> Source | None:
        step = step_of(name, values)
        return None if step is None else _subscript(values["self"], [step], scene)

    return spelled


def new_dimension(values: Mapping[str, Any], scene: Scene) -> Source | None:
    """Spells an author's None in a subscript, together with what is before it."""
    step = step_of("unsqueeze", values)
    base, steps = (values["self"], []) if step is None else _chain(values["self"], [step], scene)
    if all(each.place is None for each in steps):
        return _new_dimensions(values, scene, least=1)
    return _written(base, places_of(steps), scene)


def several_new_dimensions(values: Mapping[str, Any], scene: Scene) -> Source | None:
    """Spells several unsqueezes in a row, written in one line, as one subscript: x[None, None, :]."""
    return _new_dimensions(values, scene, least=2)


def subscript_of_tensors(values: Mapping[str, Any], scene: Scene) -> Source:
    """Spells an index by tensors, together with what is before it."""
    tensors = {at: item for at, item in enumerate(values["indices"]) if item is not None}
    base, steps = values["self"], list[Step]()
    if all(_is_a_list_of_places(item) for item in tensors.values()):
        base, steps = _chain(values["self"], [], scene)
    places = places_of(steps) or []
    positions = {_position(places, at): item for at, item in tensors.items()}
    if any(places[at] != _WHOLE for at in positions):
        base, places, positions = values["self"], [_WHOLE] * len(values["indices"]), tensors
    texts = {at: scene.text(item) for at, item in positions.items()}
    return _written(base, places, scene, texts)


def _subscript(operand: Any, steps: list[Step], scene: Scene) -> Source:
    base, steps = _chain(operand, steps, scene)
    return _written(base, places_of(steps), scene)


def _written(
    base: Any,
    places: Sequence[int | slice | None] | None,
    scene: Scene,
    texts: Mapping[int, str] | None = None,
) -> Source:
    assert places is not None
    return Source(subscripted(base, places, scene, texts))


def subscripted(
    base: Any,
    places: Sequence[int | slice | None],
    scene: Scene,
    texts: Mapping[int, str] | None = None,
) -> str:
    """Writes a tensor with a subscript; `texts` has places that are written otherwise."""
    found = [(texts or {}).get(at) or subscript(place, scene) for at, place in enumerate(places)]
    return f"{scene.receiver(base)}[{', '.join(found)}]"


def _chain(operand: Any, steps: list[Step], scene: Scene) -> tuple[Any, list[Step]]:
    """Returns where a subscript with these steps begins, and all of its steps."""
    while isinstance(operand, fx.Node) and operand.target in _OPERANDS:
        name, operands = _OPERANDS[operand.target]
        if scene.source(operand).text.isidentifier() or (name == "unsqueeze" and not is_a_subscript(operand)):
            break
        step = step_of(name, dict(zip(operands, operand.args, strict=False)) | operand.kwargs)
        if step is None or places_of([step, *steps]) is None:
            break
        operand, steps = operand.args[0], [step, *steps]
    return operand, steps


def step_of(name: str, values: Mapping[str, Any]) -> Step | None:
    """Returns what a slice, select or unsqueeze has in a subscript, or None for what cannot stand there."""
    dimension = values.get("dim", 0)
    if not isinstance(dimension, int) or not 0 <= dimension < _MOST_PLACES:
        return None
    if name == "unsqueeze":
        return Step(dimension, None)
    if name == "select":
        index = values["index"]
        return Step(dimension, index) if isinstance(index, int) else None
    start, end = values.get("start"), values.get("end")
    bounds = slice(
        None if start == 0 and type(start) is int else start,
        None if isinstance(end, int) and end >= 2**62 else end,
        values.get("step"),
    )
    return None if _is_tensor(bounds.start) or _is_tensor(bounds.stop) else Step(dimension, bounds)


def _is_tensor(bound: Any) -> bool:
    return isinstance(bound, fx.Node) and not isinstance(bound.meta.get("val"), int | torch.SymInt)


def _is_a_list_of_places(index: Any) -> bool:
    """Whether an index takes one place: a mask may take several, and a number is no tensor to torch."""
    value = index.meta.get("val") if isinstance(index, fx.Node) else None
    return isinstance(value, torch.Tensor) and value.dtype in _INDICES and value.dim() > 0


def places_of(steps: Sequence[Step]) -> list[int | slice | None] | None:
    """Returns the places of one subscript, or None where torch would take it apart into other operators.

    Torch goes through a subscript from left to right.
    """
    places, last = list[int | slice | None](), -1
    for step in steps:
        at = _position(places, step.dimension)
        if at <= last:
            return None
        if step.place is None:
            places.insert(at, None)
        elif places[at] != _WHOLE:
            return None
        else:
            places[at] = step.place
        last = at
    while places and places[-1] == _WHOLE and len(places) > last + 1:
        places.pop()
    return places


def _position(places: list[int | slice | None], dimension: int) -> int:
    """Returns where a dimension of what the places give stands among them, which may become more."""
    kept = [at for at, place in enumerate(places) if not isinstance(place, int)]
    while len(kept) <= dimension:
        kept.append(len(places))
        places.append(_WHOLE)
    return kept[dimension]


def _new_dimensions(values: Mapping[str, Any], scene: Scene, *, least: int) -> Source | None:
    """Spells unsqueezes in a row, from `least` on, as one subscript."""
    base, dimensions = values["self"], [values["dim"]]
    while isinstance(base, fx.Node) and base.target is torch.ops.aten.unsqueeze.default:
        if scene.source(base).text.isidentifier():
            break
        dimensions.append(base.args[1])
        base = base.args[0]
    if len(dimensions) < least or not isinstance(base.meta.get("val"), torch.Tensor):
        return None
    places = [":"] * base.meta["val"].dim()
    for dimension in reversed(dimensions):
        places.insert(dimension if dimension >= 0 else len(places) + 1 + dimension, "None")
    while len(dimensions) == 1 and places[-1] == ":":
        places.pop()
    return Source(f"{scene.receiver(base)}[{', '.join(places)}]")
