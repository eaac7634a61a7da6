"""Where ruff format breaks an expression that is too long for its line."""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from .literals import STRING

_OPERATORS: dict[type[ast.AST], int] = {
    ast.Pow: 2, ast.Mult: 3, ast.Div: 3, ast.MatMult: 3, ast.FloorDiv: 3, ast.Mod: 3, ast.Add: 4, ast.Sub: 4,
    ast.LShift: 5, ast.RShift: 5, ast.BitAnd: 6, ast.BitXor: 7, ast.BitOr: 8,
}  # fmt: skip
_ATTRIBUTE, _COMPARE, _CONDITION = 1, 9, 10
_LITERALS = (ast.List, ast.Tuple, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
_TARGET = re.compile(rf"(?:[\w.,() ]|\[(?:[\w-]+|{STRING})\])+ = ")
_STRING_OR_CHARACTER = re.compile(f"{STRING}|.", re.DOTALL)


def parted(text: str) -> tuple[str, str]:
    """Splits a statement into what stands before its value, and the value: "x = " and "f(y)"."""
    if text.startswith("return "):
        return "return ", text.removeprefix("return ")
    found = _TARGET.match(text)
    return ("", text) if found is None else (found[0], text[found.end() :])


def top_level(text: str) -> list[str]:
    """Splits a text at the commas that are in no bracket and no string."""
    parts, start = [], 0
    for position, character, depth in _outside_strings(text):
        if character == "," and depth == 0:
            parts.append(text[start:position].strip())
            start = position + 1
    return [*parts, text[start:].strip()]


def brackets(text: str, start: int) -> list[tuple[int, int]]:
    """Returns where the outermost brackets from `start` on open and close, without empty ones."""
    found, opening = [], 0
    for position, character, depth in _outside_strings(text[start:]):
        if character in "([{" and depth == 1:
            opening = position
        elif character in ")]}" and depth == 0 and position > opening + 1:
            found.append((start + opening, start + position))
    return found


def _outside_strings(text: str) -> Iterator[tuple[int, str, int]]:
    """Yields each character that is in no string, with its place and how many brackets are open after it."""
    depth = 0
    for found in _STRING_OR_CHARACTER.finditer(text):
        character = found[0]
        if len(character) == 1:
            depth += (character in "([{") - (character in ")]}")
            yield found.start(), character, depth


# How ruff format, like Black, breaks a value that is too long for its line:
#
#   value                                    example                   it is broken
#   no brackets                              a.b + c                   in new parentheses, before its signs
#   several of its loosest signs             f(x) + g(y) - z           in new parentheses, before these signs
#   several dots behind brackets             x.view(a).mean(b).sum()   in new parentheses, before these dots
#   one sign, no brackets at either end      f(x) + y                  in new parentheses, before the sign
#   one sign, brackets at an end             y + f(x), [x] + y         inside its brackets
#   a call, list, tuple, dict or set         f(x, y), [x, y]           inside its brackets
#
# Brackets at the beginning are those of `(a + b) * c` or `[x] + y`. At the end, neither a subscript nor a
# call without arguments counts.


@dataclass(slots=True)
class _Shape:
    """The signs and brackets of an expression, as far as they stand outside its brackets.

    `strength` is how loosely its loosest sign binds, `places` where such signs stand. The others say whether
    there are brackets at all, at the beginning, and at the end.
    """

    text: str
    strength: int = 0
    places: tuple[int, ...] = ()
    has_brackets: bool = False
    begins_with: bool = False
    ends_with: bool = False

    def visit(self, node: ast.expr, *, is_first: bool, parenthesized: bool = False) -> None:
        self.ends_with = parenthesized
        if parenthesized:
            self.has_brackets = True
            self.begins_with |= is_first
            return
        match node:
            case ast.BinOp():
                self._binary(node, is_first=is_first)
            case ast.Compare():
                self._comparison(node, is_first=is_first)
            case ast.IfExp(test=test, orelse=orelse):
                self._sign(_CONDITION, self._before(test))
                self._sign(_CONDITION, self._before(orelse))
            case ast.UnaryOp(operand=operand):
                self._operand(node, operand, is_first=False)
            case ast.Attribute():
                self._attribute(node, is_first=is_first)
            case ast.Call(func=function, args=args, keywords=keywords):
                self._receiver(node, function, is_first=is_first)
                self.has_brackets, self.ends_with = True, bool(args or keywords)
            case ast.Subscript(value=value):
                self._receiver(node, value, is_first=is_first)
                self.has_brackets, self.ends_with = True, False
            case _ if isinstance(node, _LITERALS):
                self.has_brackets = self.ends_with = True
                self.begins_with |= is_first

    def _binary(self, node: ast.BinOp, *, is_first: bool) -> None:
        self._sign(_OPERATORS[type(node.op)], self._before(node.right))
        self._operand(node, node.left, is_first=is_first)
        self._operand(node, node.right, is_first=False)

    def _comparison(self, node: ast.Compare, *, is_first: bool) -> None:
        self._operand(node, node.left, is_first=is_first)
        for other in node.comparators:
            self._sign(_COMPARE, self._before(other))
            self._operand(node, other, is_first=False)

    def _attribute(self, node: ast.Attribute, *, is_first: bool) -> None:
        within = self._receiver(node, node.value, is_first=is_first)
        if within or isinstance(node.value, (ast.Call, ast.Subscript, *_LITERALS)):
            self._sign(_ATTRIBUTE, node.value.end_col_offset or 0)
        self.ends_with = False

    def _receiver(self, node: ast.expr, value: ast.expr, *, is_first: bool) -> bool:
        """Visits what stands before a dot or a bracket; returns whether that is in parentheses."""
        within = value.col_offset > node.col_offset
        self.visit(value, is_first=is_first, parenthesized=within)
        return within

    def _operand(self, node: ast.expr, operand: ast.expr, *, is_first: bool) -> None:
        is_left = operand.col_offset == node.col_offset
        within = not is_left and self.text[operand.col_offset - 1] == "("
        self.visit(operand, is_first=is_first, parenthesized=within)

    def _before(self, operand: ast.expr) -> int:
        """Returns where the sign in front of an operand begins."""
        before = self.text[: operand.col_offset].rstrip(" (")
        return before.rindex(" ") + 1

    def _sign(self, strength: int, place: int) -> None:
        if strength > self.strength:
            self.strength, self.places = strength, ()
        if strength == self.strength:
            self.places = (*self.places, place)


@functools.lru_cache(maxsize=1024)
def _shape(value: str) -> _Shape | None:
    try:
        node = ast.parse(value, mode="eval").body
    except SyntaxError:
        return None
    shape = _Shape(value)
    shape.visit(node, is_first=True, parenthesized=node.col_offset > 0)
    return shape


def needs_parentheses(value: str) -> bool:
    """Whether a value that is too long is put in parentheses, instead of opening brackets of its own."""
    shape = _shape(value)
    if shape is None:
        return False
    if not shape.has_brackets or len(shape.places) > 1:
        return True
    return shape.strength > _ATTRIBUTE and not (shape.begins_with or shape.ends_with)


def operands(value: str) -> list[str]:
    """Splits a value in parentheses into lines: at its loosest signs, or before the calls of a chain.

    It is one line where there is neither.
    """
    shape = _shape(value)
    if shape is None or (shape.strength <= _ATTRIBUTE and len(shape.places) < 2):
        return [value]
    places = [0, *sorted(shape.places), len(value)]
    return [value[start:end].rstrip() for start, end in itertools.pairwise(places)]


@dataclass(frozen=True, slots=True)
class _Open:
    """An open bracket, where its content begins, and the colons in the current item of a subscript."""

    character: str
    start: int
    colons: list[int] = field(default_factory=list)

    def spaced(self, text: str, end: int) -> tuple[int, str] | None:
        """Returns where the slice that ends at `end` begins, and its text with spaces, if it needs any."""
        if not self.colons:
            return None
        first = max(self.start, text.rfind(", ", self.start, self.colons[0]) + 2)
        bounds = _bounds(text[first:end], [colon - first for colon in self.colons])
        return None if bounds is None else (first, bounds)


def spaced(text: str) -> str:
    """Puts spaces around the colon between bounds that are no plain names or numbers: `x[: -self.size]`."""
    out, start, opened = [], 0, list[_Open]()
    for position, character, _ in _outside_strings(text):
        match character:
            case "(" | "[" | "{":
                opened.append(_Open(character, position + 1))
            case ":" if opened and opened[-1].character == "[":
                opened[-1].colons.append(position)
            case ")" | "]" | "}" | "," if opened:
                found = opened[-1].spaced(text, position)
                if found is not None and found[0] >= start:
                    out += [text[start : found[0]], found[1]]
                    start = position
                opened[-1].colons.clear()
                if character != ",":
                    opened.pop()
    return "".join([*out, text[start:]])


_SIMPLE = re.compile(r"[-+~]*[\w.]*")


def _bounds(text: str, colons: list[int]) -> str | None:
    parts = [text[a:b].strip() for a, b in zip([0, *(c + 1 for c in colons)], [*colons, None], strict=True)]
    if all(_SIMPLE.fullmatch(part) and not re.search(r"[A-Za-z_]\w*\.", part) for part in parts):
        return None
    spelled = parts[0]
    for before, part in itertools.pairwise(parts):
        spelled += (" :" if before else ":") + (f" {part}" if part else "")
    return spelled
