"""What an author wrote over several lines is one statement: operators keep it whole, and its first line."""

from __future__ import annotations

import ast
import functools
import linecache
import re

from .lift import Draft

_FRAME = re.compile(r'(  File "([^"]+)", line )(\d+)(, in [^\n]*\n)([ \t]*)([^\n]*)')


def keep_whole_statements(draft: Draft) -> None:
    """In the stack traces of its operators: Python names the line of each call within a statement, by which
    neither its other operators nor the name that it assigns could be told."""
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
        return frame[0]  # short, or the file is not any more what was traced
    first, text = statement
    return f"{before}{first}{within}{margin}{text}"


@functools.lru_cache(maxsize=256)
def _long_statements(file: str) -> dict[int, tuple[int, str]]:
    """The plain statements of a file that go over several lines: by each of these the first, and the text."""
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
