"""Writes all that repeats in a body as loops: over members, over numbers, and as comprehensions.

A sum that begins with 0 is taken apart where that makes the first round like the others; the author's own
`sum` is among them, whose first addition is `x + 0`:

total = 0 + self.f[0](x)              total = 0
total = total + self.f[1](x)    ->    for f in self.f:
                                          total = total + f(x)
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import replace

from pd2bw_fx.passes.codegen.attributes import Attributes
from pd2bw_fx.passes.codegen.layout import REFERENCE, region_of
from pd2bw_fx.passes.codegen.written import Statement

from .comprehensions import as_comprehensions
from .entries import Entry, entry_text, num_lines, with_text
from .given import with_lists_in_headers
from .members import rolled
from .over_members import over_members
from .rolling import in_rounds
from .sums import sum_of_names, with_sums
from .together import together

_SUM_OF_AUTHORS = re.compile(r"(\w+) = (.+) \+ 0")
_SUM_FROM_ZERO = re.compile(r"(\w+) = (0|0\.0) \+ (.+)")


def rolled_up(body: Sequence[Statement], attributes: Attributes, arguments: Sequence[str]) -> list[Entry]:
    """Returns the body of a function of these arguments with loops in place of what repeats."""
    body = with_sums(body, attributes)
    found = in_rounds(rolled(body, attributes), attributes, arguments)
    zeros, rest = _taken_apart(body)
    if len(zeros) + len(rest) > len(body):
        entries = in_rounds(rolled([*zeros, *rest], attributes), attributes, arguments)
        if sum(map(num_lines, entries)) <= sum(map(num_lines, found)):
            found = _each_where_it_is_needed(entries[: len(zeros)], entries[len(zeros) :])
    found = over_members(together(as_comprehensions(found, attributes)), attributes)
    return [with_text(entry, sum_of_names) for entry in with_lists_in_headers(found)]


def _taken_apart(body: Sequence[Statement]) -> tuple[list[Statement], list[Statement]]:
    """Takes `total = 0` out of each `total = 0 + x`; returns these where the name is new, and the rest."""
    zeros: list[Statement] = []
    rest: list[Statement] = []
    mentioned: set[str] = set()
    for statement in body:
        name, zero, added = from_zero(statement.text)
        if name and name not in re.findall(r"\w+", added):
            begin = Statement(f"{name} = {zero}", region=statement.region)
            (rest if name in mentioned else zeros).append(begin)
            statement = replace(statement, text=f"{name} = {name} + {added}")
        rest.append(statement)
        mentioned |= set(re.findall(r"\w+", statement.text))
    return zeros, rest


def from_zero(text: str) -> tuple[str, str, str]:
    """Returns the name, the zero and what is added to it of `total = 0 + x`, or of `total = x + 0`."""
    found = _SUM_FROM_ZERO.fullmatch(text)
    if found is not None:
        return found[1], found[2], found[3]
    found = _SUM_OF_AUTHORS.fullmatch(text)
    if found is None or not _is_a_term(REFERENCE.sub("x", found[2])):
        return "", "", ""
    return found[1], "0", found[2]


def _is_a_term(text: str) -> bool:
    """Whether an expression can be added as it is: `2 * f(x)`, but neither `a + b` nor `a == b`."""
    try:
        parsed = ast.parse(text, mode="eval").body
    except SyntaxError:
        return False
    if isinstance(parsed, ast.BinOp):
        return isinstance(parsed.op, ast.Mult | ast.Div | ast.MatMult | ast.FloorDiv | ast.Pow)
    return isinstance(parsed, ast.Call | ast.Name | ast.Attribute | ast.Subscript)


def _each_where_it_is_needed(zeros: Sequence[Entry], entries: Sequence[Entry]) -> list[Entry]:
    """Puts each `total = 0` in front of what mentions the name first."""
    found = list(entries)
    for zero in zeros:
        assert isinstance(zero, Statement)
        name = zero.text.partition(" ")[0]
        needed = next(at for at, entry in enumerate(found) if re.search(rf"\b{name}\b", entry_text(entry)))
        found.insert(needed, replace(zero, region=region_of(found[needed])))
    return found
