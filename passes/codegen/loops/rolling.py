"""Rolls up the rounds of an author's loop, which a trace has one after another, into a loop again.

h = self.cell(x[:, 0], h)
out = self.out(h)                       outs = []
h = self.cell(x[:, 1], h)               for t in range(3):
out_2 = self.out(h)              ->         h = self.cell(x[:, t], h)
h = self.cell(x[:, 2], h)                   outs.append(self.out(h))
out_3 = self.out(h)                     return torch.stack(outs, dim=1)
return torch.stack([out, out_2, out_3], dim=1)

Rounds are lines from the same places in the author's source that differ in numbers that count up, and in the
names of what they make. A loop is taken only if it computes the same in the same order: it is unrolled again
and compared with the lines that were there.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from pd2bw_fx.passes.codegen.attributes import Attributes
from pd2bw_fx.passes.codegen.layout import region_of
from pd2bw_fx.passes.codegen.written import Statement

from .entries import (
    BodyLines,
    Entry,
    num_lines,
    resolved_entries,
    with_plain_names,
    with_text,
    with_zeros,
    without_zeros,
)
from .last_round import completed, last_round
from .looped import Looped
from .rounds import Rounds
from .tokens import computed

_LONGEST_ROUND = 40
_LEAST_SAVED = 1  # lines that a loop must save
_MOST_FOR_A_BEGINNING = 2  # lines that a loop may take more to begin where the author's does


def in_rounds(entries: Sequence[Entry], attributes: Attributes, arguments: Sequence[str]) -> list[Entry]:
    """Rolls up the rounds in a body into loops, inner loops first."""
    resolved = list(resolved_entries(entries, attributes))
    rolled = _rolled_once(BodyLines([with_text(entry, with_zeros) for entry in resolved]))
    if rolled is None:
        return resolved
    while (again := _rolled_once(BodyLines(rolled))) is not None:
        rolled = again
    return with_plain_names([with_text(entry, without_zeros) for entry in rolled], arguments)


def _rolled_once(body: BodyLines) -> list[Entry] | None:
    """Rolls up the first loop that there is; None where there is none."""
    whole = len(body.entries)
    for start in range(whole):
        for length in range(1, min(_LONGEST_ROUND, (whole - start) // 2) + 1):
            rolled = _rolled(body, start, length) if body.most_rounds(start, length) > 1 else None
            if rolled is not None:
                return _turned(body, start, length, rolled)
    return None


def _turned(body: BodyLines, start: int, length: int, rolled: list[Entry]) -> list[Entry]:
    """Chooses, among loops of the same rounds, where a round begins.

    The best one begins where the author's rounds do and leaves least outside, and may take some more lines
    for that.
    """
    found = [(start, rolled)]
    for other in range(start + 1, start + length):
        if _is_the_authors(body.entries, found[0], length) or body.most_rounds(other, length) < 2:
            break
        turned = _rolled(body, other, length)
        found += [] if turned is None else [(other, turned)]
    lines = {at: sum(map(num_lines, entries)) for at, entries in found}
    most = min(lines.values()) + _MOST_FOR_A_BEGINNING
    starts = [at for at in lines if lines[at] <= most and _begins_a_round(body.entries, at, length)]
    return dict(found)[min(starts or lines, key=lambda at: (lines[at], at))]


def _is_the_authors(body: Sequence[Entry], found: tuple[int, list[Entry]], length: int) -> bool:
    """Whether a loop covers all of an author's loop, or its first line is in no loop of theirs."""
    start, rolled = found
    first = body[start]
    loop = first.round.loop if isinstance(first, Statement) else ""
    outside = {entry.round.loop for entry in rolled if isinstance(entry, Statement)}
    return not loop or (loop not in outside and _begins_a_round(body, start, length))


def _begins_a_round(body: Sequence[Entry], start: int, length: int) -> bool:
    """Whether the first of these lines is the first line of a round of the author's loop."""
    rounds = [entry.round for entry in body[start : start + length] if isinstance(entry, Statement)]
    first = body[start]
    return isinstance(first, Statement) and first.round.number == min(place.number for place in rounds)


def _rolled(body: BodyLines, start: int, length: int) -> list[Entry] | None:
    if len({region_of(entry) for entry in body.entries[start : start + length]}) != 1:
        return None
    most = body.most_rounds(start, length)
    rounds = Rounds(body, start, length)
    last = last_round(body, start, length, most)
    end = start + most * length
    if last is not None and rounds.may_end(most, end + length - last.count(None)):
        rolled = _as_loop(Rounds(completed(body, start, end, last), start, length), most + 1)
        if rolled is not None and _is_shorter(rolled, body):
            return rolled
    for number in (most, most - 1):  # what the last round makes may go elsewhere
        rolled = _as_loop(rounds, number) if number > 1 else None
        if rolled is not None:
            return rolled if _is_shorter(rolled, body) else None
    return None


def _is_shorter(rolled: Sequence[Entry], body: BodyLines) -> bool:
    return sum(map(num_lines, rolled)) + _LEAST_SAVED <= body.num_lines


def _as_loop(rounds: Rounds, number: int) -> list[Entry] | None:
    """Returns the body with a loop of this number of rounds, if it computes the same."""
    counted = rounds.found(number)
    if counted is not None:
        for naming, renames in itertools.product(rounds.namings, (True, False)):
            looped = Looped(rounds, counted, naming, renames=renames)
            pairs = itertools.zip_longest(computed(looped.unrolled()), rounds.whole.computed)
            if all(a == b for a, b in pairs):
                return looped.body() if looped.fits() else None
    return None
