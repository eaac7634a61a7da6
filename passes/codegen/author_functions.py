"""Finds functions of the author's own that are to be functions of the stage too.

rotated = query * cos + rotate_half(query) * sin        rotate_half is a function of the author's file,
turned = key * cos + rotate_half(key) * sin             and both calls run the same operators

A trace has only the operators. Those of one call stand together, and one line led to all of their lines. A
function is written as one if a forward calls it more than once, if unlike forwards call it, or if it is long.
"""

from __future__ import annotations

import ast
import functools
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import fx

from pd2bw_fx.graph import OperatorGraph
from pd2bw_fx.program import autocast_of

from .cut import is_number, is_size, size_symbol
from .layers import mode_of
from .loops.author_loops import parsed
from .outermost import operators_of
from .scopes import AuthorCall, Line, Scope, line_at, module_calls, walk
from .wording import statement_at

_LEAST_OPERATORS = 3  # what is shorter reads better where it is
_LONG = 8  # so many operators are a function of their own also where it is called once
_IN_ONE_LINE = (1, 2, 3)  # so many calls of a function stand in one line
_OF_TORCH = os.path.dirname(torch.__file__)


@dataclass(frozen=True, slots=True)
class _Call:
    """Operators that stand together, all run by a function that one line calls.

    `lines` has the function's line, and those of what it calls, for each of them.
    """

    at: AuthorCall
    name: str
    file: str
    nodes: tuple[fx.Node, ...]
    lines: tuple[tuple[int, ...], ...]
    returns: tuple[tuple[str, fx.Node], ...] = ()  # several results, as the author returns them


_Run = tuple[Line, str]  # a line that called a function, and the function's name


def separate_calls(graph: OperatorGraph, root: Scope) -> None:
    """Puts the operators of such calls into scopes of their own, in the bodies of all modules' calls."""
    scopes = [scope for scope in walk(root) if scope.function is None]
    variants = defaultdict[tuple[str, str], set[Any]](set)
    short = defaultdict[tuple[str, str], set[Any]](set)
    callers = defaultdict[tuple[str, str], set[Any]](set)
    for scope in scopes:
        for call in _long_calls(graph, scope, scope.items, 1):
            variants[call.file, call.name].add(_signature(graph, call))
        for call in _all_calls(graph, scope, scope.items, 1):
            short[call.file, call.name].add(_signature(graph, call))
            callers[call.file, call.name].add(_kind_of_forward(scope))
    alike = {function for function, found in variants.items() if len(found) == 1}
    shared = {function for function, found in short.items() if len(found) == 1 < len(callers[function])}
    for scope in scopes:
        scope.items = _separated(graph, scope, scope.items, 1, alike, shared)


def _kind_of_forward(scope: Scope) -> Any:
    """Returns what forwards have in common that are written as one: their class and operators."""
    return scope.type_name, tuple(str(node.target) for node in scope.nodes)


def _all_calls(
    graph: OperatorGraph, scope: Scope, items: Sequence[fx.Node | Scope], depth: int
) -> Iterator[_Call]:
    """Yields the calls of functions in a body, and in others that are no such calls."""
    for run, inner in _runs(scope, items, depth):
        if run is not None:
            calls = _calls(graph, scope, run, inner)
            yield from calls or _all_calls(graph, scope, inner, depth + 1)


def _runs(
    scope: Scope, items: Sequence[fx.Node | Scope], depth: int
) -> list[tuple[_Run | None, list[fx.Node | Scope]]]:
    """Groups items by the call, `depth` calls away from the forward, that ran them."""
    return [(run, list(inner)) for run, inner in groupby(items, lambda item: _called(scope, item, depth))]


def _long_calls(
    graph: OperatorGraph, scope: Scope, items: Sequence[fx.Node | Scope], depth: int
) -> Iterator[_Call]:
    for run, inner in _runs(scope, items, depth):
        if run is not None:
            call = _long_call(graph, scope, run, inner)
            yield from (call,) if call is not None else _long_calls(graph, scope, inner, depth + 1)


