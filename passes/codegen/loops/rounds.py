"""What the rounds of a loop have in common, which a trace has one after another."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pd2bw_fx.passes.codegen.layout import free
from pd2bw_fx.passes.codegen.written import Statement

from .counted import Counting, TokenAt, counting
from .entries import BodyLines, without_number
from .tokens import REVERSED, SUM, Token, line_of, text_of

_FIRST_ROUNDS = 3  # enough to see whether numbers count up, and what is handed on
_NUM_TOKENS = {text: len(line_of(text).tokens) for text in (", ", " + ", " + 0 + ")}


class Read(NamedTuple):
    """A run of tokens, `first` to `last`, that reads what all rounds make.

    The values stand one by one in a list, in a list from its end on, or in a sum.
    """

    line: int
    first: int
    last: int
    form: str  # "", REVERSED or SUM


@dataclass(frozen=True, slots=True)
class Listed:
    """A list into which each round puts what it makes at one place or more, and where the list is read."""

    name: str
    reads: tuple[Read, ...]


@dataclass(frozen=True, slots=True)
class Links:
    """How the names in a round are bound to what this round or the one before makes."""

    # A name that a round reads -> where this round or the one before it makes the value.
    carried: Mapping[TokenAt, TokenAt] = field(default_factory=dict)
    # Where a round makes what the next one reads -> the value that the first round reads instead.
    before: Mapping[TokenAt, int | str] = field(default_factory=dict)
    # Names that read a value of the round before.
    from_before: frozenset[TokenAt] = frozenset()
    # Where a round makes what the next one still reads once it has made its own.
    late: frozenset[TokenAt] = frozenset()
    # A name that reads another value from before all rounds in each round -> these values.
    given: Mapping[TokenAt, tuple[int | str, ...]] = field(default_factory=dict)


class Rounds:
    """Rounds of `length` entries, the first of which begins at `start`.

    `number`, `links` and `listed` are those of the rounds that `found` has found.
    """

    def __init__(self, body: BodyLines, start: int, length: int) -> None:
        self.whole = body
        self.body, self.start, self.length = body.entries, start, length
        self.lines, self.flow, self.taken = body.lines, body.flow, body.names
        self.number = 0
        self.links = Links()
        self.listed: Mapping[TokenAt, Listed] = {}

    def found(self, number: int) -> Counting | None:
        """Returns what this many rounds count with; None where they are not the rounds of one loop."""
        if not self.may_end(number, self.start + number * self.length):
            return None
        self.number = number
        columns = self._columns()
        counters = (
            e.counter for line, _ in columns if isinstance(e := self.body[self.start + line], Statement)
        )
        counted = counting(columns, number, next((counter.first for counter in counters), None))
        links = None if counted is None else self._link_rounds()
        listed = None if links is None else self._collect_lists()
        if links is None or listed is None:
            return None
        self.links, self.listed = links, listed
        if counted is not None and links.given and number == 2:  # any two numbers are on a line
            return counted if all(token.is_counter for token in counted.tokens.values()) else None
        return counted

    def may_end(self, number: int, end: int) -> bool:
        """Whether the first rounds are like those of a loop of this number that ends there.

        They are if all rounds are. Checking them first spares going through a long run of lines from each of
        its lines in vain.
        """
        self.number = min(number, _FIRST_ROUNDS)
        if self._link_rounds() is None or counting(self._columns(), self.number) is None:
            return False
        return self._list_reads(end) is not None

    @property
    def end(self) -> int:
        return self.start + self.number * self.length

    def line(self, place: TokenAt, number: int) -> int:
        """Returns the line of the body at a place of this round."""
        return self.start + number * self.length + place[0]

    def name(self, place: TokenAt, number: int) -> str:
        return self.flow.name(self.line(place, number), place[1])

    def values(self, place: TokenAt) -> list[int | str]:
        """Returns what the name at a place stands for, round by round."""
        return [self.flow.values[self.line(place, r)][place[1]] for r in range(self.number)]

    @property
    def namings(self) -> tuple[Callable[[TokenAt], str], ...]:
        """The ways to choose a name for what all rounds make at a place, the best first."""
        return self._authors, self.plainest, self._shortest, self._first, self._last

    def _authors(self, place: TokenAt) -> str:
        """Returns the author's name: in a loop, unlike in lines beside one another, each `h` can be `h`."""
        entry = self.body[self.line(place, 0)]
        return (entry.named if isinstance(entry, Statement) else "") or self.plainest(place)

    def plainest(self, place: TokenAt) -> str:
        """Returns the last round's name without its number, if free: `hidden` for hidden_2, hidden_3, .."""
        name = self._last(place) if self._last(place) != "_" else self._shortest(place)
        plain = without_number(name)
        return plain if plain in self.whole.assigned or plain not in self.taken else name

    def _shortest(self, place: TokenAt) -> str:
        names = [name for r in range(self.number) if (name := self.name(place, r)) != "_"]
        return min(names, key=len, default="_")

    def _first(self, place: TokenAt) -> str:
        return self.name(place, 0)

    def _last(self, place: TokenAt) -> str:
        return self.name(place, self.number - 1)

    def _columns(self) -> dict[TokenAt, list[str]]:
        """Returns the numbers that are not the same in all rounds, round by round."""
        found: dict[TokenAt, list[str]] = {}
        for line in range(self.length):
            for at, token in enumerate(self.lines[self.start + line].tokens):
                if token.kind == "number":
                    column = [self.name((line, at), r) for r in range(self.number)]
                    if len(set(column)) > 1:
                        found[line, at] = column
        return found

    def _link_rounds(self) -> Links | None:
        """Finds how the names of a round are bound; None where it is not alike in all rounds.

        Each name stands for what the same place of all rounds makes, in the round itself or the one before,
        or for one value from before all rounds. In an author's loop, it may be one of these after another.
        """
        carried: dict[TokenAt, TokenAt] = {}
        before: dict[TokenAt, int | str] = {}
        from_before: set[TokenAt] = set()
        late: set[TokenAt] = set()
        given: dict[TokenAt, tuple[int | str, ...]] = {}
        for line in range(self.length):
            for at in self.flow.values[self.start + line]:
                values = self.values((line, at))
                makers = [self._maker(value) for value in values]
                last = makers[-1]
                if last is None:
                    if len(set(values)) > 1:
                        is_loop = self.lines[self.start + line].is_loop
                        if any(makers) or is_loop or not self.authors_loop:
                            return None
                        given[line, at] = tuple(values)
                    continue
                made, maker = last
                back = self.number - 1 - made
                wanted = [(r - back, maker) for r in range(self.number)]
                if back > 1 or makers[back:] != wanted[back:]:
                    return None
                if back and (makers[0] is not None or before.setdefault(maker, values[0]) != values[0]):
                    return None
                carried[line, at] = maker
                if back:
                    from_before.add((line, at))
                    late |= {maker} if line > maker[0] else set()
        return Links(carried, before, frozenset(from_before), frozenset(late), given)

    @property
    def authors_loop(self) -> str:
        """The author's loop that all lines of all rounds are of, or ""."""
        entries = self.body[self.start : self.end]
        loops = {entry.round.loop for entry in entries if isinstance(entry, Statement)}
        return loops.pop() if len(loops) == 1 else ""

    def _maker(self, value: int | str) -> tuple[int, TokenAt] | None:
        """Returns the round that makes a value, and where; None for a value from before all rounds."""
        line, at = self.flow.makers[value] if isinstance(value, int) else (-1, -1)
        if line < self.start:
            return None
        return (line - self.start) // self.length, ((line - self.start) % self.length, at)

    def _list_reads(self, end: int) -> dict[tuple[TokenAt, ...], list[Read]] | None:
        """Finds where what all rounds make is read as a list or sum, from the line `end` on, by place.

        Places whose values are not are taken together: each round puts one after another into the same list.
        The result is None where what a round other than the last makes is read in another way.
        """
        found: dict[tuple[TokenAt, ...], list[Read]] = {}
        together: list[TokenAt] = []
        for place in self.makers():
            runs = self._runs_of([place], end)
            if runs is None:
                together.append(place)
            elif runs:
                found[place,] = runs
        if together:
            runs = self._runs_of(together, end) if len(together) > 1 else None
            if not runs:
                return None
            found[tuple(together)] = runs
        return found

    def _runs_of(self, places: Sequence[TokenAt], end: int) -> list[Read] | None:
        """Finds the reads of what all rounds make at these places, round by round; None as `_list_reads`."""
        values = [value for made in zip(*map(self.values, places), strict=True) for value in made]
        reads = [self.whole.reads_from(end, value) for value in values]
        runs = [run for first in (reads[0], reads[-1]) for run in self._runs(values, first)]
        covered = {(run.line, at) for run in runs for at in range(run.first, run.last + 1)}
        if not all(covered.issuperset(others) for others in reads[: -len(places)]):
            return None
        return list(dict.fromkeys(runs))

    def _collect_lists(self) -> dict[TokenAt, Listed] | None:
        """Names the lists that places put their values into; None where `_list_reads` gives None."""
        reads = self._list_reads(self.end)
        if reads is None:
            return None
        found: dict[TokenAt, Listed] = {}
        for places, runs in reads.items():
            names = {listed.name for listed in found.values()}
            lines = (*(self.line(place, 0) for place in places), *(run.line for run in runs))
            entries = [self.body[at] for at in lines]
            needed = self.from_here_on | names
            wishes = [e.listed for e in entries if isinstance(e, Statement) and e.listed not in needed]
            own = f"{self.plainest(places[0])}_list" if len(places) == 1 else "parts"
            listed = Listed(next(filter(None, wishes), free(own, self.taken | names)), tuple(runs))
            found |= dict.fromkeys(places, listed)
        return found

    @functools.cached_property
    def from_here_on(self) -> set[str]:
        """The names in the rounds and behind them; any other may be given to something else now."""
        return set[str]().union(*(line.names for line in self.lines[self.start :]))

    @property
    def taken_for_counters(self) -> set[str]:
        """The names that no counter may have: what other loops count with is none of them."""
        beside = set[str]().union(*(line.names - line.bound for line in self.lines))
        return beside.union(*(line.names for line in self.lines[self.start : self.end]))

    def needed_beside(self, places: Collection[TokenAt]) -> set[str]:
        """Returns the names in the rounds, without these places of each, and what is read of them later."""
        found: set[str] = set()
        for number in range(self.start, self.end):
            line = (number - self.start) % self.length
            tokens = enumerate(self.lines[number].tokens)
            found |= {t.text for at, t in tokens if t.kind == "name" and (line, at) not in places}
        for number in range(self.end, len(self.lines)):
            for at, value in self.flow.values[number].items():
                if not isinstance(value, int) or self.flow.makers[value][0] < self.end:
                    found.add(self.flow.name(number, at))
        return found

    def makers(self) -> Iterator[TokenAt]:
        """Yields the places where a round makes something."""
        for line in range(self.length):
            for at in self.flow.values[self.start + line]:
                if at < 0 or at in self.lines[self.start + line].targets:
                    yield line, at

    def _runs(self, values: Sequence[int | str], reads: Sequence[tuple[int, int]]) -> Iterator[Read]:
        """Yields the runs of tokens that read these values, one after another."""
        for line, at in reads:
            tokens, stands = self.lines[line].tokens, self.flow.values[line]
            for form, found in (("", values), (REVERSED, values[::-1])):
                end = _end_of_run(tokens, stands, at, found, ", ", ", ")
                if end is not None and _is_in_list(tokens, at):
                    yield Read(line, at, end, form)
            end = _end_of_run(tokens, stands, at, values, " + 0 + ", " + ")
            if end is not None and _is_a_sum(tokens, at, end):
                yield Read(line, at, end, SUM)


