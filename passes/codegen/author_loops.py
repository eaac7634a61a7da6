"""The loops around a line in its author's source: what they count with, and the lists that they fill."""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Sequence
from dataclasses import dataclass

from .literals import identifier
from .scopes import Line
from .statements import appended_list, joined_list

_COUNTING = {"range", "enumerate"}
_COMPREHENSIONS = (ast.ListComp, ast.GeneratorExp, ast.SetComp, ast.DictComp)


@functools.lru_cache(maxsize=256)
def parsed(file: str) -> ast.Module:
    """The author's file; nothing where it cannot be read."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ast.Module([], [])


def counter_of(line: Line) -> str:
    """The number that the innermost loop around the line, or around a call that led to it, counts with: "t"
    of `for t in range(n)`. "" where there is none."""
    for at in reversed(line.chain):
        around = [name for lines, name in _counters(at.file) if at.number in lines]
        if around:
            return around[-1]
    return ""


def list_of(line: Line) -> str:
    """The list that the line fills, makes or joins: "outs" of `outs.append(f(x))`, `outs = [f(x) for x in y]`
    and `torch.stack(outs)`."""
    found = (appended_list(at.code) or joined_list(at.code) for at in reversed(line.chain))
    return next(filter(None, found), "")


@dataclass(frozen=True, slots=True)
class Round:
    """Where a statement stands in the rounds of the author's loop around it: the loop, the line in it, and
    whether each round comes by: no condition stands in between."""

    loop: str = ""
    number: int = 0
    is_always: bool = False


NO_ROUND = Round()


def round_of(line: Line) -> Round:
    """By the innermost loop of statements around the line, or around a call that led to it."""
    is_always = True
    for at in reversed(line.chain):
        if at.module_of_torch is not None:
            continue
        loops, conditions = _blocks(at.file)
        around = max((lines.start for lines in loops if at.number in lines), default=0)
        is_always &= not any(at.number in lines and lines.start >= around for lines in conditions)
        if around:
            return Round(f"{at.file}:{around}", at.number, is_always)
    return NO_ROUND


@functools.lru_cache(maxsize=256)
def _blocks(file: str) -> tuple[list[range], list[range]]:
    """The lines of all loops, and of all conditions."""
    kinds: tuple[tuple[type[ast.AST], ...], ...] = ((ast.For, ast.While), (ast.If, ast.IfExp, ast.Match))
    found: tuple[list[range], list[range]] = ([], [])
    for node in ast.walk(parsed(file)):
        for kind, lines in zip(kinds, found, strict=True):
            if isinstance(node, kind):
                assert isinstance(node, ast.stmt | ast.expr)
                lines.append(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return found


@functools.lru_cache(maxsize=256)
def _counters(file: str) -> list[tuple[range, str]]:
    """By the lines of each counting loop, outer ones first, its counter."""
    found = []
    for node in ast.walk(parsed(file)):
        loops: Sequence[ast.For | ast.comprehension] = ()
        if isinstance(node, ast.For):
            loops = [node]
        elif isinstance(node, _COMPREHENSIONS):
            loops = node.generators
        for loop in loops:
            first = loop.target.elts[0] if isinstance(loop.target, ast.Tuple) else loop.target
            if isinstance(first, ast.Name) and first.id != "_" and _counts(loop.iter):
                assert isinstance(node, ast.stmt | ast.expr)
                found.append((range(node.lineno, (node.end_lineno or node.lineno) + 1), identifier(first.id)))
    return sorted(found, key=lambda entry: (entry[0].start, -len(entry[0])))


def _counts(over: ast.expr) -> bool:
    return isinstance(over, ast.Call) and isinstance(over.func, ast.Name) and over.func.id in _COUNTING