def _separated(
    graph: OperatorGraph,
    scope: Scope,
    items: Sequence[fx.Node | Scope],
    depth: int,
    long: Set[tuple[str, str]],
    shared: Set[tuple[str, str]],
) -> list[fx.Node | Scope]:
    """Separates the calls that are `depth` calls away from the forward, and else those within them.

    `long` are the long functions, by file and name, all calls of which do the same; `shared` are those that
    unlike forwards call, also all in the same way.
    """
    runs = _runs(scope, items, depth)
    times = Counter(run for run, _ in runs)
    calls = {
        id(inner): found
        for run, inner in runs
        if run is not None and times[run] == 1 and (found := _calls(graph, scope, run, inner))
    }
    alike = Counter(_signature(graph, call) for found in calls.values() for call in found)
    separated: list[fx.Node | Scope] = []
    for run, inner in runs:
        found = calls.get(id(inner), [])
        if run is None:
            separated += inner
        elif found and all(
            alike[_signature(graph, call)] > 1 or (call.file, call.name) in shared for call in found
        ):
            separated += [_scope_of(scope, call, call.nodes) for call in found]
        else:
            within = _separated(graph, scope, inner, depth + 1, long, shared)
            call = _long_call(graph, scope, run, inner) if times[run] == 1 else None
            is_long = call is not None and (call.file, call.name) in long
            separated += [_scope_of(scope, call, within)] if call is not None and is_long else within
    return separated


def _called(scope: Scope, item: fx.Node | Scope, depth: int) -> _Run | None:
    """Returns the line that called a function in which an item was run, and the function's name."""
    node = next(item.nodes) if isinstance(item, Scope) else item
    line = line_at(node, scope.depth)
    chain = () if line is None else line.chain
    if len(chain) <= depth:
        return None
    return replace(chain[depth - 1], outer=chain[: depth - 1]), chain[depth].function


def _calls(graph: OperatorGraph, scope: Scope, run: _Run, items: Sequence[fx.Node | Scope]) -> list[_Call]:
    """Returns the calls that the items are, if each makes one tensor of tensors that it is given."""
    whole = _as_one(scope, run, items)
    if whole is None:
        return []
    for number in _IN_ONE_LINE:
        length, rest = divmod(len(whole.nodes), number)
        parts = [slice(start, start + length) for start in range(0, length * number, max(length, 1))]
        calls = [replace(whole, nodes=whole.nodes[part], lines=whole.lines[part]) for part in parts]
        if not rest and all(_is_a_call(graph, call) for call in calls):
            return calls if len({_signature(graph, call) for call in calls}) == 1 else []
    return []


def _as_one(scope: Scope, run: _Run, items: Sequence[fx.Node | Scope]) -> _Call | None:
    """Returns all items as one call; None where modules are called, or where the function is unknown."""
    line, name = run
    nodes = [item for item in items if isinstance(item, fx.Node)]
    inner = line_at(nodes[0], scope.depth) if len(nodes) == len(items) else None
    if inner is None:
        return None
    at = inner.chain[len(line.chain)]
    function = _function(at.file, name, at.number)
    if function is None or not _parameters(function):
        return None
    chains = [() if (own := line_at(node, scope.depth)) is None else own.chain for node in nodes]
    lines = tuple(tuple(each.number for each in chain[len(line.chain) :]) for chain in chains)
    return _Call(_author_call(scope, line, name, _parameters(function)), name, at.file, tuple(nodes), lines)


def _is_a_call(graph: OperatorGraph, call: _Call) -> bool:
    return (
        len(call.nodes) >= _LEAST_OPERATORS
        and _leaving(call) == [call.nodes[-1]]
        and _is_of_tensors(graph, call)
    )


def _leaving(call: _Call) -> list[fx.Node]:
    inside = set(call.nodes)
    return [node for node in call.nodes if any(user not in inside for user in node.users)]


def _is_of_tensors(graph: OperatorGraph, call: _Call) -> bool:
    """Whether a call makes tensors of tensors that it is given, and does nothing else."""
    inside = set(call.nodes)
    read = {operand for node in call.nodes for operand in node.all_input_nodes}
    given = [operand for operand in read - inside if not _is_size(graph, operand)]
    return (
        bool(given)
        and all(map(_is_plain_tensor, (*given, *_leaving(call))))
        and any(node.op != "get_attr" for node in given)
        and all(str(node.target) in graph.buffers for node in given if node.op == "get_attr")
        and all(node.op == "call_function" and _is_pure(graph, node) for node in call.nodes)
        and not any(map(_is_in_a_region, call.nodes))
    )


def _long_call(
    graph: OperatorGraph, scope: Scope, run: _Run, items: Sequence[fx.Node | Scope]
) -> _Call | None:
    """Returns the items as one call of a long function, if they are the only call of its name on the line."""
    call = _as_one(scope, run, items)
    if call is None or len(call.nodes) < _LONG or not _is_of_tensors(graph, call):
        return None
    line, name = run
    statement = statement_at(line)
    if len(_calls_of(statement, name)) != 1 or _is_in_part(scope, run, call):
        return None
    leaving = _leaving(call)
    if leaving == [call.nodes[-1]]:
        return call
    value = statement.value if isinstance(statement, ast.Assign) else None
    made = [(_assigned_within(scope, line, node), node) for node in leaving]
    function = _function(call.file, name, call.lines[0][0])
    returned = () if function is None or value not in _calls_of(statement, name) else _returned(function)
    if len(returned) != len(line.assigned) or sorted(returned) != sorted(own for own, _ in made):
        return None
    return replace(call, returns=tuple(sorted(made, key=lambda entry: returned.index(entry[0]))))


