"""How an author's statement words an operator, where torch has several words for it.

0.5 * x, x * 0.5      the same operator, whose number comes second
torch.exp(x), x.exp()
x**2, x.pow(2)
x[:, None], x.unsqueeze(1)
"""

from __future__ import annotations

import ast
import functools
import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from .loops.author_loops import parsed
from .scopes import Line
from .statements import assigned_names, parsed_statement

_SIGNS: dict[str, type[ast.operator]] = {"add": ast.Add, "mul": ast.Mult}
_FRAME = re.compile(r'File "([^"]*)", line (\d+), in [^\n]*\n[ \t]*([^\n]*)')
_LAST_FRAME = re.compile(f".*{_FRAME.pattern}", re.DOTALL)


def statement_of(node: fx.Node) -> ast.stmt | None:
    """Returns the author's statement that an operator is from, or None where it is torch's own or unknown."""
    return _statement(node.meta.get("stack_trace") or "")


@functools.lru_cache(maxsize=4096)
def _statement(trace: str) -> ast.stmt | None:
    found = _LAST_FRAME.match(trace)
    if found is None:
        return None
    line = Line(found[1], int(found[2]), found[3])
    return None if line.module_of_torch is not None else statement_at(line)


def statement_at(line: Line) -> ast.stmt | None:
    """Returns the statement of which this is a line."""
    return parsed_statement(line.code) or _statements(line.file).get(line.number)


@functools.lru_cache(maxsize=256)
def _statements(file: str) -> Mapping[int, ast.stmt]:
    """Returns the simple statements of a file by the lines that they cover."""
    found: dict[int, ast.stmt] = {}
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Expr | ast.Return):
            found |= dict.fromkeys(range(node.lineno, (node.end_lineno or node.lineno) + 1), node)
    return found


def is_called_of_torch(node: fx.Node, name: str) -> bool:
    """Whether the author's statement has `torch.name(x)` or `F.name(x)`, and no `x.name()`."""
    called = _functions(statement_of(node)).get(name)
    return called is not None and called <= {"torch", "F"}


def is_a_power(node: fx.Node) -> bool:
    """Whether the author's statement has `x**2`, and neither `x.pow(2)` nor `torch.pow(x, 2)`."""
    statement = statement_of(node)
    has_sign = any(isinstance(inner.op, ast.Pow) for inner in _operations(statement))
    return has_sign and "pow" not in _functions(statement)


def divided_one(node: fx.Node) -> complex | None:
    """Returns the 1 of the author's `1.0 / x`, which a trace has as `x.reciprocal()`, or None.

    In `2 / x` the trace multiplies the reciprocal: see divisor_of.
    """
    statement = statement_of(node)
    factors = (user.args[1] for user in node.users if user.target is torch.ops.aten.mul.Tensor)
    is_scaled = any(not isinstance(factor, fx.Node) for factor in factors)
    if is_scaled or "reciprocal" in _functions(statement):
        return None
    signs = (inner for inner in _operations(statement) if isinstance(inner.op, ast.Div))
    return next((value for sign in signs if (value := _value(sign.left)) == 1), None)


def divisor_of(product: fx.Node) -> fx.Node | None:
    """Returns the x of the author's `2 / x`, which a trace has as `x.reciprocal() * 2`, or None."""
    inverse, number = (*product.args, None, None)[:2]
    if not isinstance(inverse, fx.Node) or inverse.target is not torch.ops.aten.reciprocal.default:
        return None
    divisor, statement = inverse.args[0], statement_of(product)
    is_of_one = len(inverse.users) == 1 and statement is statement_of(inverse)
    if not is_of_one or not isinstance(divisor, fx.Node) or "reciprocal" in _functions(statement):
        return None
    signs = _operations(statement)
    lefts = [inner.left for inner in signs if isinstance(inner.op, ast.Div)]
    is_multiplied = any(isinstance(inner.op, ast.Mult) for inner in signs)
    may_be_named = not is_multiplied and any(isinstance(left, ast.Name | ast.Attribute) for left in lefts)
    is_divided = isinstance(number, int | float) and (may_be_named or number in map(_value, lefts))
    return divisor if is_divided else None


def is_a_subscript(node: fx.Node) -> bool:
    """Whether the author's statement has `x[:, None]`, and no `unsqueeze`."""
    statement = statement_of(node)
    return "unsqueeze" not in _functions(statement) and _has_new_dimensions(statement)


def is_written_data(node: fx.Node) -> bool:
    """Whether the author writes into `x.data`: autograd, which sees a write into `x.detach()`, must not."""
    statement = statement_of(node)
    is_data = any(
        isinstance(i, ast.Attribute) and i.attr == "data" for i in ast.walk(statement or ast.Pass())
    )
    return is_data and "detach" not in _functions(statement) and any(_writes(user) for user in node.users)


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


_CASTS = {
    torch.float32: "float", torch.float64: "double", torch.float16: "half", torch.bfloat16: "bfloat16",
    torch.int64: "long", torch.int32: "int", torch.bool: "bool",
}  # fmt: skip


def cast_called(node: fx.Node, dtype: Any) -> str | None:
    """Returns the method by which the author casts to a type: "float" for `x.float()`."""
    name = _CASTS.get(dtype)
    called = _functions(statement_of(node))
    return name if name in called and "to" not in called else None


