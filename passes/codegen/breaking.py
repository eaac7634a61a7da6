"""Where ruff format breaks an expression that is too long for its line."""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

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
    """A statement as what stands before its value, and that: "x = " and "f(y)"."""
    if text.startswith("return "):
        return "return ", text.removeprefix("return ")
    found = _TARGET.match(text)
    return ("", text) if found is None else (found[0], text[found.end() :])


def top_level(text: str) -> list[str]:
    """The parts between commas that are in no bracket and no string."""
    parts, start = [], 0
    for position, character, depth in _outside_strings(text):
        if character == "," and depth == 0:
            parts.append(text[start:position].strip())
            start = position + 1
    return [*parts, text[start:].strip()]


def brackets(text: str, start: int) -> list[tuple[int, int]]:
    """Where the outermost brackets from `start` on open and close that have something in them."""
    found, opening = [], 0
    for position, character, depth in _outside_strings(text[start:]):
        if character in "([{" and depth == 1:
            opening = position
        elif character in ")]}" and depth == 0 and position > opening + 1:
            found.append((start + opening, start + position))
    return found


def _outside_strings(text: str) -> Iterator[tuple[int, str, int]]:
    """Each character that is in no string, with its place and how many brackets are open behind it."""
    depth = 0
    for found in _STRING_OR_CHARACTER.finditer(text):
        character = found[0]
        if len(character) == 1:
            depth += (character in "([{") - (character in ")]}")
            yield found.start(), character, depth


@dataclass(slots=True)
class _Shape:
    """What an expression is made of, outside its brackets: how loosely its loosest sign binds, where such
    signs stand, and whether there is a bracket at all, at the beginning, at the end."""

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
        elif isinstance(node, ast.BinOp):
            self._sign(_OPERATORS[type(node.op)], self._before(node.right))
            self._operand(node, node.left, is_first=is_first)
            self._operand(node, node.right, is_first=False)
        elif isinstance(node, ast.Compare):
            self._operand(node, node.left, is_first=is_first)
            for other in node.comparators:
                self._sign(_COMPARE, self._before(other))
                self._operand(node, other, is_first=False)
        elif isinstance(node, ast.IfExp):
            self._sign(_CONDITION, self._before(node.test))
            self._sign(_CONDITION, self._before(node.orelse))
        elif isinstance(node, ast.UnaryOp):
            self._operand(node, node.operand, is_first=False)
        elif isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
            value = node.func if isinstance(node, ast.Call) else node.value
            within = value.col_offset > node.col_offset
            self.visit(value, is_first=is_first, parenthesized=within)
            if isinstance(node, ast.Attribute):
                if within or isinstance(value, (ast.Call, ast.Subscript, *_LITERALS)):
                    self._sign(_ATTRIBUTE, value.end_col_offset or 0)
                self.ends_with = False
            else:
                self.has_brackets = True
                self.ends_with = isinstance(node, ast.Call) and bool(node.args or node.keywords)
        elif isinstance(node, _LITERALS):
            self.has_brackets = self.ends_with = True
            self.begins_with |= is_first

    def _operand(self, node: ast.expr, operand: ast.expr, *, is_first: bool) -> None:
        is_left = operand.col_offset == node.col_offset
        within = not is_left and self.text[operand.col_offset - 1] == "("
        self.visit(operand, is_first=is_first, parenthesized=within)

    def _before(self, operand: ast.expr) -> int:
        """Where the sign in front of an operand begins."""
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
    """Whether a value that is too long is put in parentheses, and none of its own are opened."""
    shape = _shape(value)
    if shape is None:
        return False
    if not shape.has_brackets or len(shape.places) > 1:
        return True
    return shape.strength > _ATTRIBUTE and not (shape.begins_with or shape.ends_with)


def operands(value: str) -> list[str]:
    """A value in parentheses in the lines that it is broken into: at its loosest signs, or before the calls
    of a chain. One where it has none."""
    shape = _shape(value)
    if shape is None or (shape.strength <= _ATTRIBUTE and len(shape.places) < 2):
        return [value]
    places = [0, *sorted(shape.places), len(value)]
    return [value[start:end].rstrip() for start, end in itertools.pairwise(places)]


def spaced(text: str) -> str:
    """With spaces around the colon of bounds that are no plain names or numbers: `x[: -self.size]`."""
    out, start, opened = [], 0, list[tuple[str, int]]()
    colons: list[list[int]] = [[]]
    for position, character, _ in _outside_strings(text):
        if character in "([{":
            opened.append((character, position))
            colons.append([])
        elif character == ":" and opened and opened[-1][0] == "[":
            colons[-1].append(position)
        elif character in ")]}" or (character == "," and opened):
            first = opened[-1][1] + 1
            if colons[-1]:
                first = max(first, text.rfind(", ", first, colons[-1][0]) + 2)
                bounds = _bounds(text[first:position], [colon - first for colon in colons[-1]])
                if bounds is not None and first >= start:
                    out += [text[start:first], bounds]
                    start = position
            colons[-1] = []
            if character != ",":
                opened.pop()
                colons.pop()
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
