"""A body with a loop in place of rounds."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from pd2bw_fx.passes.codegen.layout import WIDTH, Loop, common, free, region_of
from pd2bw_fx.passes.codegen.written import Statement

from .author_loops import names_of_members, names_over_lists
from .counted import Counting, TokenAt, spelled
from .entries import Entry
from .given import Given, header, named_columns
from .rounds import Rounds
from .tokens import SUM, Line, Token, line_of, text_of

_BRACKETS_OF_A_CALL = re.compile(r"(?<![\w)\]])\((sum\(\w+\))\)")


class Looped:
    """A body with a loop in place of rounds, whose names are chosen by `naming`.

    A value from before the first round that the loop reads under a name of its own is renamed where it is
    made, or given that name in front of the loop.
    """

    def __init__(
        self, rounds: Rounds, counted: Counting, naming: Callable[[TokenAt], str], *, renames: bool
    ) -> None:
        self.rounds, self.counted = rounds, counted
        self.names = {place: naming(place) for place in rounds.makers()}
        self.renamed: dict[int | str, str] = {}
        self.second: list[str] = []
        self.befores: dict[TokenAt, str] = {}  # what the round before made, once a round has its own
        for place, value in rounds.links.before.items():
            name = self.names[place]
            stands = value if isinstance(value, str) else rounds.flow.name(*rounds.flow.makers[value])
            if place in rounds.links.late:
                name = self.befores[place] = stands if renames else free(f"{name}_before", rounds.taken)
            if name == stands:
                continue
            if renames and self._is_for_rounds_alone(value, place):
                self.renamed[value] = name
            else:
                self.second.append(f"{name} = {stands}")
        self.given = self._given()
        self.later = {rounds.values(place)[-1]: name for place, name in self.names.items()}
        self.rows = [list(self._row(line)) for line in range(rounds.length)]
        self.rows[-1] += [line_of(f"{b} = {self.names[place]}").tokens for place, b in self.befores.items()]

    def _given(self) -> dict[TokenAt, Given]:
        """Names what the rounds read of lists, by place."""
        rounds = self.rounds
        columns = rounds.links.given
        texts = {p: tuple(rounds.name(p, r) for r in range(rounds.number)) for p in columns}
        own = {listed.name for listed in rounds.listed.values()}
        own |= {*self.names.values(), *self.befores.values(), *self.renamed.values()}
        loop, needed = rounds.authors_loop, rounds.needed_beside(columns)
        zipped = self._zipped(list(dict.fromkeys(columns.values())))
        return named_columns(columns, texts, loop, zipped, rounds.taken | own, needed | own)

    def _zipped(self, columns: Sequence[tuple[int | str, ...]]) -> Sequence[tuple[int | str, ...]]:
        """Orders what rounds read as the author's `zip` has it; returns nothing where that cannot be told.

        `columns` are in the order in which a round reads them, which need not be that of the `zip`: of
        `for t0, t1 in zip(times[:-1], times[1:])`, the body may read t1 first. The author's lists tell it,
        or the line of the loop, if it makes all that it goes over.
        """
        rounds = self.rounds
        if len(columns) < 2:
            return columns
        makers = {
            column: [rounds.flow.makers[value] for value in column if isinstance(value, int)]
            for column in columns
        }
        entries = {column: [rounds.body[at] for at, _ in made] for column, made in makers.items()}
        lists = {
            column: {entry.listed if isinstance(entry, Statement) else "" for entry in made}
            for column, made in entries.items()
        }
        authors = [{listed} for listed, _ in names_over_lists(rounds.authors_loop)]
        if {""} not in authors and sorted(map(sorted, lists.values())) == sorted(map(sorted, authors)):
            return sorted(columns, key=lambda column: authors.index(lists[column]))
        line = rounds.authors_loop.rpartition("/")[2]
        made = [entry for column in columns for entry in entries[column]]
        is_of_loop = all(isinstance(entry, Statement) and entry.place == line for entry in made)
        is_made = all(len(makers[column]) == len(column) for column in columns)
        return sorted(columns, key=lambda column: makers[column][0]) if is_of_loop and is_made else ()

    def _is_for_rounds_alone(self, value: int | str, place: TokenAt) -> bool:
        """Whether a value from before is read only where rounds read what this place makes."""
        rounds = self.rounds
        if isinstance(value, str) or rounds.flow.makers[value][1] < 0:
            return False
        first = range(rounds.start, rounds.start + rounds.length)
        return all(
            line in first and rounds.links.carried.get((line - rounds.start, at)) == place
            for line, at in rounds.whole.reads_from(0, value)
            if (line, at) != rounds.flow.makers[value]
        )

    def _row(self, line: int) -> Iterator[tuple[Token, ...]]:
        """Yields the tokens of a round's line, and those of lines that put its results into lists."""
        rounds = self.rounds
        source = rounds.lines[rounds.start + line]
        tokens = list(source.tokens)
        for at, token in enumerate(() if source.is_loop else source.tokens):
            maker = rounds.links.carried.get((line, at))
            if (line, at) in self.given:
                tokens[at] = Token("given", self.given[line, at].name)
            elif maker is None:
                tokens[at] = self.counted.tokens.get((line, at), token)
            else:
                before = self.befores.get(maker) if (line, at) in rounds.links.from_before else None
                tokens[at] = replace(token, text=before or self.names[maker])
        listed = [(place, entry) for place, entry in rounds.listed.items() if place[0] == line]
        targets = source.targets
        if (
            len(listed) == len(source.assigned) == 1
            and not source.is_loop
            and not self._is_read(listed[0][0])
        ):
            head, tail = line_of(f"{listed[0][1].name}.append(").tokens, line_of(")").tokens
            yield (*head, *tokens[targets.stop :], *tail)
            return
        yield tuple(tokens)
        for place, entry in listed:
            yield line_of(f"{entry.name}.append({self.names[place]})").tokens

    def _is_read(self, place: TokenAt) -> bool:
        """Whether what a place makes is read otherwise than from the list."""
        rounds = self.rounds
        if any(maker == place and key != place for key, maker in rounds.links.carried.items()):
            return True
        last, listed = rounds.values(place)[-1], rounds.listed[place].reads
        inside = {(read.line, at) for read in listed for at in range(read.first, read.last + 1)}
        return not inside.issuperset(rounds.whole.reads_from(rounds.end, last))

    def _outside(self, number: int) -> tuple[Token, ...]:
        """Returns the tokens of a line in front of the loop or behind it."""
        rounds = self.rounds
        line, tokens = rounds.lines[number], list[Token]()
        if line.is_loop:
            return line.tokens
        listed = [(read, e.name) for e in rounds.listed.values() for read in e.reads if read.line == number]
        reads = {read.first: (read, name) for read, name in listed}
        at = 0
        while at < len(line.tokens):
            if at in reads:
                read, name = reads[at]
                around = text_of(line.tokens[at - 1 : at] + line.tokens[read.last + 1 : read.last + 2])
                is_whole = around == "[]" and read.form != SUM
                if is_whole:
                    tokens.pop()
                star = "" if is_whole else "*"
                text = f"{SUM}({name})" if read.form == SUM else f"{star}{name}{read.form}"
                tokens += line_of(text).tokens
                at = read.last + 1 + is_whole
                continue
            value = rounds.flow.values[number].get(at, "")
            later = self.later.get(value) if number >= rounds.end else None
            name = self.renamed.get(value) or later or line.tokens[at].text
            tokens.append(replace(line.tokens[at], text=name))
            at += 1
        return tuple(tokens)

    def unrolled(self) -> Iterator[Line]:
        rounds = self.rounds
        yield from (Line(self._outside(at), rounds.lines[at].is_loop) for at in range(rounds.start))
        yield from (line_of(text) for text in self._first())
        names = {given.name: given.names for given in self.given.values()}
        for number, value in enumerate(self.counted.values):
            for line, row in enumerate(self.rows):
                for place, tokens in enumerate(row):
                    is_loop = rounds.lines[rounds.start + line].is_loop and place == 0
                    in_round = (
                        replace(token, kind="name", text=names[token.text][number])
                        if token.kind == "given"
                        else token.at(value)
                        for token in tokens
                    )
                    yield Line(tuple(in_round), is_loop)
        later = range(rounds.end, len(rounds.lines))
        yield from (Line(self._outside(at), rounds.lines[at].is_loop) for at in later)

    def _first(self) -> list[str]:
        given = dict.fromkeys(given.statement for given in self.given.values())
        lists = dict.fromkeys(f"{listed.name} = []" for listed in self.rounds.listed.values())
        return [*self.second, *lists, *given]

    def fits(self) -> bool:
        return len(self._header()) < WIDTH - 24 and all(given.fits for given in self.given.values())

    def _header(self) -> str:
        return header(self.counted, self._counter(), list(dict.fromkeys(self.given.values())))

    def _counter(self) -> str:
        if not self.counted.tokens:
            return "_"
        if not self.counted.is_range:
            names = list(names_of_members(self.rounds.authors_loop).values())
            is_new = len(names) == 1 and names[0] not in self.rounds.taken
            return names[0] if is_new else free("value", self.rounds.taken_for_counters)
        entries = [self.rounds.body[self.rounds.start + line] for line, _ in self.counted.tokens]
        counters = [e.counter for e in entries if isinstance(e, Statement) and e.counter.name]
        counted = set(map(int, self.counted.values))
        wishes = [c.name for c in counters if c.numbers is None or counted.issubset(c.numbers)]
        listed = {entry.name for entry in self.rounds.listed.values()}
        listed |= {given.name for given in self.given.values()}
        if wishes and wishes[0] not in self.rounds.from_here_on | listed:
            return wishes[0]
        return free("i", self.rounds.taken_for_counters | listed)

    def body(self) -> list[Entry]:
        rounds, counter = self.rounds, self._counter()
        region = region_of(rounds.body[rounds.start])
        inside: list[Entry] = []
        for line, row in enumerate(self.rows):
            entries = [rounds.body[rounds.start + r * rounds.length + line] for r in range(rounds.number)]
            statements = [entry for entry in entries if isinstance(entry, Statement)]
            if statements:
                inside.append(replace(common(statements), text=spelled(row[0], counter)))
            else:
                inside.append(entries[0])
            inside += [Statement(text_of(tokens), region=region) for tokens in row[1:]]
        first = [Statement(text, region=region) for text in self._first()]
        loop = Loop(self._header(), tuple(inside))
        before = [self._entry(at) for at in range(rounds.start)]
        return [*before, *first, loop, *(self._entry(at) for at in range(rounds.end, len(rounds.body)))]

    def _entry(self, number: int) -> Entry:
        entry = self.rounds.body[number]
        if isinstance(entry, Loop):
            return entry
        return replace(entry, text=_BRACKETS_OF_A_CALL.sub(r"\1", text_of(self._outside(number))))