def has_its_number_first(node: fx.Node, name: str, tensor: Any, number: complex) -> bool:
    """Whether the author writes `0.5 * x` for this sum or product of a tensor and a number.

    Where a statement has several signs of the kind, those that may be this operator must agree.
    """
    statement = statement_of(node)
    if number == 0 and _adds_up(statement):
        return False  # the 0 that `sum` begins with
    signs = [inner for inner in _operations(statement) if isinstance(inner.op, _SIGNS[name])]
    found = {_first_of(inner, tensor, number, node) for inner in signs} - {None}
    return found == {True}


def _first_of(sign: ast.BinOp, tensor: Any, number: complex, node: fx.Node) -> bool | None:
    """Whether the left operand is the number, and the right one the tensor; None where it is another sign.

    A number that is no literal is told from the tensor by the tensor's name, or because the tensor is made
    by the statement itself and the number by none of its calls.
    """
    left, right = _value(sign.left), _value(sign.right)
    if left is not None or right is not None:
        return None if number not in (left, right) or left == right else left == number
    made_here = isinstance(tensor, fx.Node) and tensor.op != "placeholder" and _is_made_by(tensor, node)
    are_made = [_computes(operand) for operand in (sign.left, sign.right)]
    if made_here:
        return are_made[1] if are_made[0] != are_made[1] else None
    if any(are_made):
        return None
    names = _names_of(tensor, node)
    are_its = [isinstance(operand, ast.Name) and operand.id in names for operand in (sign.left, sign.right)]
    return are_its[1] if are_its[0] != are_its[1] else None


def _is_made_by(tensor: fx.Node, reader: fx.Node) -> bool:
    """Whether the statement that reads a value makes it, itself or in a function or module that it calls."""
    frames = _FRAME.findall(tensor.meta.get("stack_trace") or "")
    own = _FRAME.findall(reader.meta.get("stack_trace") or "")
    return bool(own) and frames[: len(own)] == own


def _names_of(tensor: Any, reader: fx.Node) -> set[str]:
    """Returns the author's names for a value, as far as the statement that makes it tells."""
    if not isinstance(tensor, fx.Node) or tensor.op == "placeholder":
        return {str(getattr(tensor, "name", ""))}
    return _names_in(tensor.meta.get("stack_trace") or "", reader.meta.get("stack_trace") or "")


@functools.lru_cache(maxsize=4096)
def _names_in(trace: str, of_reader: str) -> set[str]:
    """Returns what is assigned on the lines of a value.

    Where one of these is in the call in which the reader's own line is, that one alone counts: functions that
    it calls have other names.
    """
    frames, around = _FRAME.findall(trace), _FRAME.findall(of_reader)[:-1]
    if frames[: len(around)] == around:
        frames = frames[len(around) : len(around) + 1]
    return {name for _, _, line in frames for name in assigned_names(line)}


def _computes(expression: ast.expr) -> bool:
    """Whether an expression calls something or reads elements of something, rather than only naming it.

    Python's functions of numbers make no tensors.
    """
    found = (i for i in ast.walk(expression) if isinstance(i, ast.Call | ast.Subscript | ast.MatMult))
    return any(not isinstance(i, ast.Call) or ast.unparse(i.func) not in _OF_NUMBERS for i in found)


_OF_NUMBERS = {"max", "min", "len", "int", "float", "round", "math.sqrt", "math.log", "math.exp", "math.prod"}


def _value(expression: ast.expr) -> complex | None:
    """Returns the number that an expression of numbers is: `-0.5`, `1 / 3`, `2 * math.pi`."""
    match expression:
        case ast.Constant(value=int() | float() | complex() as number):
            return number
        case ast.Attribute(value=ast.Name(id="math" | "np" | "torch"), attr="pi"):
            return math.pi
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = _value(operand)
            return None if value is None else -value
        case ast.BinOp(left=left, op=ast.Mult() | ast.Div() as sign, right=right):
            value, other = _value(left), _value(right)
            if value is None or not other:
                return None
            return value * other if isinstance(sign, ast.Mult) else value / other
    return None


@functools.lru_cache(maxsize=4096)
def _operations(statement: ast.stmt | None) -> tuple[ast.BinOp, ...]:
    if statement is None:
        return ()
    found = [inner for inner in ast.walk(statement) if isinstance(inner, ast.BinOp)]
    if isinstance(statement, ast.AugAssign):
        found.append(ast.BinOp(statement.target, statement.op, statement.value))
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def _adds_up(statement: ast.stmt | None) -> bool:
    calls = (i.func for i in ast.walk(statement or ast.Pass()) if isinstance(i, ast.Call))
    return any(isinstance(called, ast.Name) and called.id == "sum" for called in calls)


@functools.lru_cache(maxsize=4096)
def _functions(statement: ast.stmt | None) -> Mapping[str, set[str]]:
    """Returns the names of what a statement calls, with what stands before the dot if that is a name."""
    found: dict[str, set[str]] = {}
    for inner in () if statement is None else ast.walk(statement):
        if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute):
            of = inner.func.value
            found.setdefault(inner.func.attr, set()).add(of.id if isinstance(of, ast.Name) else "")
    return found


@functools.lru_cache(maxsize=4096)
def _has_new_dimensions(statement: ast.stmt | None) -> bool:
    subscripts = (s.slice for s in ast.walk(statement or ast.Pass()) if isinstance(s, ast.Subscript))
    places = (place for s in subscripts for place in (s.elts if isinstance(s, ast.Tuple) else [s]))
    return any(isinstance(place, ast.Constant) and place.value is None for place in places)
