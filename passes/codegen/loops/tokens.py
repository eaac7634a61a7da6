"""Statements of a body as tokens, and which value each name in them stands for."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pd2bw_fx.passes.codegen.literals import STRING

_TOKEN = re.compile(
    rf"{STRING}"
    r"|(?P<name>(?<![\w.])[A-Za-z_]\w*(?!\w)(?!=(?!=)))"  # neither an attribute nor a keyword
    r"|(?P<number>(?<![\w.])\d+(?:\.\d+)?(?:e[+-]?\d+)?(?!\w))"
    r"|\w+|\s+|.",
    re.DOTALL,
)
_TARGETS = re.compile(r"[\w, ()]+? = ")
_ALIAS = re.compile(r"(\w+) = (\w+)")
_LIST = re.compile(r"(\w+) = \[(?:(\*?\w+(?:\[::-1\])?(?:, \*?\w+(?:\[::-1\])?)*))?\]")
_LIST_AGAIN = re.compile(r"(\w+) = (\w+(?:\[::-1\])?)")
_APPENDED = re.compile(r"(\w+)\.append\((.*)\)")
REVERSED = "[::-1]"
SUM = "sum"


@dataclass(frozen=True, slots=True)
class Token:
    """A token whose `kind` is "name", "number", "text" or "count".

    The last stands for `factor` times a loop's counter plus `offset`.
    """

    kind: str
    text: str
    factor: int = 0
    offset: int = 0

    @property
    def is_counter(self) -> bool:
        """Whether it is the counter as it is, without factor or offset."""
        return self.kind == "count" and (self.factor, self.offset) == (1, 0)

    def at(self, count: str) -> Token:
        """Returns the token in the round in which the counter is this number."""
        if self.kind != "count":
            return self
        return Token("number", count if self.is_counter else str(self.factor * int(count) + self.offset))


@dataclass(frozen=True)
class Line:
    """A statement, or a whole loop (`is_loop`), whose names stay as they are."""

    tokens: tuple[Token, ...]
    is_loop: bool = False

    @functools.cached_property
    def targets(self) -> range:
        """The tokens before the equals sign."""
        text = "".join(token.text for token in self.tokens)
        found = None if self.is_loop else _TARGETS.match(text)
        length, end = 0, 0
        while found is not None and length < found.end():
            length += len(self.tokens[end].text)
            end += 1
        return range(end)

    @functools.cached_property
    def names(self) -> set[str]:
        """The names that the line mentions; attributes are none."""
        return {token.text for token in self.tokens if token.kind == "name"}

    @functools.cached_property
    def bound(self) -> set[str]:
        """The names that a loop gives to what it goes over."""
        text = text_of(self.tokens) if self.is_loop else ""
        return {name for found in re.findall(r"\bfor ([\w, ]+) in ", text) for name in found.split(", ")}

    @functools.cached_property
    def assigned(self) -> list[str]:
        if self.is_loop:
            lines = "".join(token.text for token in self.tokens).split("\n")
            return [name for line in lines for name in line_of(line.strip()).assigned]
        return [self.tokens[at].text for at in self.targets if self.tokens[at].kind == "name"]


def line_of(text: str, *, is_loop: bool = False) -> Line:
    tokens = [
        Token("name" if m["name"] else "number" if m["number"] else "text", m[0])
        for m in _TOKEN.finditer(text)
    ]
    return Line(tuple(tokens), is_loop)


def text_of(tokens: Sequence[Token]) -> str:
    return "".join(token.text for token in tokens)


@dataclass(slots=True)
class Flow:
    """What the names of a body stand for.

    `values[i][j]` is the value that token j of line i reads or makes: its number, or the name itself if the
    value is from outside the body. The values that a whole loop makes are at -1, -2 .. of its line.
    """

    lines: Sequence[Line]
    values: list[dict[int, int | str]] = field(default_factory=list)
    makers: list[tuple[int, int]] = field(default_factory=list)  # value -> the line and token that make it

    def __post_init__(self) -> None:
        stands: dict[str, int | str] = {}
        for number, line in enumerate(self.lines):
            targets, tokens = line.targets, line.tokens
            names = [at for at, t in enumerate(tokens) if t.kind == "name" and t.text not in line.bound]
            values = {at: stands.get(tokens[at].text, tokens[at].text) for at in names if at not in targets}
            made = {at: tokens[at].text for at in names if at in targets}
            made |= {-1 - place: name for place, name in enumerate(line.assigned) if line.is_loop}
            for at, name in made.items():
                values[at] = stands[name] = len(self.makers)
                self.makers.append((number, at))
            self.values.append(values)

    def name(self, line: int, at: int) -> str:
        return self.lines[line].assigned[-1 - at] if at < 0 else self.lines[line].tokens[at].text


def computed(lines: Iterable[Line]) -> Iterator[tuple[object, ...]]:
    """Yields what the lines compute, in order, without regard to names.

    It is equal for bodies that compute the same in the same order. Second names are followed, and so are
    lists that are filled value by value.
    """
    stands: dict[str, object] = {}
    lists: dict[str, list[object]] = {}
    made = 0
    for line in lines:
        text = "" if line.is_loop else text_of(line.tokens)
        if (found := _LIST.fullmatch(text)) is not None:
            lists[found[1]] = _elements(found[2] or "", stands, lists)
            continue
        if (found := _LIST_AGAIN.fullmatch(text)) is not None and found[2].removesuffix(REVERSED) in lists:
            lists[found[1]] = _elements(f"*{found[2]}", stands, lists)
            continue
        if (found := _ALIAS.fullmatch(text)) is not None:
            stands[found[1]] = stands.get(found[2], found[2])
            continue
        filled = _APPENDED.fullmatch(text)
        held = None if filled is None else lists.get(filled[1])
        if filled is not None and held is not None and filled[2] in stands:
            held.append(stands[filled[2]])
            continue
        if filled is not None and held is not None:
            line = line_of(f"_ = {filled[2]}")
        yield (*_spelled(line, stands, lists),)
        for name in line.assigned:
            if held is not None:
                held.append(made)
            else:
                stands[name] = made
                lists.pop(name, None)
            made += 1


def _elements(text: str, stands: Mapping[str, object], lists: Mapping[str, list[object]]) -> list[object]:
    """Returns the values of `a, *outs[::-1]` between the brackets of a list."""
    found: list[object] = []
    for part in text.split(", ") if text else ():
        name = part.removeprefix("*").removesuffix(REVERSED)
        held = lists.get(name) if part.startswith("*") else None
        if held is None:
            found.append(stands.get(part, part))
        else:
            found += held[::-1] if part.endswith(REVERSED) else held
    return found


def _spelled(line: Line, stands: Mapping[str, object], lists: Mapping[str, list[object]]) -> Iterator[object]:
    """Yields the tokens with values in place of names, and lists value by value."""
    tokens = line.tokens
    yield len(line.assigned)
    at = line.targets.stop
    while at < len(tokens):
        is_starred = tokens[at].text == "*" and at + 1 < len(tokens) and tokens[at + 1].text in lists
        is_summed = text_of(tokens[at : at + 2]) == f"{SUM}(" and tokens[at + 2].text in lists
        at += 1 if is_starred else 2 if is_summed else 0
        token = tokens[at]
        at += 1
        if token.kind != "name" or token.text in line.bound:
            yield token.text
        elif token.text not in lists:
            yield "value", stands.get(token.text, token.text)
        elif is_summed:
            at += 1  # the bracket
            yield from _apart(lists[token.text], " + ", " + 0 + ")
        else:
            held = lists[token.text]
            if text_of(tokens[at : at + len(REVERSED)]) == REVERSED:  # each of its characters is a token
                held, at = held[::-1], at + len(REVERSED)
            yield from () if is_starred else "["
            yield from _apart(held, ", ", ", ")
            yield from () if is_starred else "]"


def _apart(values: Sequence[object], between: str, first: str) -> Iterator[object]:
    for place, value in enumerate(values):
        yield from "" if place == 0 else first if place == 1 else between
        yield "value", value
