"""Whether a traced operator or call is the outermost operation of its author's statement.

h = h - (-(h - 1))      both differences are `sub`: the outer one is that whose second operand is a `neg`
h = self.cell(self.embed(x), h)      the call of `cell`
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from torch import fx

from .statements import parsed_statement

# Names of the operators of each sign.
_SIGNS: dict[type[ast.operator | ast.unaryop], frozenset[str]] = {
    ast.Add: frozenset({"add"}), ast.Sub: frozenset({"sub", "rsub"}), ast.Mult: frozenset({"mul"}),
    ast.Div: frozenset({"div", "truediv"}), ast.MatMult: frozenset({"matmul"}),
    ast.FloorDiv: frozenset({"floor_divide", "floordiv"}), ast.Mod: frozenset({"remainder", "mod"}),
    ast.Pow: frozenset({"pow"}), ast.USub: frozenset({"neg"}),
}  # fmt: skip
_CASTS = {"to", "_to_copy"}
OF_SUBSCRIPTS = frozenset({"slice", "select", "index", "unsqueeze", "getitem"})
_OF_SIZES = {"shape", "size", "dim", "ndim", "numel", "dtype", "device"}


def is_outermost_operator(code: str, node: fx.Node) -> bool:
    """Whether this operator is the outermost one of a statement that assigns a name from itself.

    Such statements are `x = x + f(x)` and `x += f(x)`.
    """
    statement = parsed_statement(code)
    if isinstance(statement, ast.AugAssign):
        value = ast.BinOp(statement.target, statement.op, statement.value)
        return _makes(value, node, _names(statement.target))
    targets = _targets_read_too(statement)
    return any(_makes(value, node, targets) for value in _ways(statement)) if targets else False


def is_outermost_call(code: str, path: str) -> bool:
    """Whether a statement that assigns a name from itself does so by the call of the module at this path."""
    statement = parsed_statement(code)
    targets = _targets_read_too(statement)
    return any(_calls(value, path, targets) for value in _ways(statement)) if targets else False


def operators_of(value: ast.expr) -> frozenset[str]:
    """Returns the names that an expression's outermost operation may have in a trace: {"mul"} of `2 * f(x)`.

    For a call it is the function's or method's own name. There are none for other expressions.
    """
    if isinstance(value, ast.Subscript):
        return OF_SUBSCRIPTS
    if not isinstance(value, ast.Call):
        return _kinds(value)
    called = value.func
    name = called.id if isinstance(called, ast.Name) else getattr(called, "attr", "")
    return frozenset({name} - {""})


def _targets_read_too(statement: ast.stmt | None) -> set[str]:
    """Returns the names that a statement assigns, if its value reads one of them, else none."""
    if not isinstance(statement, ast.Assign):
        return set()
    targets = _names(statement.targets[0])
    return set() if targets.isdisjoint(_names(statement.value)) else targets


def _ways(statement: ast.stmt | None) -> list[ast.expr]:
    """Returns the value of an assignment, or both values of `x = f(x) if self.last else g(f(x))`."""
    ways = [statement.value] if isinstance(statement, ast.Assign) else []
    while ways and isinstance(ways[-1], ast.IfExp):
        chosen = ways.pop()
        assert isinstance(chosen, ast.IfExp)
        ways += [chosen.body, chosen.orelse]
    return ways


def _makes(value: ast.expr, node: fx.Node, targets: set[str]) -> bool:
    """Whether an expression's outermost operation is this operator.

    Where other operators in the expression are of the same kind, the operands tell them apart.
    """
    if isinstance(value, ast.Call):
        called = value.func.attr if isinstance(value.func, ast.Attribute) else ast.unparse(value.func)
        return called == _kind(node)
    kinds = _kinds(value)
    if _kind(node) not in kinds:
        return False
    others = [inner for inner in ast.walk(value) if inner is not value and _kinds(inner) & kinds]
    return not others or _has_operands(value, node, targets)


def _kind(node: fx.Node) -> str:
    name = getattr(node.target, "__name__", str(node.target)).partition(".")[0]
    return name if name.startswith("__") else name.removesuffix("_")


def _kinds(value: ast.AST) -> frozenset[str]:
    """Returns the names that the operator of an expression's sign may have."""
    sign = value.op if isinstance(value, ast.BinOp | ast.UnaryOp) else None
    return _SIGNS.get(type(sign), frozenset()) if sign is not None else frozenset()


