"""What else the author calls a value: `skips.append(x)` makes x a skip, and `x = x0 = f(y)` makes it x0.

No operator does so, so a trace does not have it. It is read in the source.
"""

from __future__ import annotations

import ast
import functools

from .literals import identifier
from .loops.author_loops import parsed
from .scopes import Line
from .statements import further_targets

_SHORTEST = 4  # characters of a list's name that says what is in it: "hs" does not
_Event = tuple[int, str]  # a line, and the list that it puts the value into; "" where it makes another value
_LOOPS = ast.For | ast.While
_MAKING = ast.Assign | ast.AnnAssign | ast.AugAssign | ast.For


def name_in_list(made: Line, name: str) -> str | None:
    """Returns "skip" where the author, after making a value of this name here, puts it into `skips`.

    Of `x = x0 = f(y)` it is the other name. It is None where the name stands for another value by then, or
    says what the list does: `new_feature`. In a loop, what comes next may be the next round.
    """
    further = (other for other in further_targets(made.code) if other != name)
    return next(further, None) or _name_in_list(made.file, made.number, name)


def list_with(made: Line, name: str) -> str:
    """Returns the list that the author puts what is made here, by this name, into; "" where there is none."""
    held = _held_in(made.file, made.number, name) if name and made.module_of_torch is None else ""
    return identifier(held) if held else ""


def _name_in_list(file: str, number: int, name: str) -> str | None:
    found = _held_in(file, number, name)
    one = found.removesuffix("s")
    is_a_word = len(found) >= _SHORTEST and one != found and one not in name
    return identifier(one) if is_a_word else None


@functools.lru_cache(maxsize=1024)
def _held_in(file: str, number: int, name: str) -> str:
    for function in _functions(file):
        if function.lineno <= number <= (function.end_lineno or 0):
            return next((held for _, held in _following(function, number, name)), "")
    return ""


@functools.lru_cache(maxsize=256)
def _functions(file: str) -> tuple[ast.FunctionDef, ...]:
    """Returns the functions of a file, inner ones first."""
    found = [node for node in ast.walk(parsed(file)) if isinstance(node, ast.FunctionDef)]
    return tuple(reversed(found))


def _following(function: ast.FunctionDef, number: int, name: str) -> list[_Event]:
    """Lists what is done with a name after this line, in order."""
    others = _other_branches(function, number)
    found = (event for node in ast.walk(function) if (event := _event(node, name)) is not None)
    events = sorted(event for event in found if not any(event[0] in branch for branch in others))
    loops = [node for node in ast.walk(function) if isinstance(node, _LOOPS)]
    around = [loop for loop in loops if loop.lineno <= number <= (loop.end_lineno or 0)]
    behind = [event for event in events if event[0] > number]
    if not around:
        return behind
    inner = around[-1]
    end = inner.end_lineno or 0
    rest = [event for event in behind if event[0] <= end]
    again = [event for event in events if inner.lineno <= event[0] <= number]
    return [*rest, *again, *(event for event in behind if event[0] > end)]


def _other_branches(function: ast.FunctionDef, number: int) -> list[range]:
    """Returns the lines of branches of an `if` that are not run where this line is."""
    found = []
    for node in ast.walk(function):
        if isinstance(node, ast.If):
            branches = [_lines(body) for body in (node.body, node.orelse) if body]
            if any(number in branch for branch in branches):
                found += [branch for branch in branches if number not in branch]
    return found


def _lines(body: list[ast.stmt]) -> range:
    return range(body[0].lineno, (body[-1].end_lineno or body[-1].lineno) + 1)


def _event(node: ast.AST, name: str) -> _Event | None:
    """Returns what a statement does with a name: it puts its value into a list, or gives it another value."""
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        entries = node.value.elts if isinstance(node.value, ast.List) else []  # `skips += [x]`
        if any(isinstance(entry, ast.Name) and entry.id == name for entry in entries):
            return node.lineno, node.target.id
    if isinstance(node, _MAKING):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        parts = [part for target in targets for part in getattr(target, "elts", [target])]
        is_made = any(isinstance(part, ast.Name) and part.id == name for part in parts)
        return (node.lineno, "") if is_made else None
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not node.args:
        return None
    held, value = node.func.value, node.args[-1]
    is_put = node.func.attr in ("append", "insert") and isinstance(value, ast.Name) and value.id == name
    return (node.lineno, held.id) if is_put and isinstance(held, ast.Name) else None
