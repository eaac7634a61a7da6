"""Writes the author's `sum(f(x) for f in self.fs)`, of which a trace has the additions, as a sum again.

total = self.fs[0](x) + 0
total = total + self.fs[1](x)              return self.out(sum(f(x) for f in self.fs))
return self.out(total + self.fs[2](x))  ->

`sum` begins with 0, and the operators stand in the order of its additions, so that it computes the same.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from pd2bw_fx.passes.codegen.attributes import Attributes
from pd2bw_fx.passes.codegen.layout import REFERENCE, WIDTH, Loop, resolve
from pd2bw_fx.passes.codegen.literals import is_plain_name
from pd2bw_fx.passes.codegen.written import Statement

from .members import rolled

_BEGINS = re.compile(r"(\w+) = (.+?)( \+ 0)( \+ .+)?")
_ZERO = " + 0 + "
_NAMES_FROM_ZERO = re.compile(r"(?<![\w.])[A-Za-z_]\w* \+ 0(?: \+ [A-Za-z_]\w*(?![\w.(\[]| [*/@%]))+")
_MARGIN = 8  # of a method's lines
_LONGEST_OF_NAMES = 96  # characters of a line that adds up values of other lines


def with_sums(body: Sequence[Statement], attributes: Attributes) -> list[Statement]:
    """Returns the body with sums over members in place of their additions."""
    found = list(body)
    for at in reversed(range(len(found))):
        joined, count = _in_one_line(found, at)
        text = joined.text if joined is not None else ""
        summed = _summed(text, attributes)
        if summed is None and count > 1 and len(text) <= _LONGEST_OF_NAMES and _are_names(text):
            summed = text
        if joined is not None and summed is not None:
            found[at : at + count] = [replace(joined, text=summed)]
    return found


def sum_of_names(text: str) -> str:
    """Writes `a + 0 + b`, the additions of the author's `sum`, as `sum([a, b])` where all of them are names.

    Of other expressions, the list would compute all before it adds the first two.
    """
    for found in _NAMES_FROM_ZERO.finditer(text):
        before, after = text[: found.start()], text[found.end() :]
        if _may_begin(before) and _may_follow(after):
            if re.search("(^|[^\\w\\])\ue001])\\($", before) and after.startswith(")"):
                before, after = before[:-1], after[1:]  # the sum had brackets of its own
            return f"{before}sum([{', '.join(found[0].replace(' + 0', '').split(' + '))}]){after}"
    return text


def _in_one_line(body: Sequence[Statement], at: int) -> tuple[Statement | None, int]:
    """Returns the additions that begin at a line as one statement, and how many lines they are."""
    first = body[at]
    begins = _BEGINS.fullmatch(first.text)
    if begins is None or _begin_of_term(first.text, begins.start(3)) != begins.start(2):
        return (first, 1) if _ZERO in first.text else (None, 0)
    total, added = begins[1], first.text[begins.start(2) :]
    for number, statement in enumerate(body[at + 1 :], at + 1):
        is_alike = (statement.region, statement.place) == (first.region, first.place)
        reads = re.findall(rf"\b{total}\b", statement.text)
        if not is_alike or not reads:
            break
        adds = f"{total} = {total} + "
        if statement.text.startswith(adds) and len(reads) == 2:
            added += f" + {statement.text.removeprefix(adds)}"
            continue
        before, _, after = statement.text.partition(f"{total} + ")
        later = " ".join(each.text for each in body[number + 1 :])
        if len(reads) > 1 or not after or not _may_begin(before) or re.search(rf"\b{total}\b", later):
            break
        return replace(statement, text=f"{before}{added} + {after}"), number - at + 1
    return (first, 1) if begins[4] else (None, 0)


def _summed(text: str, attributes: Attributes) -> str | None:
    """Returns a line with a sum in place of its additions; None where they are not those of all members."""
    end = text.find(_ZERO)
    if end < 0:
        return None
    begin = _begin_of_term(text, end)
    before, term = text[:begin], text[begin:end]
    pattern = "".join(
        re.escape(part) if place % 2 == 0 else "\ue000([^\ue001]*)\ue001"
        for place, part in enumerate(REFERENCE.split(term))
    )
    terms, rest = [term], text[end + len(_ZERO) - len(" + ") :]
    while (another := re.match(rf" \+ (?:\(({pattern})\)|({pattern}))", rest)) is not None:
        terms.append(another[1] or another[0].removeprefix(" + "))
        rest = rest[another.end() :]
    if len(terms) < 2 or not _may_begin(before) or not _may_follow(rest):
        return None
    entries = rolled([Statement(f"_ = {each}") for each in terms], attributes)
    if len(entries) != 1 or not isinstance(entries[0], Loop) or entries[0].first is not None:
        return None
    (inside,) = entries[0].body
    assert isinstance(inside, Statement)
    whole = f"sum({inside.text.removeprefix('_ = ')} {entries[0].header.removesuffix(':')})"
    has_own_brackets = re.search("(^|[^\\w\\])\ue001])\\($", before) and rest.startswith(")")
    if has_own_brackets:
        before, rest = before[:-1], rest[1:]
    summed = f"{before}{whole}{rest}"
    # A line that is broken reads no better than the additions.
    return summed if len(resolve(summed, attributes)) <= WIDTH - _MARGIN else None


def _begin_of_term(text: str, end: int) -> int:
    """Returns where the expression that ends there begins: behind a bracket, a comma, `=` or `return`."""
    depth = 0
    for at in range(end - 1, -1, -1):
        depth += (text[at] in ")]}") - (text[at] in "([{")
        if depth < 0:
            return at + 1
        if depth == 0 and text[: at + 1].endswith((", ", "= ", "return ")):
            return at + 1
    return 0


def _may_begin(before: str) -> bool:
    return before == "return " or before.endswith((" = ", "(", "[", ", "))


def _may_follow(rest: str) -> bool:
    return not rest or rest.startswith((")", "]", ",", " + ", " - "))


def _are_names(text: str) -> bool:
    """Whether all that is added to 0 are names."""
    end = text.find(_ZERO)
    first, others = text[_begin_of_term(text, end) : end], re.match(r"[\w +]+", text[end:])
    return is_plain_name(first) and others is not None and _may_follow(text[end + others.end() :])
