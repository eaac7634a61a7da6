"""Names what a body is given: after its author's parameters where they are known, else as its caller does."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence, Set

from torch import fx

from .literals import identifier
from .naming import hands_on, is_link, name_where_made, operator_name, result_name
from .outermost import OF_SUBSCRIPTS
from .scopes import AuthorCall, Line, Scope, line_at, module_calls, passed_to
from .stage_tree import StageTree

_CASTS = {"float", "double", "half", "bfloat16", "type"}


def argument_name(tree: StageTree, scope: Scope, node: fx.Node) -> str:
    """Returns what a body calls a value that it is given."""
    if scope.call is None:
        return _argument_name(tree, scope, node)
    parameter = _parameters_given(tree, scope, scope.call)[node]
    return _argument_name(tree, scope, node) if parameter is None else identifier(parameter)


def given_to(tree: StageTree, scope: Scope) -> list[fx.Node]:
    """Lists what a call is given, in the order of the author's parameters where all of them are known."""
    reads = tree.reads(scope)
    if scope.call is None:
        return reads
    given = _parameters_given(tree, scope, scope.call)
    place = {parameter: number for number, parameter in enumerate(scope.call.parameters)}
    if any(parameter not in place for parameter in given.values()):
        return reads
    return sorted(reads, key=lambda node: place[given[node] or ""])


def _parameters_given(tree: StageTree, scope: Scope, call: AuthorCall) -> dict[fx.Node, str | None]:
    """Maps what a function of the author's is given to its parameters, None where that cannot be told."""
    reads = tree.reads(scope)
    if len(reads) == 1:
        return {reads[0]: call.parameters[0]}
    found = {node: call.given_as.get(_argument_name(tree, scope, node)) for node in reads}
    for node in reads:
        parameter = call.given_as.get(passed_to(call.caller, node).name)
        if found[node] is None and parameter not in found.values():
            found[node] = parameter
    unknown = sorted(node for node, parameter in found.items() if parameter is None)
    if len(unknown) == len(call.unnamed) == 1:
        ((_, found[unknown[0]]),) = call.unnamed
    elif len(unknown) == len(left := set(call.given_as.values()).difference(found.values())) == 1:
        (found[unknown[0]],) = left
    functions = {node: _function_called(scope, call.line, node) for node in unknown}
    return found | matched_with_arguments(unknown, call.unnamed, functions)


def _function_called(scope: Scope, line: Line, node: fx.Node) -> str:
    """Returns the function that this line calls to make a value, "" if the value is not from there."""
    own = line_at(node, scope.depth)
    chain, outer = () if own is None else own.chain, len(line.chain)
    return chain[outer].function if len(chain) > outer and chain[:outer] == line.chain else ""


def _argument_name(tree: StageTree, scope: Scope, node: fx.Node) -> str:
    if node.op == "placeholder" and not scope.path:
        return identifier(node.name)
    if own := scope.argument(node).name:
        return identifier(own)
    inside = any((key, path) == (scope.key, scope.path) for key, path, _ in module_calls(node))
    if not inside and scope.path and scope.function is None and len(tree.reads(scope)) == 1:
        first = next(iter(inspect.signature(tree.modules[scope.path].forward).parameters.values()), None)
        if first is not None and first.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
            return identifier(first.name)
    if node.op == "placeholder":
        return identifier(node.name)
    depth = scope.depth if inside or scope.function is not None else max(scope.depth - 1, 0)
    if (named := name_where_made(tree, node, depth)) is not None:
        return named
    if is_link(node):
        return "hidden"
    source = hands_on(node)
    return result_name(node, node) if source is None else _argument_name(tree, scope, source)


def matched_with_arguments(
    nodes: Sequence[fx.Node],
    made: Sequence[tuple[Set[str], str]],
    functions: Mapping[fx.Node, str] | None = None,
) -> dict[fx.Node, str]:
    """Matches operators with a call's arguments that make them; both are in the order in which they run.

    Of an argument there are the names that what its expression does last may have, and the parameter that it
    is given as.
    `functions` are those of the author's that make the operators, if any do. Subscripts are alike: they are
    matched where all of them are there.
    """
    found: dict[fx.Node, str] = {}
    at = 0
    for node in nodes:
        own = (functions or {}).get(node) or operator_name(node)
        later = (place for place in range(at, len(made)) if _is_called(made[place][0], own))
        place = next(later, None)
        if place is None:
            return {}
        found[node], at = identifier(made[place][1]), place + 1
    subscripts = {identifier(parameter) for names, parameter in made if names == OF_SUBSCRIPTS}
    named = subscripts.intersection(found.values())
    return {} if named and named != subscripts else found


def _is_called(names: Set[str], operator: str) -> bool:
    return operator in names or (operator == "to" and not _CASTS.isdisjoint(names))
