"""The author's second names of values: `residual = x`. No operator makes them, so a trace has none.

x = self.norm(x)       where the value that was called x is read again behind this line, the author has
                       it under another name, which is in the source above
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from .literals import identifier, plain
from .loops.author_loops import parsed
from .scopes import Line
from .written import Statement


@dataclass(frozen=True, slots=True)
class SecondName:
    name: str
    line: Line  # where the author gives it

    def can_stand_before(self, statement: Statement, *, at: Line, old: str) -> bool:
        """Whether `name = old` can be moved up in front of this statement, from `at`, which needs it.

        It can if the author's line of the statement is between the second name and the line that needs it,
        and the statement does the same behind the second name.
        """
        file, _, number = statement.place.rpartition(":")
        if f"{file}:{self.line.number}" != plain(str(self.line)) or not number.isdigit():
            return False
        target, _, _ = statement.text.partition(" = ")
        words, targets = (set(re.findall(r"\w+", text)) for text in (statement.text, target))
        is_between = self.line.number < int(number) < at.number
        return is_between and self.name not in words and old not in targets


def second_name(at: Line, name: str, made: Line | None, ran: Sequence[Line]) -> SecondName | None:
    """Finds what else the author calls the value of this name, where `at` gives the name to another value.

    `made` is the line that the value comes from, or None for an argument. `ran` are the lines between that
    one and `at` that made other values.
    """
    inside = _function_of(at.file, at.number)
    if inside is None or name not in inside.renamed:
        return None
    lines, renamings = inside.lines, inside.renamings
    chain = () if made is None else made.chain
    began = next((o.number for o in reversed(chain) if o.file == at.file and o.number in lines), lines[0])
    passed = {line.number for run in ran for line in run.chain if line.file == at.file}
    others = [n for n, assigned in inside.assignments if assigned == name and n in passed]
    for number, new, old in reversed(renamings):
        is_between = number < at.number and not number <= began < at.number
        is_another = any(began < other < number for other in others)
        if old == name and new != name and is_between and not is_another:
            return SecondName(identifier(new), Line(at.file, number, f"{new} = {old}"))
    return None


@dataclass(frozen=True, slots=True)
class _Function:
    lines: range
    renamings: Sequence[tuple[int, str, str]]  # line, new name, old name
    assignments: Sequence[tuple[int, str]]  # line, name

    @property
    def renamed(self) -> set[str]:
        return {old for _, _, old in self.renamings}


def _function_of(file: str, number: int) -> _Function | None:
    around = [function for function in _functions(file) if number in function.lines]
    return min(around, key=lambda function: len(function.lines), default=None)


@functools.lru_cache(maxsize=256)
def _functions(file: str) -> list[_Function]:
    functions = [node for node in ast.walk(parsed(file)) if isinstance(node, ast.FunctionDef)]
    return [
        _Function(range(f.lineno, (f.end_lineno or f.lineno) + 1), _renamings(f), _assignments(f))
        for f in functions
    ]


def _assignments(function: ast.FunctionDef) -> list[tuple[int, str]]:
    names = (node for node in ast.walk(function) if isinstance(node, ast.Name))
    return sorted((name.lineno, name.id) for name in names if isinstance(name.ctx, ast.Store))


def _renamings(function: ast.FunctionDef) -> list[tuple[int, str, str]]:
    found = []
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and len(node.targets) == 1:
            target = node.targets[0]
            if isinstance(target, ast.Name):
                found.append((node.lineno, target.id, node.value.id))
    return sorted(found)
