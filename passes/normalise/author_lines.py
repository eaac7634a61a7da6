"""Statements over several lines: operators keep the whole statement and its first line."""

from __future__ import annotations

import ast
import functools
import linecache
import re

from .lift import Draft

_FRAME = re.compile(r'(  File "([^"]+)", line )(\d+)(, in [^\n]*\n)([ \t]*)([^\n]*)')


def keep_whole_statements(draft: Draft) -> None:
    """Puts whole statements into the stack traces of operators.

    Python gives the line of each call within a statement. That line tells neither which other operators
    belong to the statement nor what name it assigns.
    """
    for node in draft.graph.nodes:
        if node.meta.get("stack_trace"):
            node.meta["stack_trace"] = _with_whole_statements(node.meta["stack_trace"])


@functools.lru_cache(maxsize=1024)
def _with_whole_statements(stack_trace: str) -> str:
    return _FRAME.sub(_whole, stack_trace)


def _whole(frame: re.Match[str]) -> str:
    before, file, number, within, margin, code = frame.groups()
    statement = _long_statements(file).get(int(number))
    if statement is None or linecache.getline(file, int(number)).strip() != code.strip():
        return frame[0]  # on one line, or the file has changed since the trace
    first, text = statement
    return f"{before}{first}{within}{margin}{text}"


@functools.lru_cache(maxsize=256)
def _long_statements(file: str) -> dict[int, tuple[int, str]]:
    """Returns, by line, the first line and the text of each simple statement that goes over several lines."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return {}
    found: dict[int, tuple[int, str]] = {}
    for statement in ast.walk(tree):
        if not isinstance(statement, ast.stmt) or hasattr(statement, "body"):
            continue
        lines = range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
        if len(lines) > 1 and "\n" not in (text := ast.unparse(statement)):
            found |= dict.fromkeys(lines, (lines[0], text))
    return found
