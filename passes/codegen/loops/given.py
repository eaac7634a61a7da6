"""Values that the rounds of a loop read one after another, from a list that was there before.

x = self.ups[0](torch.cat([skip_3, x], dim=1))        for up, skip in zip(self.ups, [skip_3, skip_2, skip]):
x = self.ups[1](torch.cat([skip_2, x], dim=1))   ->       x = up(torch.cat([skip, x], dim=1))
x = self.ups[2](torch.cat([skip, x], dim=1))

The list stands in a line in front of the loop while other loops are looked for, one of which may fill it;
then it is `skips[::-1]`. At last it is written in the loop's header.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

from pd2bw_fx.passes.codegen.layout import WIDTH, Loop, free
from pd2bw_fx.passes.codegen.literals import identifier
from pd2bw_fx.passes.codegen.written import Statement

from .author_loops import names_over_lists
from .counted import Counting, TokenAt
from .entries import Entry, entry_text, with_text, without_number
from .tokens import line_of, text_of

_LONGEST_LIST = 240  # characters
_A_LIST = re.compile(r"(\w+) = (\[.+\]|\w+(?:\[::-1\])?)")
_PARTS = re.compile(r"(\w+(?:, \w+)+) = (\S+\.unbind\([^()]*\))")
_BOUND = re.compile(r"for ([\w, ]+) in ")
_MARGIN = 12  # of a loop's header


@dataclass(frozen=True, slots=True)
class Given:
    """What rounds read at some places: its name in the loop, the list's name, and the names by round."""

    name: str
    listed: str
    names: tuple[str, ...]

    @property
    def statement(self) -> str:
        return f"{self.listed} = [{', '.join(self.names)}]"

    @property
    def fits(self) -> bool:
        return len(self.statement) <= _LONGEST_LIST


def named_columns(
    columns: Mapping[TokenAt, tuple[int | str, ...]],
    names: Mapping[TokenAt, tuple[str, ...]],
    loop: str,
    zipped: Sequence[tuple[int | str, ...]],
    taken: Set[str],
    needed: Set[str],
) -> dict[TokenAt, Given]:
    """Names what rounds read, by place: as the author's loop does, if that is known, else after the values.

    `zipped` has what is read in the order in which the author's loop goes over it; it is empty where that is
    not known. Of the names that are `taken`, those that are not `needed` in the loop or behind it may be the
    author's.
    """
    plain = {columns[place]: _plain_name(names[place]) for place in [*columns][::-1]}
    authors = [name for _, name in names_over_lists(loop)]
    wishes: Mapping[tuple[int | str, ...], str] = {}
    if sorted(authors) == sorted(plain.values()):
        wishes = plain
    elif len(authors) == len(zipped):
        wishes = dict(zip(zipped, authors, strict=True))
    found: dict[tuple[int | str, ...], Given] = {}
    used = set(taken)
    for place, column in columns.items():
        if column in found:
            continue
        wish = wishes.get(column, plain[column])
        is_free = wishes and wish not in needed | {
            name for each in found.values() for name in (each.name, each.listed)
        }
        name = wish if is_free else free(wish, used)
        listed = free(f"{name.rstrip('_')}_list", used | {name})
        used |= {name, listed}
        found[column] = Given(name, listed, names[place])
    return {place: found[column] for place, column in columns.items()}


def _plain_name(names: Sequence[str]) -> str:
    return Counter(map(without_number, names)).most_common(1)[0][0]


def header(counted: Counting, counter: str, given: Sequence[Given]) -> str:
    """Returns the header of a loop over these lists, beside what it counts."""
    if not given:
        return counted.header(counter)
    names, lists = [each.name for each in given], [each.listed for each in given]
    if counted.tokens:
        at = 0 if counted.is_range else len(names)
        names.insert(at, counter)
        lists.insert(at, counted.over())
    over = lists[0] if len(lists) == 1 else f"zip({', '.join(lists)}, strict=True)"
    return f"for {', '.join(names)} in {over}:"


