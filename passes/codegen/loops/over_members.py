"""Writes a loop that counts the members of a list as one over the members.

for i in range(4):                                 for i, expert in enumerate(self.experts):
    out = out + gates[:, i] * self.experts[i](x)  ->      out = out + gates[:, i] * expert(x)
"""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from dataclasses import replace

from pd2bw_fx.passes.codegen.attributes import Attributes
from pd2bw_fx.passes.codegen.layout import Loop
from pd2bw_fx.passes.codegen.written import Statement

from .author_loops import names_of_members
from .entries import Entry, entry_text, with_text
from .members import name_of_member
from .tokens import line_of

_HEADER = re.compile(r"for (\w+) in range\((\d+)\):")


def over_members(entries: Sequence[Entry], attributes: Attributes) -> list[Entry]:
    """Goes over the members in place of numbers wherever a loop counts all of them."""
    taken = line_of("\n".join(map(entry_text, entries))).names
    return [_over_members(entry, taken, attributes) for entry in entries]


def _over_members(entry: Entry, taken: Set[str], attributes: Attributes) -> Entry:
    if not isinstance(entry, Loop):
        return entry
    loop = replace(entry, body=tuple(_over_members(inner, taken, attributes) for inner in entry.body))
    header = _HEADER.fullmatch(loop.header)
    if header is None:
        return loop
    counter, number = header.groups()
    text = "\n".join(map(entry_text, loop.body))
    lists = set(re.findall(rf"(?<![\w.])self\.([\w.]+)\[{counter}\]", text))
    held = attributes.container(f"{next(iter(lists))}.0") if len(lists) == 1 else None
    if held is None or not held.is_list or len(held.keys) != int(number):
        return loop
    own = names_of_members(_first_statement(loop).round.loop).get(held.path.rpartition(".")[2])
    member = own if own is not None and own not in taken else name_of_member(held.path, set(taken))
    called = f"self.{held.path}[{counter}]"
    body = tuple(with_text(inner, lambda line: line.replace(called, member)) for inner in loop.body)
    is_counted = counter in line_of("\n".join(map(entry_text, body))).names
    over = (
        f"{counter}, {member} in enumerate(self.{held.path})"
        if is_counted
        else f"{member} in self.{held.path}"
    )
    return replace(loop, header=f"for {over}:", body=body)


def _first_statement(loop: Loop) -> Statement:
    first = loop.body[0]
    return first if isinstance(first, Statement) else _first_statement(first)
