"""Rolls up runs of lines that differ only in the member of a container into loops over the container."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pd2bw_fx.passes.codegen.attributes import Attributes, Container
from pd2bw_fx.passes.codegen.layout import REFERENCE, Loop, common, free
from pd2bw_fx.passes.codegen.literals import STRING, is_number, is_plain_name
from pd2bw_fx.passes.codegen.written import Statement

from .author_loops import names_of_members

_LONGEST_BODY = 6
_DEEPEST = 3  # nested containers in which loops are looked for


def rolled(statements: Sequence[Statement], attributes: Attributes) -> list[Statement | Loop]:
    """Writes statements that repeat for every member of a container as a loop over it.

    Lines that are equal except for the member's number do the same one after another as in a loop. Where the
    author's lines differ, the last one stands for all, if the loop has fewer lines at all.
    """
    found: list[Statement | Loop] = []
    plain = (REFERENCE.sub("", statement.text) for statement in statements)
    words = {word for text in plain for word in re.findall(r"\w+", text)}
    position = 0
    while position < len(statements):
        for level, length in itertools.product(range(_DEEPEST), range(1, _LONGEST_BODY + 1)):
            loop = _loop_at(statements[position:], length, attributes, words, level)
            if loop is not None:
                found.append(loop[0])
                position += loop[1]
                break
        else:
            found.append(statements[position])
            position += 1
    return found


def _loop_at(
    statements: Sequence[Statement], length: int, attributes: Attributes, words: set[str], level: int
) -> tuple[Loop, int] | None:
    """Returns the loop that begins here with a body of this length, and how many statements it replaces.

    It goes over containers that are nested in `level` others.
    """
    members = _members(statements[:length], attributes, level)
    spans = {(tuple(member.container.keys), member.start) for member in members.values()}
    if len(spans) != 1 or len({s.region for s in statements[:length]}) != 1:
        return None
    keys, start = spans.pop()
    most = min(len(keys) - start, len(statements) // length)
    chunks = [statements[i * length : (i + 1) * length] for i in range(most)]
    bodies = [_body(chunk, keys[start + i], members, attributes) for i, chunk in enumerate(chunks)]
    first = None
    if most > 1 and bodies[0] and bodies[1] and bodies[0] != bodies[1]:
        first = _first_input(bodies[0], bodies[1])
        bodies[0] = bodies[0] if first is None else bodies[1]
    count = next((i for i in range(most) if not _is_another(bodies, chunks, i)), most)
    span = range(start, start + count)
    containers = [member.container for member in members.values()]
    are_lists = all(container.is_list for container in containers)
    whole = count == len(keys) and all(container.keeps_order for container in containers)
    if count < 2 or not (whole or are_lists or _are_numbers(keys, span)):
        return None
    if count * length <= 1 + length and _are_of_unlike_lines(chunks[:count]):
        return None
    counter = None if whole or are_lists else free("i", words)
    authors = names_of_members(statements[0].round.loop)
    names = _loop_names(members, counter, words, attributes, authors)
    assert bodies[0] is not None
    body = tuple(
        replace(common([chunk[place] for chunk in chunks[:count]]), text=_named(text, names))
        for place, text in enumerate(bodies[0])
    )
    return Loop(_header(members, names, span, counter, attributes), body, first), count * length


def _are_of_unlike_lines(chunks: Sequence[Sequence[Statement]]) -> bool:
    """Whether the author has the rounds one below the other: `x = attention(x)`, `x = upsample(x)`."""
    return any(len({s.place for s in statements}) > 1 for statements in zip(*chunks, strict=True))


def _is_another(
    bodies: Sequence[list[str] | None], chunks: Sequence[Sequence[Statement]], index: int
) -> bool:
    """Whether this chunk is the first one's body once more."""
    same_regions = [s.region for s in chunks[index]] == [s.region for s in chunks[0]]
    return bodies[index] is not None and bodies[index] == bodies[0] and same_regions


def _are_numbers(keys: Sequence[str], span: range) -> bool:
    """Whether these keys count up."""
    found = [keys[i] for i in span]
    return is_number(found[0]) and found == [str(int(found[0]) + i) for i in range(len(found))]


@dataclass(frozen=True, slots=True)
class _Member:
    """A container that a body refers to, and the place in it of the member that the body refers to."""

    container: Container
    start: int


def _members(chunk: Sequence[Statement], attributes: Attributes, level: int) -> dict[str, _Member]:
    """Finds the containers that a chunk refers to, by path."""
    members: dict[str, _Member] = {}
    for statement in chunk:
        for path in REFERENCE.findall(statement.text):
            found = _container_of(path, attributes, level)
            if found is not None:
                key = path.removeprefix(_within(found.path)).partition(".")[0]
                members.setdefault(found.path, _Member(found, list(found.keys).index(key)))
    return members


def _container_of(path: str, attributes: Attributes, level: int) -> Container | None:
    parts = path.split(".")
    holders = (attributes.container(".".join(parts[:end])) for end in range(1, len(parts) + 1))
    found = [holder for holder in holders if holder is not None]
    return found[level] if level < len(found) else None


