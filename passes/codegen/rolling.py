"""Rounds of a loop of the author's, which a trace has one after another, as a loop again.

h = self.cell(x[:, 0], h)
out = self.out(h)                       outs = []
h = self.cell(x[:, 1], h)               for t in range(3):
out_2 = self.out(h)              ->         h = self.cell(x[:, t], h)
h = self.cell(x[:, 2], h)                   outs.append(self.out(h))
out_3 = self.out(h)                     return torch.stack(outs, dim=1)
return torch.stack([out, out_2, out_3], dim=1)

Rounds are lines of the same places in the author's source which differ in numbers that count up, and in the
names of what they make. A loop is taken only if it computes the same in the same order: it is unrolled again
and held against the lines that there were.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from .attributes import Attributes
from .entries import Entry, num_lines, outline, resolved_entries, with_plain_names
from .last_round import completed
from .layout import region_of
from .looped import Looped
from .method import Statement
from .rounds import Rounds
from .tokens import computed

_LONGEST_ROUND = 40
_LEAST_SAVED = 1  # lines
_MOST_FOR_A_BEGINNING = 2  # lines


def in_rounds(entries: Sequence[Entry], attributes: Attributes) -> list[Entry]:
    """The body with its rounds rolled up, inner loops first."""
    body = list(resolved_entries(entries, attributes))
    rolled = _rolled_once(body)
    if rolled is None:
        return body
    while (again := _rolled_once(rolled)) is not None:
        rolled = again
    return with_plain_names(rolled)


def _rolled_once(body: Sequence[Entry]) -> list[Entry] | None:
    """With the first loop that there is."""
    outlines = [outline(entry) for entry in body]
    for start in range(len(body)):
        for length in range(1, min(_LONGEST_ROUND, (len(body) - start) // 2) + 1):
            rolled = _rolled(body, start, length) if _begin_rounds(outlines, start, length) else None
            if rolled is not None:
                return _turned(body, outlines, start, length, rolled)
    return None


def _begin_rounds(outlines: Sequence[object], start: int, length: int) -> bool:
    return outlines[start : start + length] == outlines[start + length : start + 2 * length]


def _turned(
    body: Sequence[Entry], outlines: Sequence[object], start: int, length: int, rolled: list[Entry]
) -> list[Entry]:
    """Of the loops of such rounds one that begins where the author's do and leaves least outside, though some
    lines more are needed for what it begins with."""
    found = [(start, rolled)]
    for other in range(start + 1, start + length):
        if _is_the_authors(body, found[0], length) or not _begin_rounds(outlines, other, length):
            break
        turned = _rolled(body, other, length)
        found += [] if turned is None else [(other, turned)]
    lines = {at: sum(map(num_lines, entries)) for at, entries in found}
    most = min(lines.values()) + _MOST_FOR_A_BEGINNING
    chosen = [entry for entry in found if lines[entry[0]] <= most and _begins_a_round(body, entry[0], length)]
    return min(chosen or found, key=lambda entry: (lines[entry[0]], entry[0]))[1]


def _is_the_authors(body: Sequence[Entry], found: tuple[int, list[Entry]], length: int) -> bool:
    """Whether a loop is all of the author's, or of none."""
    start, rolled = found
    first = body[start]
    loop = first.round.loop if isinstance(first, Statement) else ""
    outside = {entry.round.loop for entry in rolled if isinstance(entry, Statement)}
    return not loop or (loop not in outside and _begins_a_round(body, start, length))


def _begins_a_round(body: Sequence[Entry], start: int, length: int) -> bool:
    """Whether the first of these lines is the author's first of that loop."""
    rounds = [entry.round for entry in body[start : start + length] if isinstance(entry, Statement)]
    first = body[start]
    return isinstance(first, Statement) and first.round.number == min(place.number for place in rounds)


def _rolled(body: Sequence[Entry], start: int, length: int) -> list[Entry] | None:
    if len({region_of(entry) for entry in body[start : start + length]}) != 1:
        return None
    rounds = Rounds(body, start, length)
    most = rounds.most()
    whole = completed(body, start, length, most)
    if whole is not None:
        rolled = _as_loop(Rounds(whole, start, length), most + 1)
        if rolled is not None and _is_shorter(rolled, body):
            return rolled
    for number in (most, most - 1):  # what the last one makes may go elsewhere
        rolled = _as_loop(rounds, number) if number > 1 else None
        if rolled is not None:
            return rolled if _is_shorter(rolled, body) else None
    return None


def _is_shorter(rolled: Sequence[Entry], body: Sequence[Entry]) -> bool:
    return sum(map(num_lines, rolled)) + _LEAST_SAVED <= sum(map(num_lines, body))


def _as_loop(rounds: Rounds, number: int) -> list[Entry] | None:
    """The body with a loop of this number of rounds, if it computes the same."""
    counted = rounds.found(number)
    if counted is not None:
        wanted = list(computed(rounds.lines))
        for naming, renames in itertools.product(rounds.namings, (True, False)):
            looped = Looped(rounds, counted, naming, renames=renames)
            if list(computed(looped.unrolled())) == wanted:
                return looped.body() if looped.fits() else None
    return None
