"""What is folded at the same places of a loop's rounds: where one gets a line of its own, all of them do."""

from __future__ import annotations

from torch import fx

from .author_loops import NO_ROUND, round_of
from .body import Folding
from .naming import operator_name
from .scopes import Scope


def alike(folding: Folding, nodes: set[fx.Node]) -> set[fx.Node]:
    """These, and what stands for them in other rounds, where a line might be just short enough."""
    places = {_place(folding, node) for node in nodes}
    found = set(nodes)
    for node in folding.folded if places - {None} else ():
        is_of_rounds = folding.body.is_of_rounds(folding.items[folding.maker[node]])
        if is_of_rounds and _place(folding, node) in places - {None}:
            found.add(node)
    return found


def _place(folding: Folding, node: fx.Node) -> tuple[object, ...] | None:
    """The author's line within a loop, what is computed there, and what reads it."""
    line = folding.body.line(folding.items[folding.maker[node]])
    if line is None or round_of(line) is NO_ROUND:
        return None
    readers = (folding.items[at] for at in folding.users.get(node, ()) if at < folding.end)
    return line, _outline(folding, node), tuple(map(_name, readers))


def _outline(folding: Folding, node: fx.Node) -> tuple[object, ...]:
    """An operator with what is folded into it, and into that."""
    item = folding.items[folding.maker[node]]
    operands = folding.body.operands_of(item)
    return _name(item), *(_outline(folding, o) if o in folding.folded else None for o in operands)


def _name(item: fx.Node | Scope) -> str:
    return item.path if isinstance(item, Scope) else operator_name(item)
