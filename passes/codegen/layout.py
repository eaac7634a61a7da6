"""Lines as ruff format lays them out, and runs of equal lines rolled up into loops."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .attributes import Attributes
from .body import Region
from .method import Statement

WIDTH = 110
_REFERENCE = re.compile("\ue000([^\ue001]*)\ue001")
_LONGEST_BODY = 6


@dataclass(frozen=True, slots=True)
class Loop:
    """`body` once for each member of the containers; `first` is assigned before it, if anything."""

    header: str
    body: tuple[Statement, ...]
    first: str | None = None


def resolve(text: str, attributes: Attributes) -> str:
    """Module references spelled by what __init__ builds."""
    return _REFERENCE.sub(lambda match: attributes.refer(match[1]), text)


def rolled(statements: Sequence[Statement], attributes: Attributes) -> list[Statement | Loop]:
    """Statements that repeat for every member of a container, as a loop over it.

    Lines that are equal but for the member's number do the same one after another as in a loop.
    """
    found: list[Statement | Loop] = []
    position = 0
    while position < len(statements):
        for length in range(1, _LONGEST_BODY + 1):
            loop = _loop_at(statements[position:], length, attributes)
            if loop is not None:
                found.append(loop[0])
                position += loop[1]
                break
        else:
            found.append(statements[position])
            position += 1
    return found


def _loop_at(statements: Sequence[Statement], length: int, attributes: Attributes) -> tuple[Loop, int] | None:
    members = _members(statements[:length], attributes)
    if not members:
        return None
    all_keys = {tuple(keys) for keys, _ in members.values()}
    if len(all_keys) != 1:
        return None
    keys = all_keys.pop()
    count = len(keys)
    if count < 2 or len(statements) < count * length:
        return None
    chunks = [statements[i * length : (i + 1) * length] for i in range(count)]
    bodies = [_body(chunk, key, members, attributes) for chunk, key in zip(chunks, keys, strict=True)]
    first = None
    if bodies[0] != bodies[1] and length == 1 and bodies[0] is not None and bodies[1] is not None:
        first = _first_input(bodies[0][0], bodies[1][0])
        if first is not None:
            bodies[0] = bodies[1]
    if bodies[0] is None or any(body != bodies[0] for body in bodies[1:]):
        return None
    texts = bodies[0]
    body = tuple(
        Statement(text, _common_comment(chunks, place), chunks[0][place].region)
        for place, text in enumerate(texts)
    )
    names = _loop_names(members, statements[: count * length])
    resolved = tuple(Statement(_named(s.text, names), s.comment, s.region) for s in body)
    return Loop(_header(members, names, attributes), resolved, first), count * length


def _members(chunk: Sequence[Statement], attributes: Attributes) -> dict[str, tuple[Sequence[str], bool]]:
    """The containers that a chunk refers to: path -> (keys, whether it is a list)."""
    members: dict[str, tuple[Sequence[str], bool]] = {}
    for statement in chunk:
        for path in _REFERENCE.findall(statement.text):
            found = _container_of(path, attributes)
            if found is not None:
                holder, is_list, keys = found
                members[holder] = (keys, is_list)
    return members


def _container_of(path: str, attributes: Attributes) -> tuple[str, bool, Sequence[str]] | None:
    parts = path.split(".")
    for end in range(2, len(parts) + 1):
        found = attributes.container(".".join(parts[:end]))
        if found is not None:
            return found
    return None


def _body(
    chunk: Sequence[Statement],
    key: str,
    members: dict[str, tuple[Sequence[str], bool]],
    attributes: Attributes,
) -> list[str] | None:
    """The chunk's texts with the members of this key marked; None if it refers to another key's."""
    texts = []
    for statement in chunk:
        text = statement.text
        for path in dict.fromkeys(_REFERENCE.findall(text)):
            holder = next((h for h in members if path.startswith(f"{h}.")), None)
            if holder is None:
                continue
            member, whole = attributes.refer(f"{holder}.{key}"), attributes.refer(path)
            if path != f"{holder}.{key}" and not path.startswith(f"{holder}.{key}."):
                return None
            if not whole.startswith(member):
                return None
            text = text.replace(f"\ue000{path}\ue001", f"\ue002{holder}\ue003{whole[len(member) :]}")
        texts.append(text)
    return texts


def _first_input(first: str, other: str) -> str | None:
    """`hidden = image`, where the first line reads another value than the ones that follow."""
    pattern = re.compile("(\\w+) = (\ue002[^\ue003]*\ue003)\\((\\w+)\\)")
    a, b = pattern.fullmatch(first), pattern.fullmatch(other)
    if a is None or b is None or a[1] != b[1] or a[2] != b[2] or b[1] != b[3]:
        return None
    return f"{b[3]} = {a[3]}"


def _common_comment(chunks: Sequence[Sequence[Statement]], place: int) -> str:
    comments = {chunk[place].comment for chunk in chunks}
    return comments.pop() if len(comments) == 1 else chunks[-1][place].comment


def _loop_names(
    members: dict[str, tuple[Sequence[str], bool]], statements: Sequence[Statement]
) -> dict[str, str]:
    names: dict[str, str] = {}
    for holder in members:
        last = holder.rpartition(".")[2]
        name = last[:-1] if len(last) > 2 and last.endswith("s") and last[:-1].isidentifier() else "block"
        taken = any(re.search(rf"\b{name}\b", s.text) for s in statements) or name in names.values()
        names[holder] = f"{name}_module" if taken else name
    return names


def _named(text: str, names: dict[str, str]) -> str:
    for holder, name in names.items():
        text = text.replace(f"\ue002{holder}\ue003", name)
    return text


def _header(
    members: dict[str, tuple[Sequence[str], bool]], names: dict[str, str], attributes: Attributes
) -> str:
    sources = [
        attributes.refer(holder) + ("" if is_list else ".values()")
        for holder, (_, is_list) in members.items()
    ]
    if len(sources) == 1:
        return f"for {names[next(iter(members))]} in {sources[0]}:"
    return f"for {', '.join(names.values())} in zip({', '.join(sources)}, strict=True):"


def written(entries: Sequence[Statement | Loop], attributes: Attributes, indent: int) -> Iterator[str]:
    """The lines of a body, regions re-entered around the statements that stood in them."""
    region: Region = (None, None)
    for entry in entries:
        statements = entry.body if isinstance(entry, Loop) else (entry,)
        wanted = statements[0].region
        if wanted != region:
            region = wanted
            for depth, line in enumerate(_region_headers(region)):
                yield " " * (indent + 4 * depth) + line
        inner = indent + 4 * len(_region_headers(region))
        if isinstance(entry, Loop):
            if entry.first is not None:
                yield " " * inner + entry.first
            yield " " * inner + entry.header
            inner += 4
        for statement in statements:
            yield from laid_out(resolve(statement.text, attributes), inner, statement.comment)


def _region_headers(region: Region) -> list[str]:
    no_grad, autocast = region
    headers = []
    if no_grad is not None:
        headers.append("with torch.no_grad():" if no_grad else "with torch.enable_grad():")
    if isinstance(autocast, tuple):
        device, dtype, enabled = autocast
        kind = f", dtype={dtype}" if enabled and dtype is not None else ""
        headers.append(f'with torch.autocast("{device}"{kind}{"" if enabled else ", enabled=False"}):')
    return headers


def laid_out(text: str, indent: int, comment: str = "") -> Iterator[str]:
    """One statement or item, on one line if it fits, else with its last brackets opened."""
    pad = " " * indent
    if len(pad + text) <= WIDTH:
        remark = f"  # {comment}" if comment else ""
        yield pad + text + (remark if len(pad + text + remark) <= WIDTH else "")
        return
    end = "," if text.endswith(",") else ""
    opening = _last_opening(text.removesuffix(","))
    if opening is None:
        yield pad + text
        return
    bare = text.removesuffix(",")
    head, inside, tail = bare[: opening + 1], bare[opening + 1 : -1], bare[-1] + end
    remark = f"  # {comment}" if comment and len(pad + head + comment) + 4 <= WIDTH else ""
    yield pad + head + remark
    items = _top_level(inside)
    if len(pad + inside) + 4 <= WIDTH:
        yield f"{pad}    {inside}"
    elif len(items) == 1:
        yield from laid_out(inside, indent + 4)
    else:
        for item in items:
            yield from laid_out(f"{item},", indent + 4)
    yield pad + tail


def signature_lines(name: str, parameters: Sequence[str], returned: str, indent: int) -> Iterator[str]:
    """The head of a function."""
    pad, joined, end = " " * indent, ", ".join(parameters), f") -> {returned}:"
    if len(f"{pad}def {name}({joined}{end}") <= WIDTH:
        yield f"{pad}def {name}({joined}{end}"
        return
    yield f"{pad}def {name}("
    if len(pad + joined) + 4 <= WIDTH:
        yield f"{pad}    {joined}"
    else:
        yield from (f"{pad}    {parameter}," for parameter in parameters)
    yield pad + end


def _last_opening(text: str) -> int | None:
    """Where the bracket opens that closes at the end of the text."""
    if text[-1] not in ")]}":
        return None
    depth, quote = 0, False
    for position in range(len(text) - 1, -1, -1):
        character = text[position]
        if character == '"' and (position == 0 or text[position - 1] != "\\"):
            quote = not quote
        if quote:
            continue
        depth += (character in ")]}") - (character in "([{")
        if depth == 0:
            return position
    return None


def _top_level(inside: str) -> list[str]:
    """The parts between commas that are in no bracket and no string."""
    parts, depth, quote, start = [], 0, False, 0
    for position, character in enumerate(inside):
        if character == '"' and (position == 0 or inside[position - 1] != "\\"):
            quote = not quote
        if quote:
            continue
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append(inside[start:position].strip())
            start = position + 1
    return [*parts, inside[start:].strip()]
