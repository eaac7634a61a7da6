"""Statements and loops of a body, one inside another."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from .attributes import Attributes
from .layout import Loop, resolve
from .method import Statement
from .tokens import line_of

Entry = Statement | Loop


def resolved_entries(entries: Sequence[Entry], attributes: Attributes) -> Iterator[Entry]:
    for entry in entries:
        if isinstance(entry, Loop):
            yield replace(entry, body=tuple(resolved_entries(entry.body, attributes)))
        else:
            yield replace(entry, text=resolve(entry.text, attributes))


def outline(entry: Entry) -> tuple[object, ...]:
    """What the same line of another round has in common with it."""
    if isinstance(entry, Loop):
        return entry.header, entry.first, tuple((outline(e), entry_text(e)) for e in entry.body)
    kinds = [t.text if t.kind == "text" else t.kind for t in line_of(entry.text).tokens]
    return entry.place, entry.region, tuple(kinds)


def entry_text(entry: Entry) -> str:
    if isinstance(entry, Statement):
        return entry.text
    first = () if entry.first is None else (entry.first,)
    return "\n".join([*first, entry.header, *map(entry_text, entry.body)])


def num_lines(entry: Entry) -> int:
    if isinstance(entry, Statement):
        return 1
    return 1 + (entry.first is not None) + sum(map(num_lines, entry.body))


def with_plain_names(body: Sequence[Entry]) -> list[Entry]:
    """out_6 is called out where there is no other out any more."""
    whole = line_of("\n".join(map(entry_text, body)), is_loop=True)
    taken = whole.names
    names: dict[str, str] = {}
    for name in whole.assigned:
        plain = re.sub(r"_\d+$", "", name)
        if name not in names and plain not in taken:
            names[name] = plain
            taken.add(plain)
    return [_renamed(entry, names) for entry in body]


def _renamed(entry: Entry, names: Mapping[str, str]) -> Entry:
    def other(text: str) -> str:
        return "".join(
            names.get(t.text, t.text) if t.kind == "name" else t.text for t in line_of(text).tokens
        )

    if isinstance(entry, Statement):
        return replace(entry, text=other(entry.text))
    first = None if entry.first is None else other(entry.first)
    return Loop(other(entry.header), tuple(_renamed(e, names) for e in entry.body), first)
