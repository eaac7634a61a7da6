"""The last round of a loop, where nobody reads some of what the author computes: a trace has no line for it.

h = self.cell(x[:, 0], h)
seen = seen + h                  for t in range(3):
h = self.cell(x[:, 1], h)            h = self.cell(x[:, t], h)
seen_2 = seen + h          ->        seen = seen + h
h = self.cell(x[:, 2], h)        return h
return h

The loop computes it once more, as the model does, if that can do no harm: it is in every round of the
author's, draws no random numbers and writes nothing, and does not count the rounds.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from pd2bw_fx.names import free_name

from .entries import Entry, entry_text, outline
from .layout import Loop
from .method import Statement
from .tokens import Flow, line_of, text_of


def completed(body: Sequence[Entry], start: int, length: int, number: int) -> list[Entry] | None:
    """The body with the lines that the round after this number of whole ones lacks; None where that is no
    round of theirs, or lacks nothing."""
    end = start + number * length
    rounds = [body[at : at + length] for at in range(start, end, length)]
    found = _aligned(rounds[-1], body[end : end + length])
    if found is None or not _are_of_one_loop(
        [*body[start:end], *(entry for entry in found if entry is not None)]
    ):
        return None
    lacking = [place for place, entry in enumerate(found) if entry is None]
    if not all(_may_be_added(rounds, place) for place in lacking):
        return None
    last = _written(body, start, end, found)
    return [*body[:end], *last, *body[end + length - len(lacking) :]]


def _aligned(whole: Sequence[Entry], lines: Sequence[Entry]) -> list[Entry | None] | None:
    """By its places what there is of a round, if that is something and not all."""
    found: list[Entry | None] = []
    left = list(lines)
    for entry in whole:
        is_there = bool(left) and outline(left[0]) == outline(entry)
        found.append(left.pop(0) if is_there else None)
    return found if 0 < found.count(None) < len(found) else None


def _are_of_one_loop(entries: Sequence[Entry]) -> bool:
    loops = {entry.round.loop for entry in entries if isinstance(entry, Statement)}
    return len(loops) == 1 and "" not in loops


def _may_be_added(rounds: Sequence[Sequence[Entry]], place: int) -> bool:
    entries = [entries[place] for entries in rounds]
    named = [entry.named for entry in rounds[-1] if isinstance(entry, Statement)]
    for entry in entries:
        if not isinstance(entry, Statement) or not (entry.is_pure and entry.round.is_always):
            return False
        # Another line's name for the same is read afterwards: the author did not compute this one.
        if named.count(entry.named) != 1 or not entry.named:
            return False
    numbers = [[t.text for t in line_of(entry_text(e)).tokens if t.kind == "number"] for e in entries]
    return all(other == numbers[0] for other in numbers)


def _written(body: Sequence[Entry], start: int, end: int, found: Sequence[Entry | None]) -> list[Entry]:
    """The round with the lines that it lacks, which read what those of the round before do, a round later."""
    lines = [line_of(entry_text(entry), is_loop=isinstance(entry, Loop)) for entry in body[:end]]
    flow = Flow(lines)
    taken = set[str]().union(*(line_of(entry_text(entry)).names for entry in body))
    made: list[Entry] = []
    length = len(found)
    for place, entry in enumerate(found):
        if entry is not None:
            made.append(entry)
            continue
        number = end - length + place
        template, line = body[number], lines[number]
        assert isinstance(template, Statement)
        tokens = list(line.tokens)
        for at, token in enumerate(line.tokens):
            if token.kind != "name" or token.text == "_":
                continue
            if at in line.targets:
                name = free_name(re.sub(r"_\d+$", "", token.text) + "_2", taken)
                taken.add(name)
            else:
                name = _a_round_later(flow, flow.values[number][at], start, length, made)
            tokens[at] = replace(token, text=name)
        made.append(replace(template, text=text_of(tokens)))
    return made


def _a_round_later(flow: Flow, value: int | str, start: int, length: int, made: Sequence[Entry]) -> str:
    """What the same place of the next round calls its value; of one from before all rounds, its name."""
    if isinstance(value, str):
        return value
    line, at = flow.makers[value]
    if line < start:
        return flow.name(line, at)
    if line + length < len(flow.lines):
        return flow.name(line + length, at)
    entry = made[line + length - len(flow.lines)]
    later = line_of(entry_text(entry), is_loop=isinstance(entry, Loop))
    return later.assigned[-1 - at] if at < 0 else later.tokens[at].text