def _has_operands(value: ast.expr, node: fx.Node, targets: set[str]) -> bool:
    operands = (value.left, value.right) if isinstance(value, ast.BinOp) else ()
    orders = [node.args[::-1] if _kind(node) == "rsub" else node.args]
    if _kind(node) in ("add", "mul") and len(node.args) > 1 and not isinstance(node.args[1], fx.Node):
        orders.append(node.args[::-1])  # a trace has x + 0 for `0 + x`
    return any(
        all(_may_be(operand, g, targets) for operand, g in zip(operands, given, strict=False))
        for given in orders
    )


def _may_be(operand: ast.expr, given: Any, targets: set[str]) -> bool:
    """Whether an operator's operand may be what this expression makes, as far as can be told."""
    while isinstance(given, fx.Node) and _kind(given) in _CASTS:
        given = given.args[0]
    if not isinstance(given, fx.Node):
        if _is_a_call_of_torch(operand):
            return False  # it gives a tensor
        if isinstance(operand, ast.Name) and operand.id in targets and given == 0:
            return True  # a sum begins with it
        return targets.isdisjoint(_tensors(operand)) and _number(operand) in (None, given)
    kinds = _kinds(operand)
    if not kinds or targets.isdisjoint(_tensors(operand)):
        return True
    return _kind(given) in kinds and _has_operands(operand, given, targets)


def _is_a_call_of_torch(expression: ast.expr) -> bool:
    called = expression.func if isinstance(expression, ast.Call) else None
    holder = called.value if isinstance(called, ast.Attribute) else None
    return isinstance(holder, ast.Name) and holder.id in ("torch", "F")


def _number(expression: ast.expr) -> int | float | None:
    try:
        number = ast.literal_eval(expression)
    except (ValueError, TypeError):
        return None
    return number if isinstance(number, int | float) else None


def _tensors(expression: ast.AST) -> Iterator[str]:
    """Yields the names in an expression whose values it reads: `h` of `h / x.shape[1]`."""
    if isinstance(expression, ast.Attribute) and expression.attr in _OF_SIZES:
        return
    if isinstance(expression, ast.Name):
        yield expression.id
    for inner in ast.iter_child_nodes(expression):
        yield from _tensors(inner)


def _calls(value: ast.expr, path: str, targets: set[str]) -> bool:
    """Whether an expression's outermost operation is a call of the module at this path.

    A module may have other names than the path's. That only matters where the expression calls other modules
    too.
    """
    if not isinstance(value, ast.Call) or not _is_of_a_module(value.func, targets):
        return False
    name = path.rpartition(".")[2]
    inner = [call.func for call in ast.walk(value) if isinstance(call, ast.Call) and call is not value]
    is_of_an_inner = any(isinstance(called, ast.Attribute) and called.attr == name for called in inner)
    return not is_of_an_inner or (isinstance(value.func, ast.Attribute) and value.func.attr == name)


def _is_of_a_module(called: ast.expr, targets: set[str]) -> bool:
    """Whether `self.conv(x)`, `layer(x)` or `self.layers[0](x)` is called, not `F.relu(x)` or `x.relu()`."""
    root = called
    while isinstance(root, ast.Attribute | ast.Subscript):
        root = root.value
    if not isinstance(root, ast.Name):
        return False
    return called is root or root.id not in {*targets, "F", "torch", "nn"}


def _names(expression: ast.expr) -> set[str]:
    return {name.id for name in ast.walk(expression) if isinstance(name, ast.Name)}
