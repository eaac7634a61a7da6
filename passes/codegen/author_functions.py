"""Finds functions of the author's own that a forward calls more than once, to be functions of the stage too.

rotated = query * cos + rotate_half(query) * sin        rotate_half is a function of the author's file,
turned = key * cos + rotate_half(key) * sin             and both calls run the same operators

A trace has only the operators. Those of one call stand together, and one line led to all of their lines.
"""

from __future__ import annotations

import ast
import functools
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import fx

from pd2bw_fx.graph import OperatorGraph
from pd2bw_fx.program import autocast_of

from .cut import is_number, is_size, size_symbol
from .loops.author_loops import parsed
from .scopes import AuthorCall, Line, Scope, line_at, walk
from .wording import statement_at

_LEAST_OPERATORS = 3  # what is shorter reads better where it is
_IN_ONE_LINE = (1, 2, 3)  # so many calls of a function stand in one line
_OF_TORCH = os.path.dirname(torch.__file__)


@dataclass(frozen=True, slots=True)
class _Run:
    """Operators that stand together, all run by a function that one line calls.

    `lines` has the function's line, and those of what it calls, for each of them.
    """

    at: AuthorCall
    name: str
    file: str
    nodes: tuple[fx.Node, ...]
    lines: tuple[tuple[int, ...], ...]


def separate_calls(graph: OperatorGraph, root: Scope) -> None:
    """Puts the operators of such calls into scopes of their own, in the bodies of all modules' calls."""
    for scope in walk(root):
        if scope.function is None:
            scope.items = _separated(graph, scope, scope.items, 1)


def _separated(
    graph: OperatorGraph, scope: Scope, items: Sequence[fx.Node | Scope], depth: int
) -> list[fx.Node | Scope]:
    """Separates the calls that are `depth` calls away from the forward, and else those within them."""
    runs = [(run, list(inner)) for run, inner in groupby(items, lambda item: _called(scope, item, depth))]
    if all(run is None for run, _ in runs):
        return list(items)
    times = defaultdict[tuple[Line, str] | None, int](int)
    for run, _ in runs:
        times[run] += 1
    calls = {
        id(inner): found
        for run, inner in runs
        if run is not None and times[run] == 1 and (found := _calls(graph, scope, run, inner))
    }
    alike = defaultdict[Any, int](int)
    for found in calls.values():
        for call in found:
            alike[_signature(graph, call)] += 1
    separated: list[fx.Node | Scope] = []
    for run, inner in runs:
        found = calls.get(id(inner), [])
        if found and all(alike[_signature(graph, call)] > 1 for call in found):
            separated += [_scope_of(scope, call) for call in found]
        elif run is not None:
            separated += _separated(graph, scope, inner, depth + 1)
        else:
            separated += inner
    return separated


def _called(scope: Scope, item: fx.Node | Scope, depth: int) -> tuple[Line, str] | None:
    """Returns the line that called a function in which an item was run, and the function's name."""
    node = next(item.nodes) if isinstance(item, Scope) else item
    line = line_at(node, scope.depth)
    chain = () if line is None else line.chain
    if len(chain) <= depth:
        return None
    return replace(chain[depth - 1], outer=chain[: depth - 1]), chain[depth].function


def _calls(
    graph: OperatorGraph, scope: Scope, run: tuple[Line, str], items: Sequence[fx.Node | Scope]
) -> list[_Run]:
    """Returns the calls that the items are, if each makes one tensor of tensors that it is given."""
    line, name = run
    nodes = [item for item in items if isinstance(item, fx.Node)]
    inner = line_at(nodes[0], scope.depth) if len(nodes) == len(items) else None
    if inner is None:
        return []
    at = inner.chain[len(line.chain)]
    parameters = _parameters(at.file, name, at.number)
    if not parameters:
        return []
    found = _author_call(line, name, parameters)
    chains = [() if (own := line_at(node, scope.depth)) is None else own.chain for node in nodes]
    lines = [tuple(each.number for each in chain[len(line.chain) :]) for chain in chains]
    for number in _IN_ONE_LINE:
        length, rest = divmod(len(nodes), number)
        parts = [slice(start, start + length) for start in range(0, length * number, max(length, 1))]
        calls = [_Run(found, name, at.file, tuple(nodes[part]), tuple(lines[part])) for part in parts]
        if not rest and all(_is_a_call(graph, call) for call in calls):
            return calls if len({_signature(graph, call) for call in calls}) == 1 else []
    return []