def _within(holder: str) -> str:
    """Returns what the paths of a container's members begin with; for the module itself it is ""."""
    return f"{holder}." if holder else ""


def _body(
    chunk: Sequence[Statement],
    key: str,
    members: dict[str, _Member],
    attributes: Attributes,
) -> list[str] | None:
    """Returns the chunk's texts with the members of this key marked; None if it refers to another key's."""
    texts = []
    for statement in chunk:
        text = statement.text
        for path in dict.fromkeys(REFERENCE.findall(text)):
            holder = next((h for h in members if path.startswith(_within(h))), None)
            if holder is None:
                continue
            own = f"{_within(holder)}{key}"
            member, whole = attributes.refer(own), attributes.refer(path)
            if path != own and not path.startswith(_within(own)):
                return None
            if not whole.startswith(member):
                return None
            text = text.replace(f"\ue000{path}\ue001", f"\ue002{holder}\ue003{whole[len(member) :]}")
        texts.append(text)
    return texts


_WORD = re.compile(f"\ue000[^\ue001]*\ue001|\ue002[^\ue003]*\ue003|{STRING}|\\.?\\w+=?|\\W")


def _first_input(first: Sequence[str], other: Sequence[str]) -> str | None:
    """Returns `hidden = image` where the first round reads another value than what the rounds hand on.

    The first round may differ in nothing else.
    """
    found: tuple[str, str] | None = None  # what the rounds hand on, and what the first one reads
    assigned: set[str] = set()
    kept: set[str] = set()  # what all rounds read from before the round
    for text, wanted in zip(first, other, strict=True):
        target, _, value = text.rpartition(" = ")
        target_of_other, _, value_of_other = wanted.rpartition(" = ")
        words, others = _WORD.findall(value), _WORD.findall(value_of_other)
        if target != target_of_other or len(words) != len(others):
            return None
        for word, name in zip(words, others, strict=True):
            if word == name:
                kept |= {word} - assigned
                continue
            if not (is_plain_name(word) and is_plain_name(name)) or found not in (None, (name, word)):
                return None
            if name in assigned or word in assigned:
                return None
            found = name, word
        assigned |= set(re.findall(r"\w+", target))
    if found is None or found[0] in kept or found[0] not in assigned:
        return None
    return f"{found[0]} = {found[1]}"


def _loop_names(
    members: dict[str, _Member],
    counter: str | None,
    words: set[str],
    attributes: Attributes,
    authors: Mapping[str, str],
) -> dict[str, str]:
    """Returns what the body calls the member of each container; part of a dict is indexed by number.

    `authors` has the author's names for members.
    """
    names: dict[str, str] = {}
    for holder, member in members.items():
        if counter is not None:
            key = counter if member.container.is_list else f"str({counter})"
            names[holder] = f"{attributes.refer(holder)}[{key}]"
            continue
        taken = words | set(names.values())
        own = authors.get(holder.rpartition(".")[2])
        if own is not None and own not in taken:
            names[holder] = own
            continue
        names[holder] = name_of_member(holder, taken, is_alone=len(members) == 1)
    return names


def name_of_member(holder: str, taken: set[str], *, is_alone: bool = True) -> str:
    """Returns what a loop over a container calls its member: a name that is not `taken`."""
    wishes = _member_names(holder, is_alone=is_alone)
    return next((name for name in wishes if name not in taken), free(wishes[-1], taken))


def _member_names(holder: str, *, is_alone: bool) -> list[str]:
    """Lists names for a member of a container, best first: a block of `blocks`, a conv beside a norm."""
    last = holder.rpartition(".")[2]
    if len(last) < 3 or not is_plain_name(last):
        return ["block", "block_module"]
    if last.endswith("s") and is_plain_name(last[:-1]):
        return [last[:-1], f"{last[:-1]}_module"]
    return ["block", last, f"{last}_module"] if is_alone else [last, "block", f"{last}_module"]


def _named(text: str, names: dict[str, str]) -> str:
    for holder, name in names.items():
        text = text.replace(f"\ue002{holder}\ue003", name)
    return text


def _header(
    members: dict[str, _Member],
    names: dict[str, str],
    span: range,
    counter: str | None,
    attributes: Attributes,
) -> str:
    keys = next(iter(members.values())).container.keys
    if counter is not None:
        return f"for {counter} in range({keys[span.start]}, {int(keys[span.start]) + len(span)}):"
    cut = f"[{span.start or ''}:{'' if span.stop == len(keys) else span.stop}]"
    cut = "" if len(span) == len(keys) else cut
    # A slice of `self` would be another instance of the class: list(self) gives the members.
    sources = [
        (attributes.refer(holder) if holder or not cut else "list(self)")
        + (cut if member.container.is_list else ".values()")
        for holder, member in members.items()
    ]
    if len(sources) == 1:
        return f"for {names[next(iter(members))]} in {sources[0]}:"
    return f"for {', '.join(names.values())} in zip({', '.join(sources)}, strict=True):"
