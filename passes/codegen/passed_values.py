"""Names what a call of an author's function is given, where the author gives it no name, after the parameter.

y = self.scan(x.transpose(1, 2), self.skip.float())        def scan(self, u, D): u = x.transpose(1, 2)
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping, Sequence

from torch import fx

from .argument_names import matched_with_arguments
from .loops.author_loops import parsed
from .outermost import operators_of
from .scopes import Line, line_at, module_calls
from .wording import statement_at


def passed_names(nodes: Sequence[fx.Node], depth: int) -> dict[fx.Node, str]:
    """Returns the parameters as which operators of one body are passed, where that can be told."""
    found: dict[fx.Node, str] = {}
    given: dict[Line, list[fx.Node]] = {}
    functions: dict[Line, _Functions] = {}
    for node in nodes:
        line = line_at(node, depth)
        within = _read_within(node, line, depth)
        if line is not None and within:
            given.setdefault(line, []).append(node)
            functions[line] = functions.get(line, within) & within
    for line, passed in given.items():
        found |= matched_with_arguments(passed, _made_in_a_call(line, functions[line]))
    return found


_Functions = frozenset[tuple[str, str]]  # functions by name and file


def _read_within(node: fx.Node, line: Line | None, depth: int) -> _Functions:
    """Returns the functions within which a value is read, if it is only read in calls by its own line."""
    calls = module_calls(node)
    if line is None or len(calls) > depth or not node.users:
        return frozenset()
    chain = line.chain
    found: list[_Functions] = []
    for user in node.users:
        reader = line_at(user, depth) if module_calls(user)[:depth] == calls else None
        further = () if reader is None or reader.chain[: len(chain)] != chain else reader.chain[len(chain) :]
        found.append(frozenset((inner.function, inner.file) for inner in further))
    return frozenset.intersection(*found)


def _made_in_a_call(line: Line, functions: _Functions) -> list[tuple[frozenset[str], str]]:
    """Lists what a line's one call of these functions makes as arguments, with the parameters' names."""
    files = dict(functions)
    called = [inner for inner in ast.walk(statement_at(line) or ast.Pass()) if isinstance(inner, ast.Call)]
    calls = [call for call in called if _name_of(call) in files]
    parameters = _parameters(files[_name_of(calls[0])]).get(_name_of(calls[0])) if len(calls) == 1 else None
    if parameters is None:
        return []
    (call,) = calls
    is_bound = parameters[:1] == ("self",) and isinstance(call.func, ast.Attribute)
    given = [*zip(parameters[is_bound:], call.args, strict=False)]
    given += [(word.arg, word.value) for word in call.keywords if word.arg is not None]
    return [
        (operators, parameter)
        for parameter, value in given
        if (operators := operators_of(value)) and not _calls_a_function(value)
    ]


def _calls_a_function(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and not isinstance(value.func, ast.Attribute)


def _name_of(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


@functools.lru_cache(maxsize=256)
def _parameters(file: str) -> Mapping[str, tuple[str, ...]]:
    """Maps the functions that a file defines once to their parameters."""
    functions = [node for node in ast.walk(parsed(file)) if isinstance(node, ast.FunctionDef)]
    names = [function.name for function in functions]
    return {
        function.name: tuple(each.arg for each in (*function.args.posonlyargs, *function.args.args))
        for function in functions
        if names.count(function.name) == 1
    }