def _is_a_call(graph: OperatorGraph, call: _Run) -> bool:
    if len(call.nodes) < _LEAST_OPERATORS or any(map(_is_in_a_region, call.nodes)):
        return False
    inside = set(call.nodes)
    read = {operand for node in call.nodes for operand in node.all_input_nodes}
    given = [operand for operand in read - inside if not _is_size(graph, operand)]
    leaving = [node for node in call.nodes if any(user not in inside for user in node.users)]
    return (
        leaving == [call.nodes[-1]]
        and bool(given)
        and all(_is_plain_tensor(node) for node in (*given, *leaving))
        and all(node.op == "call_function" and _is_pure(graph, node) for node in call.nodes)
    )


def _is_size(graph: OperatorGraph, node: fx.Node) -> bool:
    return node.op == "call_function" and is_size(graph, node)


def _is_plain_tensor(node: fx.Node) -> bool:
    return node.op != "get_attr" and isinstance(node.meta.get("val"), torch.Tensor) and not is_number(node)


def _is_pure(graph: OperatorGraph, node: fx.Node) -> bool:
    operator = graph.operators[node.name]
    return not (operator.is_random or operator.writes_buffers) and operator.memory_group is None


def _is_in_a_region(node: fx.Node) -> bool:
    """Whether a node runs without gradients or in other types, which a function would have to enter again."""
    return node.meta.get("no_grad") is not None or autocast_of(node) is not None


def _signature(graph: OperatorGraph, call: _Run) -> Any:
    """Returns what two calls have in common that do the same to what they are given."""
    inside = {node: at for at, node in enumerate(call.nodes)}
    given: dict[fx.Node, int] = {}

    def word(node: fx.Node) -> str:
        if node in inside:
            return f"made {inside[node]}"
        if _is_size(graph, node):
            symbol = size_symbol(graph, node)
            return f"size {node.name if symbol is None else symbol}"
        return f"given {given.setdefault(node, len(given))}"

    operators = [
        (str(node.target), repr(fx.node.map_arg((node.args, dict(node.kwargs)), word))) for node in call.nodes
    ]
    return call.file, call.name, call.lines, tuple(operators)


def _scope_of(scope: Scope, call: _Run) -> Scope:
    key = f"{scope.key}:{call.name}:{call.nodes[0].name}"
    return Scope(scope.path, scope.kind, key, scope.depth, list(call.nodes), function=call.name, call=call.at)


def _author_call(line: Line, name: str, parameters: tuple[str, ...]) -> AuthorCall:
    """Finds what the author's calls of a function on a line are given."""
    given_as: dict[str, str] = {}
    unnamed = set[str]()
    for call in ast.walk(statement_at(line) or ast.Pass()):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == name:
            named = {word.arg: word.value for word in call.keywords if word.arg is not None}
            for parameter, value in (*zip(parameters, call.args, strict=False), *named.items()):
                if isinstance(value, ast.Name):
                    given_as.setdefault(value.id, parameter)
                elif not isinstance(value, ast.Constant):
                    unnamed.add(parameter)
    return AuthorCall(line, parameters, given_as, frozenset(unnamed))


def _parameters(file: str, name: str, number: int) -> tuple[str, ...]:
    """Returns the parameters of a function that a file defines at its top, with a line of this number."""
    functions = () if file.startswith(_OF_TORCH) else _functions(file).get(name, ())
    return next((names for lines, names in functions if number in lines), ())


@functools.lru_cache(maxsize=256)
def _functions(file: str) -> Mapping[str, Sequence[tuple[range, tuple[str, ...]]]]:
    found = defaultdict[str, list[tuple[range, tuple[str, ...]]]](list)
    for function in _defined(parsed(file)):
        names = tuple(each.arg for each in (*function.args.posonlyargs, *function.args.args))
        lines = range(function.lineno, (function.end_lineno or function.lineno) + 1)
        found[function.name].append((lines, names))
    return found


def _defined(module: ast.Module) -> Iterator[ast.FunctionDef]:
    return (each for each in module.body if isinstance(each, ast.FunctionDef))
