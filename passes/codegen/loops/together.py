"""Writes the values of one statement of the author's in one line again.

q = qkv[0]
k = qkv[1]        ->    q, k, v = qkv[0], qkv[1], qkv[2]
v = qkv[2]
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from pd2bw_fx.passes.codegen.layout import Loop, common
from pd2bw_fx.passes.codegen.written import LONGEST_FOLDED, Statement

from .entries import Entry
from .tokens import line_of

_ONE_VALUE = re.compile(r"(\w+) = (.+)")


def together(entries: Sequence[Entry]) -> list[Entry]:
    """Joins the lines of each statement that assigns values one by one, where they fit on one line."""
    found: list[Entry] = []
    at = 0
    while at < len(entries):
        entry = entries[at]
        number = len(entry.together) if isinstance(entry, Statement) else 0
        joined = _joined(entries[at : at + number]) if number > 1 else None
        if isinstance(entry, Loop):
            found.append(replace(entry, body=tuple(together(entry.body))))
        else:
            found.append(joined or entry)
        at += 1 if joined is None else number
    return found


def _joined(entries: Sequence[Entry]) -> Statement | None:
    """Returns the lines as one, if they are those of one statement and none reads what another one makes."""
    lines = [entry for entry in entries if isinstance(entry, Statement)]
    parts = [found.groups() for line in lines if (found := _ONE_VALUE.fullmatch(line.text)) is not None]
    first = lines[0]
    alike = {(line.place, line.region, line.together) for line in lines}
    if len(parts) != len(first.together) or len(alike) > 1:
        return None
    if tuple(line.named for line in lines) != first.together:
        return None
    for at, (target, _) in enumerate(parts):
        if any(target in line_of(value).names or target == other for other, value in parts[at + 1 :]):
            return None
    targets, values = (", ".join(texts) for texts in zip(*parts, strict=True))
    text = f"{targets} = {values}"
    return replace(common(lines), text=text) if len(text) <= LONGEST_FOLDED else None
