"""Writes a loop that counts the members of a list as one over the members.

for i in range(4):                                 for i, expert in enumerate(self.experts):
    out = out + gates[:, i] * self.experts[i](x)  ->      out = out + gates[:, i] * expert(x)

Beside a list of values it is `for up, skip in zip(self.ups, skips)` or `for i, skip in enumerate(skips)`.
Where the author counts the members of several lists, so does the loop.
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
_TOGETHER = re.compile(r"for (\w+)((?:, \w+)*) in (?:zip\()?range\((\d+)\)((?:, \w+)*)(?:, strict=True\))?:")


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
        return _over_all(loop, taken, attributes)
    counter, number = header.groups()
    text = "\n".join(map(entry_text, loop.body))
    lists = set(re.findall(rf"(?<![\w.])self\.([\w.]+)\[{counter}\]", text))
    if len(lists) > 1:
        authors = names_of_members(_first_statement(loop).round.loop)
        counts_itself = not any(path.rpartition(".")[2] in authors for path in lists)
        return loop if counts_itself else _over_all(loop, taken, attributes)
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


def _over_all(loop: Loop, taken: Set[str], attributes: Attributes) -> Loop:
    """Goes over members of several lists, or of lists and other values, together.

    Where the numbers are needed beside one list of values, it counts along with that.
    """
    header = _TOGETHER.fullmatch(loop.header)
    if header is None:
        return loop
    counter, number, names, lists = header[1], header[3], _listed(header[2]), _listed(header[4])
    body, members = loop.body, dict[str, str]()
    text = "\n".join(map(entry_text, body))
    for path in dict.fromkeys(re.findall(rf"(?<![\w.])self\.([\w.]+)\[{counter}\]", text)):
        held = attributes.container(f"{path}.0")
        if held is None or not held.is_list or len(held.keys) != int(number):
            continue
        own = names_of_members(_first_statement(loop).round.loop).get(path.rpartition(".")[2])
        known = {*taken, *members.values(), *names}
        is_new = own is not None and own not in known
        members[path] = own if own is not None and is_new else name_of_member(path, known, is_alone=False)
        called, member = f"self.{path}[{counter}]", members[path]
        body = tuple(
            with_text(each, lambda line, c=called, m=member: line.replace(c, m))  # type: ignore[misc]
            for each in body
        )
    if counter not in line_of("\n".join(map(entry_text, body))).names:
        sources = ", ".join([*(f"self.{path}" for path in members), *lists])
        called = ", ".join([*members.values(), *names])
        return replace(loop, header=f"for {called} in zip({sources}, strict=True):", body=body)
    if len(lists) == 1:
        return replace(loop, header=f"for {counter}, {names[0]} in enumerate({lists[0]}):")
    return loop


def _listed(text: str) -> list[str]:
    """Returns the names of ", a, b"."""
    return text.split(", ")[1:]


def _first_statement(loop: Loop) -> Statement:
    first = loop.body[0]
    return first if isinstance(first, Statement) else _first_statement(first)