def _end_of_run(
    tokens: Sequence[Token],
    stands: Mapping[int, int | str],
    at: int,
    values: Sequence[int | str],
    first: str,
    between: str,
) -> int | None:
    """Returns the last token of these values, with these texts between them; None if they are not at `at`."""
    for place, value in enumerate(values):
        if place:
            apart = first if place == 1 else between
            end = at + 1 + _NUM_TOKENS[apart]
            if text_of(tokens[at + 1 : end]) != apart:
                return None
            at = end
        if stands.get(at) != value:
            return None
    return at


def _is_a_sum(tokens: Sequence[Token], at: int, end: int) -> bool:
    """Whether a sum stands for itself: in `2 * a + 0 + b` and `a + 0 + b.mean()` it does not."""
    before, after = text_of(tokens[:at]), text_of(tokens[end + 1 :])
    is_first = before == "return " or before.endswith(("= ", "(", "[", ", "))
    return is_first and (not after or after.startswith((")", "]", ",", " + ", " - ")))


def _is_in_list(tokens: Sequence[Token], at: int) -> bool:
    """Whether the innermost brackets around a token are those of a list."""
    depth = 0
    for place in range(at - 1, -1, -1):
        text = tokens[place].text
        depth += (text in ")]}") - (text in "([{") if len(text) == 1 else 0
        if depth < 0:
            return text == "[" and (place == 0 or not re.search(r"[\w)\]]$", tokens[place - 1].text))
    return False
