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
from .layout import region_of
from .looped import Looped
from .rounds import Rounds
from .tokens import computed

_LONGEST_ROUND = 40
_LEAST_SAVED = 1  # lines


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
            middle, end = start + length, start + 2 * length
            if outlines[start:middle] == outlines[middle:end]:
                rolled = _rolled(body, start, length)
                if rolled is not None:
                    return rolled
    return None


def _rolled(body: Sequence[Entry], start: int, length: int) -> list[Entry] | None:
    if len({region_of(entry) for entry in body[start : start + length]}) != 1:
        return None
    rounds = Rounds(body, start, length)
    wanted = list(computed(rounds.lines))
    most = rounds.most()
    for number in (most, most - 1):  # what the last one makes may go elsewhere
        counted = rounds.found(number) if number > 1 else None
        if counted is None:
            continue
        for naming, renames in itertools.product(rounds.namings, (True, False)):
            looped = Looped(rounds, counted, naming, renames=renames)
            if list(computed(looped.unrolled())) == wanted:
                rolled = looped.body()
                is_shorter = sum(map(num_lines, rolled)) + _LEAST_SAVED <= sum(map(num_lines, body))
                return rolled if is_shorter and looped.fits() else None
    return None
