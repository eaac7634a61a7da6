"""Unfolds alike: where a value gets a line of its own, those at its place in other rounds get one too."""

from __future__ import annotations

from torch import fx

from pd2bw_fx.passes.codegen.folding import Folding
from pd2bw_fx.passes.codegen.naming import operator_name
from pd2bw_fx.passes.codegen.scopes import Scope


def unfold_alike(folding: Folding, nodes: set[fx.Node]) -> set[fx.Node]:
    """Adds to these nodes those at their places in other rounds, where a line might be just short enough."""
    places = {_place(folding, node) for node in nodes}
    found = set(nodes)
    for node in folding.folded if places - {None} else ():
        is_of_rounds = folding.body.is_of_rounds(folding.items[folding.maker[node]])
        if is_of_rounds and _place(folding, node) in places - {None}:
            found.add(node)
    return found


def _place(folding: Folding, node: fx.Node) -> tuple[object, ...] | None:
    """Returns the author's line, what is computed there, and what reads it; None if it is not known."""
    line = folding.body.line(folding.items[folding.maker[node]])
    if line is None:
        return None
    readers = (folding.items[at] for at in folding.users.get(node, ()) if at < folding.end)
    return line, _outline(folding, node), tuple(map(_name, readers))


def _outline(folding: Folding, node: fx.Node) -> tuple[object, ...]:
    """Returns the name of an operator, with those of the operators folded into it, level by level."""
    item = folding.items[folding.maker[node]]
    operands = folding.body.operands_of(item)
    return _name(item), *(_outline(folding, o) if o in folding.folded else None for o in operands)


def _name(item: fx.Node | Scope) -> str:
    return item.path if isinstance(item, Scope) else operator_name(item)
