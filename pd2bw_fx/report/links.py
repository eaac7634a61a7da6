"""Finds the line of generated code that computes an operator."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence

from pd2bw_fx.graph import Operator, OperatorGraph
from pd2bw_fx.plan import Plan
from pd2bw_fx.stage import StageProgram


def code_lines(
    graph: OperatorGraph, plan: Plan, programs: Sequence[StageProgram]
) -> dict[str, tuple[int, int]]:
    """Returns, for each operator, its stage and a line of that stage's source.

    It is the line whose comment names the operator's own source line, in the class that stands for its module
    or the nearest one around it. Where no line names it, it is the line where that class begins.
    """
    pages = {program.stage: _Page(program.source) for program in programs}
    stage_of = plan.stage_of
    found = {}
    for name, operator in graph.operators.items():
        page = pages.get(stage_of.get(name, -1))
        line = None if page is None else page.line_of(operator)
        if line is not None:
            found[name] = (stage_of[name], line)
    return found


class _Page:
    """One stage's source: which class stands for which modules, and which lines name which origin."""

    def __init__(self, source: str) -> None:
        self._classes: dict[str, ast.ClassDef] = {}
        self._comments: dict[str, list[int]] = {}
        try:
            tree = ast.parse(source)
        except SyntaxError:
            return
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        for node in classes:
            listed = re.split(r",\s+", (ast.get_docstring(node) or "").split("\n")[0].rstrip("."))
            self._classes |= {path: node for path in listed if not path.startswith("from ")}
        if classes:
            self._classes[""] = classes[-1]  # the stage itself stands last
        for number, line in enumerate(source.splitlines(), 1):
            match = re.search(r"#.*?(\S+\.py:\d+)", line)
            if match:
                self._comments.setdefault(match[1], []).append(number)

    def line_of(self, operator: Operator) -> int | None:
        named = self._comments.get(operator.source_line or "", [])
        around = _around(operator.module_path, self._classes)
        inside = [line for line in named if around and around.lineno <= line <= (around.end_lineno or line)]
        if inside or named:
            return (inside or named)[0]
        return None if around is None else around.lineno


def _around(path: str, classes: Mapping[str, ast.ClassDef]) -> ast.ClassDef | None:
    while path and path not in classes:
        path = path.rpartition(".")[0]
    return classes.get(path)
