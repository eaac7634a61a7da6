"""The loops around a line in its author's source: what they count with, and the lists that they fill."""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pd2bw_fx.passes.codegen.literals import identifier
from pd2bw_fx.passes.codegen.scopes import Line
from pd2bw_fx.passes.codegen.statements import appended_list, joined_list

_COUNTING = {"range", "enumerate"}
_COMPREHENSIONS = (ast.ListComp, ast.GeneratorExp, ast.SetComp, ast.DictComp)


@functools.lru_cache(maxsize=256)
def parsed(file: str) -> ast.Module:
    """Parses the author's file; returns an empty module where the file cannot be read or parsed."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ast.Module([], [])


@dataclass(frozen=True, slots=True)
class Counter:
    """What a loop counts with, and the numbers that it takes, or the first, where the source says them."""

    name: str = ""
    numbers: range | None = None
    first: int | None = None


NO_COUNTER = Counter()


def counter_of(line: Line) -> Counter:
    """Returns the counter of the innermost counting loop around the line, or around a call that led to it.

    For `for t in range(n)` its name is "t". The name is "" where there is no such loop.
    """
    for at in reversed(line.chain):
        around = [counter for lines, counter in _counters(at.file) if at.number in lines]
        if around:
            return around[-1]
    return NO_COUNTER


def list_of(line: Line) -> str:
    """Returns the list that the line fills, makes or joins, or "" where there is none.

    It is "outs" for `outs.append(f(x))`, `outs = [f(x) for x in y]` and `torch.stack(outs)`.
    """
    found = (appended_list(at.code) or joined_list(at.code) for at in reversed(line.chain))
    return next(filter(None, found), "")


@dataclass(frozen=True, slots=True)
class Round:
    """Where a statement stands in the author's loop around it.

    `loop` is the file and first line of the loop, `number` the line of the statement. `is_always` says
    whether every round runs that line, with no condition in between.
    """

    loop: str = ""
    number: int = 0
    is_always: bool = False


NO_ROUND = Round()


def round_of(line: Line) -> Round:
    """Finds the innermost loop statement around the line, or around a call that led to it."""
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
    """Returns the line ranges of all loops in a file, and those of all conditions."""
    kinds: tuple[tuple[type[ast.AST], ...], ...] = ((ast.For, ast.While), (ast.If, ast.IfExp, ast.Match))
    found: tuple[list[range], list[range]] = ([], [])
    for node in ast.walk(parsed(file)):
        for kind, lines in zip(kinds, found, strict=True):
            if isinstance(node, kind):
                assert isinstance(node, ast.stmt | ast.expr)
                lines.append(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return found


@functools.lru_cache(maxsize=256)
def _counters(file: str) -> list[tuple[range, Counter]]:
    """Returns the lines and the counter of each counting loop in a file, outer loops first."""
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
                lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
                found.append((lines, Counter(identifier(first.id), _numbers(loop.iter), _first(loop.iter))))
    return sorted(found, key=lambda entry: (entry[0].start, -len(entry[0])))


def _counts(over: ast.expr) -> bool:
    return isinstance(over, ast.Call) and isinstance(over.func, ast.Name) and over.func.id in _COUNTING


def _numbers(over: ast.expr) -> range | None:
    """Returns the numbers that `range(3)` counts, or None where they are not in the source."""
    if not isinstance(over, ast.Call) or ast.unparse(over.func) != "range" or over.keywords:
        return None
    try:
        return range(*map(ast.literal_eval, over.args))
    except (ValueError, TypeError):
        return None


def _first(over: ast.expr) -> int | None:
    """Returns the 1 of `range(1, n)`, or None where the source does not say it."""
    if not isinstance(over, ast.Call) or ast.unparse(over.func) != "range" or len(over.args) != 2:
        return None
    first = over.args[0]
    return first.value if isinstance(first, ast.Constant) and type(first.value) is int else None


@functools.lru_cache(maxsize=1024)
def names_of_members(loop: str) -> Mapping[str, str]:
    """Maps `w` and `b` of `for weight, bias in zip(self.w, self.b)` to weight and bias.

    `loop` is the file and first line of a loop; where that goes over anything else, there are no names.
    """
    held = _parts_and_names(loop)
    return {
        part.attr: identifier(name.id)
        for part, name in held
        if isinstance(part, ast.Attribute) and isinstance(name, ast.Name) and name.id != "_"
    }


@functools.lru_cache(maxsize=1024)
def names_over_lists(loop: str) -> tuple[tuple[str, str], ...]:
    """Returns `(skips, skip)` of `for up, skip in zip(self.ups, skips)`: names for what is no attribute's.

    The first is "" where the loop goes over no variable: `zip(times[:-1], times[1:])` has two parts of one.
    """
    parts = [
        (part.id if isinstance(part, ast.Name) else "", identifier(name.id))
        for part, name in _parts_and_names(loop)
        if not isinstance(part, ast.Attribute) and not _counts(part) and isinstance(name, ast.Name)
    ]
    lists = [listed for listed, _ in parts]
    return tuple((listed if lists.count(listed) == 1 else "", name) for listed, name in parts)


def _parts_and_names(loop: str) -> list[tuple[ast.expr, ast.expr]]:
    """Returns what a loop goes over, part by part of a `zip`, and its names for each of them."""
    file, _, number = loop.rpartition(":")
    loops = (node for node in ast.walk(parsed(file)) if isinstance(node, ast.For)) if file else ()
    found = next((node for node in loops if str(node.lineno) == number), None)
    if found is None:
        return []
    over, target = found.iter, found.target
    if isinstance(over, ast.Call) and ast.unparse(over.func) == "enumerate" and isinstance(target, ast.Tuple):
        over, target = over.args[0], target.elts[-1]
    pairs = [(over, target)]
    if isinstance(over, ast.Call) and ast.unparse(over.func) == "zip" and isinstance(target, ast.Tuple):
        pairs = list(zip(over.args, target.elts, strict=False))
    return [(part.value if isinstance(part, ast.Subscript) else part, name) for part, name in pairs]
