"""The last round of a loop, where nobody reads some of what the author computes: a trace lacks its lines.

h = self.cell(x[:, 0], h)
seen = seen + h                  for t in range(3):
h = self.cell(x[:, 1], h)            h = self.cell(x[:, t], h)
seen_2 = seen + h          ->        seen = seen + h
h = self.cell(x[:, 2], h)        return h
return h

The loop computes it once more, as the model does, if that can do no harm. The line must be in every round of
the author's loop, draw no random numbers, and write nothing. Its numbers must be the same in all rounds, or
those by which another line, which is there, takes the same part of the same value: x[:, 2] is known to exist
in the last round, and what the author's min(t + 1, 2) is in it is not known at all.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace

from pd2bw_fx.names import free_name
from pd2bw_fx.passes.codegen.layout import Loop
from pd2bw_fx.passes.codegen.written import Statement

from .entries import BodyLines, Entry, entry_text
from .tokens import Flow, line_of, text_of


def last_round(whole: BodyLines, start: int, length: int, number: int) -> list[Entry | None] | None:
    """Returns what there is of the round behind `number` whole ones, by place; None for lines that it lacks.

    The result is None where that is no round of the same loop, or lacks nothing that may be added.
    """
    end = start + number * length
    found = _aligned(whole, end - length, length)
    if found is None:
        return None
    lacking = [place for place, entry in enumerate(found) if entry is None]
    there = [*whole.entries[start:end], *(entry for entry in found if entry is not None)]
    named = _read_afterwards(whole, end, end + len(found) - len(lacking))
    may_be_added = all(
        _may_be_added(whole, range(start + place, end, length), named)
        and _numbers(whole, start, end, place, found) is not None
        for place in lacking
    )
    return found if may_be_added and _are_of_one_loop(there) else None


def completed(whole: BodyLines, start: int, end: int, found: Sequence[Entry | None]) -> BodyLines:
    """Returns the body with the lines that the round at `end` lacks."""
    body, num_there = whole.entries, len(found) - found.count(None)
    return BodyLines([*body[:end], *_written(whole, start, end, found), *body[end + num_there :]])


def _aligned(whole: BodyLines, start: int, length: int) -> list[Entry | None] | None:
    """Returns what there is of the round behind the one at `start`, by place: something, but not all."""
    found: list[Entry | None] = []
    at = start + length
    for outline in whole.outlines[start : start + length]:
        is_there = at < min(len(whole.outlines), start + 2 * length) and whole.outlines[at] == outline
        found.append(whole.entries[at] if is_there else None)
        at += is_there
    return found if 0 < found.count(None) < len(found) else None


def _are_of_one_loop(entries: Sequence[Entry]) -> bool:
    loops = {entry.round.loop for entry in entries if isinstance(entry, Statement)}
    return len(loops) == 1 and "" not in loops


def _read_afterwards(whole: BodyLines, first: int, end: int) -> set[str]:
    """Returns the author's names of what lines from `first` on make and lines from `end` on read."""
    found: set[str] = set()
    for at in range(first, end):
        entry, line = whole.entries[at], whole.lines[at]
        made = [value for token in line.targets if (value := whole.flow.values[at].get(token)) is not None]
        if isinstance(entry, Statement) and any(whole.reads_from(end, value) for value in made):
            found.add(entry.named)
    return found


def _may_be_added(whole: BodyLines, column: Sequence[int], read_afterwards: Collection[str]) -> bool:
    for at in column:
        entry = whole.entries[at]
        if not isinstance(entry, Statement) or not (entry.is_pure and entry.round.is_always):
            return False
        # The value of another line of that name is read afterwards, so the author did not compute this one.
        if entry.named in read_afterwards or not entry.named:
            return False
    return True


def _numbers(
    whole: BodyLines, start: int, end: int, place: int, found: Sequence[Entry | None]
) -> dict[int, str] | None:
    """Returns the numbers, by token, that a line has in the round that lacks it; None if that is unknown."""
    length = len(found)
    column = range(start + place, end, length)
    numbers: dict[int, str] = {}
    for at, token in enumerate(whole.lines[column[0]].tokens):
        if token.kind != "number":
            continue
        if len({whole.lines[row].tokens[at].text for row in column}) == 1:
            numbers[at] = token.text
            continue
        parts = [_part(whole, row, at) for row in column]
        if None in parts:
            return None
        there = (other for other, entry in enumerate(found) if entry is not None)
        alike = (
            whole.lines[last].tokens[other_at].text
            for last, other in enumerate(there, end)
            for other_at, other_token in enumerate(whole.lines[last].tokens)
            if other_token.kind == "number"
            and [_part(whole, row, other_at) for row in range(start + other, end, length)] == parts
        )
        known = next(alike, None)
        if known is None:
            return None
        numbers[at] = known
    return numbers


def _part(whole: BodyLines, row: int, at: int) -> tuple[int | str, str] | None:
    """Returns the value `x` and the text `[:, 2` where the number 2 is within `x[:, 2]`."""
    tokens = whole.lines[row].tokens
    name = next((place for place in reversed(range(at)) if tokens[place].kind == "name"), None)
    if name is None or name in whole.lines[row].targets:
        return None
    within = text_of(tokens[name + 1 : at + 1])
    return (whole.flow.values[row][name], within) if within.startswith("[") and "]" not in within else None


def _written(whole: BodyLines, start: int, end: int, found: Sequence[Entry | None]) -> list[Entry]:
    """Returns the round with the lines that it lacks.

    These are the lines of the round before, reading values a round later.
    """
    body, lines = whole.entries, whole.lines[:end]
    flow = Flow(lines)
    taken = set(whole.names)
    made: list[Entry] = []
    length = len(found)
    for place, entry in enumerate(found):
        if entry is not None:
            made.append(entry)
            continue
        number = end - length + place
        template, line = body[number], lines[number]
        numbers = _numbers(whole, start, end, place, found)
        assert numbers is not None
        assert isinstance(template, Statement)
        tokens = list(line.tokens)
        for at, token in enumerate(line.tokens):
            if token.kind == "number":
                tokens[at] = replace(token, text=numbers[at])
            if token.kind != "name" or token.text == "_":
                continue
            if at in line.targets:
                name = free_name(re.sub(r"_\d+$", "", token.text).removesuffix("_") + "_2", taken)
                taken.add(name)
            else:
                name = _a_round_later(flow, flow.values[number][at], start, length, made)
            tokens[at] = replace(token, text=name)
        made.append(replace(template, text=text_of(tokens)))
    return made


def _a_round_later(flow: Flow, value: int | str, start: int, length: int, made: Sequence[Entry]) -> str:
    """Returns the name of a value in the next round, or its own name if it is from before all rounds."""
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
