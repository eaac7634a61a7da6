"""What a statement of the author's assigns, by the text that a traced operator keeps."""

from __future__ import annotations

import ast
import functools

from .literals import identifier

_SIGNS: dict[type[ast.operator], str] = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.MatMult: "matmul"
}  # fmt: skip


def assigned_names(code: str) -> tuple[str, ...]:
    """The names that a statement assigns: "q, k = f(x)" -> ("q", "k"); nothing for others, and for a line of
    several statements, of which a traced node does not say which it comes from."""
    statement = _statement(code)
    if isinstance(statement, ast.Assign):
        target = statement.targets[0]
    elif isinstance(statement, ast.AnnAssign | ast.AugAssign):
        target = statement.target
    else:
        return ()
    targets = target.elts if isinstance(target, ast.Tuple) else [target]
    if not any(isinstance(name, ast.Name) for name in targets):
        return ()
    found = tuple(name.id if isinstance(name, ast.Name) else "" for name in targets)
    return tuple(identifier(name) if name not in ("", "_") else "_" for name in found)


def makes_one_by_one(code: str) -> bool:
    """Whether a statement assigns several names, each from an expression of its own or a round of one."""
    statement = _statement(code)
    if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Tuple):
        return False
    return isinstance(statement.value, ast.Tuple | ast.GeneratorExp | ast.ListComp)


def is_outermost(code: str, operator: str, *, is_call: bool) -> bool:
    """Whether a statement that assigns a name from itself (`x = x + f(x)`, `x += f(x)`) does so by this
    operator, or by the call of a module."""
    statement = _statement(code)
    if isinstance(statement, ast.AugAssign):
        return not is_call and _SIGNS.get(type(statement.op)) == operator.rstrip("_")
    if not isinstance(statement, ast.Assign):
        return False
    targets = {name.id for name in ast.walk(statement.targets[0]) if isinstance(name, ast.Name)}
    value = statement.value
    if targets.isdisjoint(name.id for name in ast.walk(value) if isinstance(name, ast.Name)):
        return False
    if isinstance(value, ast.BinOp):
        return not is_call and _SIGNS.get(type(value.op)) == operator
    if not isinstance(value, ast.Call):
        return False
    called = value.func.attr if isinstance(value.func, ast.Attribute) else ast.unparse(value.func)
    return is_call or called == operator


@functools.cache
def _statement(code: str) -> ast.stmt | None:
    """The one statement of a line."""
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError):
        return None
    return body[0] if len(body) == 1 else None
