"""Statements and loops of a body, one inside another."""

from __future__ import annotations

import bisect
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from .attributes import Attributes
from .layout import Loop, resolve
from .method import Statement
from .tokens import Flow, computed, line_of

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


class BodyLines:
    """A body in tokens: what every attempt to find rounds in it asks for, worked out once."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.entries = entries
        self.lines = [line_of(entry_text(entry), is_loop=isinstance(entry, Loop)) for entry in entries]
        numbers: dict[object, int] = {}
        self.outlines = [numbers.setdefault(outline(entry), len(numbers)) for entry in entries]
        self._repeats: dict[int, list[int]] = {}

    @functools.cached_property
    def flow(self) -> Flow:
        return Flow(self.lines)

    @functools.cached_property
    def names(self) -> frozenset[str]:
        return frozenset[str]().union(*(line.names for line in self.lines))

    @functools.cached_property
    def assigned(self) -> frozenset[str]:
        return frozenset(name for line in self.lines for name in line.assigned)

    @functools.cached_property
    def computed(self) -> list[tuple[object, ...]]:
        """What the lines do, whatever their names are."""
        return list(computed(self.lines))

    @functools.cached_property
    def num_lines(self) -> int:
        return sum(map(num_lines, self.entries))

    @functools.cached_property
    def reads(self) -> dict[int | str, list[tuple[int, int]]]:
        """Line and token of each value, the first of which makes it unless it is from before."""
        found: dict[int | str, list[tuple[int, int]]] = {}
        for line, values in enumerate(self.flow.values):
            for at, value in sorted(values.items()):
                found.setdefault(value, []).append((line, at))
        return found

    def reads_from(self, line: int, value: int | str) -> list[tuple[int, int]]:
        places = self.reads.get(value, [])
        return places[bisect.bisect_left(places, (line, -1)) :]

    def most_rounds(self, start: int, length: int) -> int:
        """How many rounds of `length` entries follow one another from `start` on, by their outlines."""
        if length not in self._repeats:
            self._repeats[length] = _repeats(self.outlines, length)
        return 1 + self._repeats[length][start] // length


def _repeats(outlines: Sequence[int], length: int) -> list[int]:
    """For each place how many outlines from there on are those of `length` places behind them."""
    found = [0] * len(outlines)
    for at in reversed(range(len(outlines) - length)):
        found[at] = found[at + 1] + 1 if outlines[at] == outlines[at + length] else 0
    return found


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
