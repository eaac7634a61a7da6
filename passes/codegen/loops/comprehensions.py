"""Writes a loop that only fills a list as a list in one line.

outs = []                                outs = [head(x) for head in self.heads]
for i in range(3):                 ->
    outs.append(self.heads[i](x))
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from pd2bw_fx.passes.codegen.attributes import Attributes
from pd2bw_fx.passes.codegen.layout import WIDTH, Loop
from pd2bw_fx.passes.codegen.written import Statement

from .entries import Entry
from .members import name_of_member
from .tokens import line_of

_HEADER = re.compile(r"for (\w+) in (.+):")
_WHOLE_RANGE = re.compile(r"range\((\d+)\)")
_MOST_INDENTED = 16


def as_comprehensions(entries: Sequence[Entry], attributes: Attributes) -> list[Entry]:
    """Returns the entries with lists in one line, where that fits, and is read by the next line if it may."""
    found: list[Entry] = []
    for entry in entries:
        if not isinstance(entry, Loop):
            found.append(entry)
            continue
        entry = replace(entry, body=tuple(as_comprehensions(entry.body, attributes)))
        made = _comprehension(found[-1] if found else None, entry, attributes)
        if made is None:
            found.append(entry)
        else:
            found[-1] = made
    return found


def _comprehension(before: Entry | None, loop: Loop, attributes: Attributes) -> Statement | None:
    """Returns `outs = [f(x) for f in self.heads]` for `outs = []` and the loop behind it."""
    inside, header = loop.body[0], _HEADER.fullmatch(loop.header)
    if not isinstance(before, Statement) or not isinstance(inside, Statement):
        return None
    if len(loop.body) > 1 or loop.first is not None or header is None or before.region != inside.region:
        return None
    name = before.text.removesuffix(" = []")
    start = f"{name}.append("
    if name == before.text or not inside.text.startswith(start):
        return None
    counter, over = header.groups()
    if "," in over and not over.startswith(("range(", "(")):
        return None
    made = inside.text[len(start) : -1]
    counter, over, made = _over_members(counter, over, made, attributes)
    text = f"{name} = [{made} for {counter} in {over}]"
    return replace(inside, text=text) if len(text) + _MOST_INDENTED <= WIDTH else None


def _over_members(counter: str, over: str, made: str, attributes: Attributes) -> tuple[str, str, str]:
    """Goes over the members of a list where they are all that the counter is for."""
    number = _WHOLE_RANGE.fullmatch(over)
    if number is None:
        return counter, over, made
    lists = set(re.findall(rf"\bself\.([\w.]+)\[{counter}\]", made))
    names = line_of(made).names | {name for found in lists for name in found.split(".")}
    held = attributes.container(f"{next(iter(lists))}.0") if len(lists) == 1 else None
    if held is None or not held.is_list or len(held.keys) != int(number[1]):
        return counter, over, made
    member = name_of_member(held.path, names)
    without = made.replace(f"self.{held.path}[{counter}]", member)
    if counter in line_of(without).names:
        return counter, over, made
    return member, f"self.{held.path}", without
