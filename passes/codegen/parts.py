"""Whether the parts of a tensor, which one operator makes, are variables or entries of a list.

first, second = x.chunk(2, dim=-1)        or        chunks = x.chunk(2, dim=-1)
y = first * second.sigmoid()                        y = chunks[0] * chunks[1].sigmoid()
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from .naming import is_final, operator_name
from .scopes import Line, Scope
from .statements import PARTS, takes_apart

_MOST_VARIABLES = 4  # without names of the author's: more are one list


def name_of_list(
    line: Line | None, item: fx.Node | Scope, elements: Mapping[int, fx.Node | None], *, are_numbers: bool
) -> str | None:
    """Returns the name of a list for parts that the author has given no names, or None.

    It is a list where the author's line gives one name to all of them, and where there are many, or numbers.
    """
    operator = "" if isinstance(item, Scope) else operator_name(item)
    if operator not in PARTS or len(elements) < 2:
        return None
    names = line.assigned if line is not None and takes_apart(line.code, operator) else ()
    if len(names) == 1 and names[0] != "_":
        return names[0]
    if are_numbers:
        return "numbers"
    return "parts" if len(elements) > _MOST_VARIABLES and None not in elements.values() else None


def names_of_parts(
    line: Line | None, item: fx.Node | Scope, elements: Mapping[int, fx.Node | None], depth: int
) -> dict[int, str]:
    """Returns the names that the author's line gives elements, by place (`q, k = ..`)."""
    names = line.assigned if line is not None else ()
    if line is None or len(names) != len(elements) or not _makes_what_is_named(line, item, elements, depth):
        return {}
    return {place: name for place, name in enumerate(names) if name != "_"}


def _makes_what_is_named(
    line: Line, item: fx.Node | Scope, elements: Mapping[int, fx.Node | None], depth: int
) -> bool:
    """Whether the names on the line are those of this operator's elements.

    A function on the line may return the elements in another order, or something made of them.
    """
    if isinstance(item, Scope) or takes_apart(line.code, operator_name(item)):
        return True
    is_plain = all(is_final(element, depth) for element in elements.values() if element is not None)
    return operator_name(item) == "unbind" and is_plain
