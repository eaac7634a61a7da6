"""Writes all that repeats in a body as loops: over members, over numbers, and as comprehensions.

A sum that begins with 0 is taken apart where that makes the first round like the others:

total = 0 + self.f[0](x)              total = 0
total = total + self.f[1](x)    ->    for f in self.f:
                                          total = total + f(x)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from pd2bw_fx.passes.codegen.attributes import Attributes
from pd2bw_fx.passes.codegen.layout import region_of
from pd2bw_fx.passes.codegen.written import Statement

from .comprehensions import as_comprehensions
from .entries import Entry, entry_text, num_lines
from .given import with_lists_in_headers
from .members import rolled
from .over_members import over_members
from .rolling import in_rounds
from .sums import with_sums
from .together import together

_SUM_FROM_ZERO = re.compile(r"(\w+) = (0|0\.0) \+ (.+)")


def rolled_up(body: Sequence[Statement], attributes: Attributes) -> list[Entry]:
    """Returns the body with loops in place of what repeats."""
    body = with_sums(body, attributes)
    found = in_rounds(rolled(body, attributes), attributes)
    zeros, rest = _taken_apart(body)
    if zeros:
        entries = in_rounds(rolled([*zeros, *rest], attributes), attributes)
        if sum(map(num_lines, entries)) <= sum(map(num_lines, found)):
            found = _each_where_it_is_needed(entries[: len(zeros)], entries[len(zeros) :])
    found = over_members(together(as_comprehensions(found, attributes)), attributes)
    return with_lists_in_headers(found)


def _taken_apart(body: Sequence[Statement]) -> tuple[list[Statement], list[Statement]]:
    """Takes `total = 0` out of each `total = 0 + x` whose name is new; returns these, and the rest."""
    zeros: list[Statement] = []
    rest: list[Statement] = []
    mentioned: set[str] = set()
    for statement in body:
        found = _SUM_FROM_ZERO.fullmatch(statement.text)
        if found is not None and found[1] not in mentioned | set(re.findall(r"\w+", found[3])):
            zeros.append(Statement(f"{found[1]} = {found[2]}"))
            statement = replace(statement, text=f"{found[1]} = {found[1]} + {found[3]}")
        rest.append(statement)
        mentioned |= set(re.findall(r"\w+", statement.text))
    return zeros, rest


def _each_where_it_is_needed(zeros: Sequence[Entry], entries: Sequence[Entry]) -> list[Entry]:
    """Puts each `total = 0` in front of what mentions the name first."""
    found = list(entries)
    for zero in zeros:
        assert isinstance(zero, Statement)
        name = zero.text.partition(" ")[0]
        needed = next(at for at, entry in enumerate(found) if re.search(rf"\b{name}\b", entry_text(entry)))
        found.insert(needed, replace(zero, region=region_of(found[needed])))
    return found