def _is_in_part(scope: Scope, run: _Run, call: _Call) -> bool:
    """Whether other operators of the call are in another stage."""
    inside, calls = set(call.nodes), module_calls(call.nodes[0])
    beside = {other for node in call.nodes for other in (*node.users, *node.all_input_nodes)} - inside
    return any(
        module_calls(node) == calls and _called(scope, node, len(run[0].chain)) == run for node in beside
    )


def _assigned_within(scope: Scope, line: Line, node: fx.Node) -> str:
    """Returns the one name that the function which `line` calls assigns where a value is made, or ""."""
    own = line_at(node, scope.depth)
    names = () if own is None else own.chain[len(line.chain)].assigned
    return names[0] if len(names) == 1 else ""


def _is_size(graph: OperatorGraph, node: fx.Node) -> bool:
    return node.op == "call_function" and is_size(graph, node)


def _is_plain_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor) and not is_number(node)


def _is_pure(graph: OperatorGraph, node: fx.Node) -> bool:
    """Whether an operator does nothing but compute, and the same in training as in evaluation."""
    operator = graph.operators[node.name]
    does_more = operator.is_random or operator.writes_buffers or operator.memory_group is not None
    return not does_more and mode_of(node) is not True


def _is_in_a_region(node: fx.Node) -> bool:
    """Whether a node runs without gradients or in other types, which a function would have to enter again."""
    return node.meta.get("no_grad") is not None or autocast_of(node) is not None


def _signature(graph: OperatorGraph, call: _Call) -> Any:
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


def _scope_of(scope: Scope, call: _Call, items: Sequence[fx.Node | Scope]) -> Scope:
    key = f"{scope.key}:{call.name}:{call.nodes[0].name}"
    return Scope(
        scope.path,
        scope.kind,
        key,
        scope.depth,
        list(items),
        function=call.name,
        call=call.at,
        returns=tuple(node for _, node in call.returns),
    )


def _author_call(scope: Scope, line: Line, name: str, parameters: tuple[str, ...]) -> AuthorCall:
    """Finds what the author's calls of a function on a line are given."""
    given_as: dict[str, str] = {}
    unnamed: dict[str, frozenset[str]] = {}
    for call in _calls_of(statement_at(line), name):
        named = {word.arg: word.value for word in call.keywords if word.arg is not None}
        for parameter, value in (*zip(parameters, call.args, strict=False), *named.items()):
            if isinstance(value, ast.Name | ast.Attribute):
                given_as.setdefault(value.id if isinstance(value, ast.Name) else value.attr, parameter)
            elif not isinstance(value, ast.Constant):
                unnamed[parameter] = operators_of(value)
    made = tuple((operators, parameter) for parameter, operators in unnamed.items())
    return AuthorCall(line, scope.key, parameters, given_as, made)


def _calls_of(statement: ast.stmt | None, name: str) -> list[ast.Call]:
    calls = (each for each in ast.walk(statement or ast.Pass()) if isinstance(each, ast.Call))
    return [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == name]


def _function(file: str, name: str, number: int) -> ast.FunctionDef | None:
    """Returns the function of a name that a file defines at its top, with a line of this number."""
    functions = () if file.startswith(_OF_TORCH) else _functions(file).get(name, ())
    return next((f for f in functions if f.lineno <= number <= (f.end_lineno or f.lineno)), None)


@functools.lru_cache(maxsize=256)
def _functions(file: str) -> Mapping[str, Sequence[ast.FunctionDef]]:
    found = defaultdict[str, list[ast.FunctionDef]](list)
    for each in parsed(file).body:
        if isinstance(each, ast.FunctionDef):
            found[each.name].append(each)
    return found


def _parameters(function: ast.FunctionDef) -> tuple[str, ...]:
    return tuple(
        each.arg for each in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
    )


def _returned(function: ast.FunctionDef) -> tuple[str, ...]:
    """Returns the names that a function's last line returns, if it is `return q, k`."""
    last = function.body[-1]
    value = last.value if isinstance(last, ast.Return) else None
    entries = value.elts if isinstance(value, ast.Tuple) else []
    names = tuple(entry.id for entry in entries if isinstance(entry, ast.Name))
    return names if len(names) == len(entries) else ()
