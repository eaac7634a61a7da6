"""Lays out lines as ruff format does, with loops and regions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace

from .attributes import Attributes
from .body import NO_REGION, Region
from .breaking import brackets, needs_parentheses, operands, parted, spaced, top_level
from .written import Statement

WIDTH = 110
REFERENCE = re.compile("\ue000([^\ue001]*)\ue001")


@dataclass(frozen=True, slots=True)
class Loop:
    """Runs `body` once for each member of the containers; `first` is a statement in front of it, if any."""

    header: str
    body: tuple[Statement | Loop, ...]
    first: str | None = None


def resolve(text: str, attributes: Attributes) -> str:
    """Replaces module references by expressions for what __init__ builds."""
    return REFERENCE.sub(lambda match: attributes.refer(match[1]), text)


def common(statements: Sequence[Statement]) -> Statement:
    """Returns the last of the statements at a place, with its shape only where all of them have the same."""
    alike = len({statement.shape for statement in statements}) == 1
    return statements[-1] if alike else replace(statements[-1], shape=())


def free(name: str, words: Set[str]) -> str:
    """Returns the name, with underscores added until it is none of `words`, which the body uses."""
    while name in words:
        name += "_"
    return name


def written(entries: Sequence[Statement | Loop], attributes: Attributes, indent: int) -> Iterator[str]:
    """Yields the lines of a body; `with` statements are entered anew wherever the region changes."""
    region = NO_REGION
    for entry in entries:
        wanted = region_of(entry)
        if wanted != region:
            region = wanted
            for depth, line in enumerate(_region_headers(region)):
                yield " " * (indent + 4 * depth) + line
        yield from _entry_lines(entry, attributes, indent + 4 * len(_region_headers(region)))


def _entry_lines(entry: Statement | Loop, attributes: Attributes, indent: int) -> Iterator[str]:
    if isinstance(entry, Statement):
        yield from laid_out(resolve(entry.text, attributes), indent, entry.comment)
        return
    if entry.first is not None:
        yield " " * indent + entry.first
    yield " " * indent + entry.header
    for inner in entry.body:
        yield from _entry_lines(inner, attributes, indent + 4)


def region_of(entry: Statement | Loop) -> Region:
    """Returns the region of an entry, which all statements of a loop share."""
    return entry.region if isinstance(entry, Statement) else region_of(entry.body[0])


def _region_headers(region: Region) -> list[str]:
    no_grad, autocast, _ = region
    headers = []
    if no_grad is not None:
        headers.append("with torch.no_grad():" if no_grad else "with torch.enable_grad():")
    if autocast is not None:
        device_type, dtype, enabled = autocast
        kind = f", dtype={dtype}" if enabled and dtype is not None else ""
        headers.append(f"with torch.autocast({device_type}{kind}{'' if enabled else ', enabled=False'}):")
    return headers


def laid_out(text: str, indent: int, comment: str = "") -> Iterator[str]:
    """Yields a statement or item on one line if it fits, else broken as ruff format does it."""
    pad, text = " " * indent, spaced(text)
    if len(pad + text) <= WIDTH:
        remark = f"  # {comment}" if comment else ""
        yield pad + text + (remark if len(pad + text + remark) <= WIDTH else "")
        return
    head, value = parted(text)
    items = top_level(value)
    is_tuple = head == "return " and len(items) > 1
    if not head or not (is_tuple or needs_parentheses(value)):
        yield from _opened(text, len(head), indent, comment)
        return
    yield f"{pad}{head}(" + _remark(f"{pad}{head}(", comment)
    for item in [f"{item}," for item in items] if is_tuple else [value]:
        yield from _inside(item, indent + 4)
    yield f"{pad})"


def _remark(line: str, comment: str) -> str:
    return f"  # {comment}" if comment and len(line + comment) + 4 <= WIDTH else ""


def _inside(value: str, indent: int) -> Iterator[str]:
    """Lays out what stands alone in its brackets."""
    if indent + len(value) <= WIDTH:
        yield " " * indent + value
        return
    clause = _clause_of_comprehension(value)
    if clause is not None:
        yield from _inside(value[:clause], indent)
        yield " " * indent + value[clause + 1 :]
        return
    end = "," if value.endswith(",") else ""
    *lines, last = operands(value.removesuffix(","))
    for line in [*lines, last + end]:
        yield from _opened(line, 0, indent)


def _opened(text: str, start: int, indent: int, comment: str = "") -> Iterator[str]:
    """Breaks a line that is too long at one of its brackets from `start` on.

    It opens the first bracket behind which the next one does not fit, else the last one.
    """
    pad = " " * indent
    if len(pad + text) <= WIDTH:
        yield pad + text
        return
    found = brackets(text, start)
    stops = [a + 1 for a, _ in found[1:]]
    fits = [len(pad + text[:stop]) <= WIDTH for stop in stops]
    if not found:
        yield pad + text
        return
    opening, closing = found[fits.index(False) if False in fits else -1]
    head, inside, tail = text[: opening + 1], text[opening + 1 : closing], text[closing:]
    yield pad + head + _remark(pad + head, comment)
    items = top_level(inside)
    if len(pad + inside) + 4 <= WIDTH:
        yield f"{pad}    {inside}"
    elif len(items) == 1:
        yield from _inside(inside, indent + 4)
    else:
        for item in items:
            yield from _inside(f"{item},", indent + 4)
    yield from _opened(tail, 1, indent)


def signature_lines(name: str, parameters: Sequence[str], returned: str, indent: int) -> Iterator[str]:
    """Yields the head of a function."""
    pad, joined, end = " " * indent, ", ".join(parameters), f") -> {returned}:"
    if len(f"{pad}def {name}({joined}{end}") <= WIDTH:
        yield f"{pad}def {name}({joined}{end}"
        return
    yield f"{pad}def {name}("
    if len(pad + joined) + 4 <= WIDTH:
        yield f"{pad}    {joined}"
    else:
        yield from (f"{pad}    {parameter}," for parameter in parameters)
    yield pad + end


def _clause_of_comprehension(text: str) -> int | None:
    """Returns where ` for i in range(4)` begins at the end of a text outside brackets, or None."""
    found = re.search(r" for \w+ in (?:range\([\d, ]+\)|[\w.]+)$", text)
    return None if found is None or len(top_level(text)) > 1 else found.start()
