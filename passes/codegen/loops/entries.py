"""A body as statements and loops, which may be nested."""

from __future__ import annotations

import bisect
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from pd2bw_fx.passes.codegen.attributes import Attributes
from pd2bw_fx.passes.codegen.layout import Loop, resolve
from pd2bw_fx.passes.codegen.literals import STRING, identifier
from pd2bw_fx.passes.codegen.written import Statement

from .tokens import Flow, computed, line_of

Entry = Statement | Loop


def resolved_entries(entries: Sequence[Entry], attributes: Attributes) -> Iterator[Entry]:
    for entry in entries:
        if isinstance(entry, Loop):
            yield replace(entry, body=tuple(resolved_entries(entry.body, attributes)))
        else:
            yield replace(entry, text=resolve(entry.text, attributes))


def with_text(entry: Entry, change: Callable[[str], str]) -> Entry:
    """Returns an entry, also a loop's statements, with its text changed."""
    if isinstance(entry, Loop):
        return replace(entry, body=tuple(with_text(inner, change) for inner in entry.body))
    return replace(entry, text=change(entry.text))


def with_zeros(text: str) -> str:
    """Writes where slices begin, as in `x[0:1]`: the round behind it has `x[1:2]`."""
    return _FROM_THE_START.sub(lambda match: match[0] if len(match[0]) > 1 else "0:", text)


def without_zeros(text: str) -> str:
    return _FROM_ZERO.sub(lambda match: ":" if match[0].startswith("0") else match[0], text)


_RETURNS_SEVERAL = re.compile(r"return \w+(?:, \w+)+")
_IDLE = re.compile(r"(\w+) = \1")
_APPENDS = re.compile(r"\w+\.append\(")
_FROM_THE_START = re.compile(rf"{STRING}|(?<=[\[ ]):(?=\d)")
_FROM_ZERO = re.compile(rf"{STRING}|(?<=[\[ ])0 ?:")


def outline(entry: Entry) -> tuple[object, ...]:
    """Returns what an entry has in common with the same line of another round."""
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
    """A body in tokens, with what every attempt to find rounds in it needs, worked out once."""

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
        """What the lines compute, whatever names they use."""
        return list(computed(self.lines))

    @functools.cached_property
    def num_lines(self) -> int:
        return sum(map(num_lines, self.entries))

    @functools.cached_property
    def reads(self) -> dict[int | str, list[tuple[int, int]]]:
        """The places of each value as (line, token); the first makes it, if the body makes it at all."""
        found: dict[int | str, list[tuple[int, int]]] = {}
        for line, values in enumerate(self.flow.values):
            for at, value in sorted(values.items()):
                found.setdefault(value, []).append((line, at))
        return found

    def reads_from(self, line: int, value: int | str) -> list[tuple[int, int]]:
        places = self.reads.get(value, [])
        return places[bisect.bisect_left(places, (line, -1)) :]

    def most_rounds(self, start: int, length: int) -> int:
        """Counts the rounds of `length` entries with equal outlines that follow one another from `start`.

        There is but one where the body returns by itself what the first round makes.
        """
        if bisect.bisect_left(self._returned, start) < bisect.bisect_left(self._returned, start + length):
            return 1
        if length not in self._repeats:
            self._repeats[length] = self._repeating(length)
        return 1 + self._repeats[length][start] // length

    def _repeating(self, length: int) -> list[int]:
        """Counts, for each place, how many entries from there on may be those `length` places later."""
        outlines, found = self.outlines, [0] * len(self.outlines)
        for at in reversed(range(len(outlines) - length)):
            is_alike = outlines[at] == outlines[at + length] and self._read_alike(at, at + length)
            found[at] = found[at + 1] + 1 if is_alike else 0
        return found

    def _read_alike(self, line: int, other: int) -> bool:
        """Whether two lines read the same at each place where both read something from outside the body.

        In rounds of the author's loop they may read one after another.
        """
        one, another = self.entries[line], self.entries[other]
        if isinstance(one, Statement) and isinstance(another, Statement) and one.round.loop:
            return one.round.loop == another.round.loop
        names = self._from_outside[other]
        return all(names.get(at, name) == name for at, name in self._from_outside[line].items())

    @functools.cached_property
    def _returned(self) -> list[int]:
        """The entries that make one of several values that the body returns: `return x, skip`."""
        last = len(self.entries) - 1
        if last < 0 or not _RETURNS_SEVERAL.fullmatch(entry_text(self.entries[last])):
            return []
        values = (value for value in self.flow.values[last].values() if isinstance(value, int))
        return sorted({self.flow.makers[value][0] for value in values})

    @functools.cached_property
    def _from_outside(self) -> list[dict[int, str]]:
        """The names that each line reads from outside the body, by their places."""
        return [{at: v for at, v in values.items() if isinstance(v, str)} for values in self.flow.values]


def num_lines(entry: Entry) -> int:
    """Counts lines; a loop that only fills a list adds none to the line that makes the list."""
    if isinstance(entry, Statement):
        return 1
    inside = entry.body[0]
    if len(entry.body) == 1 and isinstance(inside, Statement) and _APPENDS.match(inside.text):
        return 0
    return 1 + (entry.first is not None) + sum(map(num_lines, entry.body))


def without_number(name: str) -> str:
    """Returns "out" for "out_6", and "sum_" for "sum_2"."""
    plain = re.sub(r"_\d+$", "", name)
    return name if plain == name else identifier(plain)


def with_plain_names(body: Sequence[Entry], arguments: Sequence[str]) -> list[Entry]:
    """Renames out_6 to out where the body has no other out any more, and it is no argument."""
    whole = line_of("\n".join(map(entry_text, body)), is_loop=True)
    taken = {*whole.names, *arguments}
    names: dict[str, str] = {argument: argument for argument in arguments}
    for name in whole.assigned:
        plain = without_number(name)
        if name not in names and plain not in taken:
            names[name] = plain
            taken.add(plain)
    renamed = (_renamed(entry, names) for entry in body)
    return [entry for entry in renamed if not (isinstance(entry, Statement) and _IDLE.fullmatch(entry.text))]


def _renamed(entry: Entry, names: Mapping[str, str]) -> Entry:
    def other(text: str) -> str:
        return "".join(
            names.get(t.text, t.text) if t.kind == "name" else t.text for t in line_of(text).tokens
        )

    if isinstance(entry, Statement):
        return replace(entry, text=other(entry.text))
    first = None if entry.first is None else other(entry.first)
    return Loop(other(entry.header), tuple(_renamed(e, names) for e in entry.body), first)