def with_lists_in_headers(entries: Sequence[Entry], later: Sequence[Entry] = ()) -> list[Entry]:
    """Writes a list in the header of the loop behind it, where only that reads it and it fits.

    `later` runs after all entries.
    """
    found: list[Entry] = []
    for at, entry in enumerate(entries):
        if not isinstance(entry, Loop):
            found.append(entry)
            continue
        behind = (*entries[at + 1 :], *later)
        body = with_lists_in_headers(entry.body, (*entry.body, *behind))  # the next round is behind this one
        loop = replace(entry, body=tuple(body))
        while found and isinstance(before := found[-1], Statement):
            made = _A_LIST.fullmatch(before.text)
            if made is None or before.place:
                break
            name, listed = made.groups()
            others = "\n".join(map(entry_text, (*entries[at + 1 :], *loop.body)))
            within = re.sub(rf"\b{name}\b", lambda _, text=listed: text, loop.header)  # type: ignore[misc]
            if within == loop.header or name in line_of(others).names or len(within) > WIDTH - _MARGIN:
                break
            loop = replace(loop, header=within)
            found.pop()
        loop = _over_parts(loop, found, behind)
        found.append(_with_plain_names(loop, behind))
    return found


def _over_parts(loop: Loop, before: list[Entry], behind: Sequence[Entry]) -> Loop:
    """Goes over `x.unbind()` itself where the parts of x have names for this loop alone.

    Takes the line that gives them names out of `before`.
    """
    for at, entry in reversed(list(enumerate(before))):
        made = _PARTS.fullmatch(entry.text) if isinstance(entry, Statement) else None
        if made is None or f"[{made[1]}]" not in loop.header:
            continue
        between = line_of("\n".join(map(entry_text, before[at + 1 :])), is_loop=True)
        others = line_of("\n".join(map(entry_text, (*loop.body, *behind))), is_loop=True)
        header = loop.header.replace(f"[{made[1]}]", made[2])
        names = {*made[1].split(", ")}
        is_read = not names.isdisjoint({*between.names, *others.names, *line_of(header).names})
        if (
            is_read
            or not line_of(made[2]).names.isdisjoint(between.assigned)
            or len(header) > WIDTH - _MARGIN
        ):
            continue
        del before[at]
        return replace(loop, header=header)
    return loop


def _with_plain_names(loop: Loop, later: Sequence[Entry]) -> Loop:
    """Goes over `k` where it is `k_`, if the other k is needed neither in the loop nor behind it any more."""
    bound = _BOUND.match(loop.header)
    for name in bound[1].split(", ") if bound is not None else ():
        plain = name.removesuffix("_")
        inside = line_of(entry_text(loop), is_loop=True)
        if plain in {name, *inside.names} or identifier(plain) != plain or _is_read(plain, later):
            continue
        renamed = functools.partial(_renamed, name=name, other=plain)
        body = tuple(with_text(inner, renamed) for inner in loop.body)
        loop = replace(loop, header=renamed(loop.header), body=body)
    return loop


def _renamed(text: str, *, name: str, other: str) -> str:
    tokens = line_of(text).tokens
    return text_of([replace(t, text=other) if (t.kind, t.text) == ("name", name) else t for t in tokens])


def _is_read(name: str, entries: Sequence[Entry]) -> bool:
    """Whether lines read a name that they have not made themselves."""
    for entry in entries:
        if isinstance(entry, Loop):
            bound, over = _BOUND.match(entry.header), line_of(entry.header.partition(" in ")[2])
            is_its_own = bound is not None and name in bound[1].split(", ") and name not in over.names
            if not is_its_own and name in line_of(entry_text(entry)).names:
                return True
            continue
        line = line_of(entry.text)
        read = (t.text for at, t in enumerate(line.tokens) if t.kind == "name" and at not in line.targets)
        if name in read:
            return True
        if name in line.assigned:
            return False
    return False
