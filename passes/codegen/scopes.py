"""The module tree lifted back from the flat program: which operators belong to which module's call.

Operators of one call stand together in program order and stay so when other stages' are taken out, so a
stage's tree is found by reading its operators from first to last.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import fx, nn

from pd2bw_fx.graph import OF_A_MAP, OperatorGraph

from .cut import is_size
from .literals import identifier

# A preamble shorter than this reads better where it is than as a function of its own.
_LONG_PREAMBLE = 6
_SEQUENTIAL = f"{nn.Sequential.__module__}.{nn.Sequential.__qualname__}"


@dataclass(frozen=True, slots=True)
class Line:
    """A place in the author's file: `forward` of some module stood there while an operator was traced."""

    file: str
    number: int
    code: str

    @property
    def is_in_container(self) -> bool:
        """Whether it is the loop of nn.Sequential: no author's line."""
        return self.file == nn.modules.container.__file__

    def __str__(self) -> str:
        return f"{self.file.rpartition('/')[2]}:{self.number}"


@dataclass(slots=True)
class Scope:
    """One call of a module, or a preamble that is made a function of its own (`function` is its name).

    `items` are operators and inner calls in program order. `depth` counts modules from the root, whose is 0.
    """

    path: str
    kind: str  # qualified type: "torch.nn.modules.linear.Linear"
    key: str  # tells repeated calls of one module apart
    depth: int
    items: list[fx.Node | Scope] = field(default_factory=list)
    function: str | None = None

    @property
    def nodes(self) -> Iterator[fx.Node]:
        for item in self.items:
            if isinstance(item, Scope):
                yield from item.nodes
            else:
                yield item

    @property
    def is_of_a_map(self) -> bool:
        """Whether it is a layer of what the line of its call maps."""
        return self.key.endswith(OF_A_MAP)

    @property
    def type_name(self) -> str:
        return self.kind.rpartition(".")[2]


def lift(graph: OperatorGraph, nodes: Sequence[fx.Node]) -> Scope:
    """The tree of calls of these nodes, the model itself at its root."""
    root = Scope("", graph.model_name, "", 0)
    stack = [root]
    for node in nodes:
        calls = module_calls(node)
        shared = 0
        while (
            shared < min(len(calls), len(stack) - 1)
            and stack[shared + 1].key == calls[shared][0]
            and stack[shared + 1].path == calls[shared][1]
        ):
            shared += 1
        del stack[shared + 1 :]
        for key, path, kind in calls[shared:]:
            scope = Scope(path, kind, key, len(stack))
            stack[-1].items.append(scope)
            stack.append(scope)
        stack[-1].items.append(node)
    _separate_preambles(graph, root)
    return root


def module_calls(node: fx.Node) -> list[tuple[str, str, str]]:
    """(key, path, type) of the module calls around a node, outermost first, the root left out."""
    stack = node.meta.get("nn_module_stack") or {}
    calls = []
    for key, (path, kind) in stack.items():
        if path:
            kind_name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
            calls.append((key, path, kind_name))
    return calls


def line_at(node: fx.Node, depth: int) -> Line | None:
    """Where the forward of the module at this depth stood when the node was traced.

    The tracer keeps one frame for each module's forward, innermost last.
    """
    calls = node.meta.get("nn_module_stack") or {}
    if not any(not path for path, _ in calls.values()):
        return None
    frames = _frames_of_calls(frames_of(node), [str(kind) for _, kind in calls.values()])
    return frames[depth] if depth < len(frames) else None


def _frames_of_calls(frames: Sequence[Line], kinds: Sequence[str]) -> list[Line | None]:
    """The frame of each call, both outermost first; the innermost frame is the innermost call's.

    An nn.Sequential that is made in a forward (`self.layers[:3](x)`) has a frame, and is no call.
    """
    found: list[Line | None] = []
    left, surplus = list(frames), len(frames) - len(kinds)
    for kind in reversed(kinds):
        while surplus > 0 and left[-1].is_in_container and kind != _SEQUENTIAL:
            left.pop()
            surplus -= 1
        found.append(left.pop() if left else None)
    return found[::-1]


def frames_of(node: fx.Node) -> list[Line]:
    """The author's lines that an operator was traced in, innermost last."""
    found = re.findall(
        r'File "([^"]*)", line (\d+), in [^\n]*\n[ \t]*([^\n]*)', node.meta.get("stack_trace") or ""
    )
    return [Line(file, int(number), code) for file, number, code in found]


def assigned_names(code: str) -> tuple[str, ...]:
    """The names that a line of the author's assigns: "q, k = f(" -> ("q", "k"); nothing for other lines, and
    for one of several statements, of which a traced node does not say which it comes from."""
    if ";" in code and _num_statements(code) != 1:
        return ()
    match = re.match(r"^([A-Za-z_][\w, ()]*?)\s*(?::[^=]*)?(?<![=!<>+*/%&|^@-])=(?!=)", code)
    if match is None:
        return ()
    try:
        target = ast.parse(match[1].strip(), mode="eval").body
    except SyntaxError:
        return ()
    names = target.elts if isinstance(target, ast.Tuple) else [target]
    found = tuple(name.id if isinstance(name, ast.Name) else "" for name in names)
    return tuple(identifier(name) if name not in ("", "_") else "_" for name in found)


def makes_one_by_one(code: str) -> bool:
    """Whether a line assigns several names, each from an expression of its own or a round of one."""
    try:
        (statement,) = ast.parse(code).body
    except (SyntaxError, ValueError):
        return False
    if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Tuple):
        return False
    return isinstance(statement.value, ast.Tuple | ast.GeneratorExp | ast.ListComp)


def _num_statements(code: str) -> int:
    try:
        return len(ast.parse(code).body)
    except SyntaxError:  # it goes on below
        return 0


_SIGNS: dict[type[ast.operator], str] = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.MatMult: "matmul"
}  # fmt: skip


def is_outermost(code: str, operator: str, *, is_call: bool) -> bool:
    """Whether a line that assigns a name from itself (`x = x + f(x)`) does so by this operator, or by the
    call of a module. Of a line that goes on below only the first part is known."""
    if re.fullmatch(r"\w+(, \w+)* = [\w.\[\]]+\(", code):
        return is_call
    try:
        statement = ast.parse(code).body[0]
    except (SyntaxError, IndexError):
        return False
    if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Name):
        return False
    target, value = statement.targets[0].id, statement.value
    if target not in {name.id for name in ast.walk(value) if isinstance(name, ast.Name)}:
        return False
    if isinstance(value, ast.BinOp):
        return not is_call and _SIGNS.get(type(value.op)) == operator
    if not isinstance(value, ast.Call):
        return False
    called = value.func.attr if isinstance(value.func, ast.Attribute) else ast.unparse(value.func)
    return is_call or called == operator


def _separate_preambles(graph: OperatorGraph, scope: Scope) -> None:
    """Long runs of operators that one line of the author's makes from inputs alone become functions."""
    for item in scope.items:
        if isinstance(item, Scope):
            _separate_preambles(graph, item)
    items: list[fx.Node | Scope] = []
    run: list[fx.Node] = []
    for item in scope.items:
        here = _preamble_line(graph, item, scope.depth)
        if run and here != _preamble_line(graph, run[0], scope.depth):
            items += _as_function(graph, run, scope)
            run = []
        if isinstance(item, Scope) or here is None:
            items.append(item)
        else:
            run.append(item)
    scope.items = items + _as_function(graph, run, scope)


def _preamble_line(graph: OperatorGraph, item: fx.Node | Scope, depth: int) -> Line | None:
    if isinstance(item, Scope) or item.name not in graph.operators:
        return None
    return line_at(item, depth) if graph.operators[item.name].is_replicable else None


def _as_function(graph: OperatorGraph, run: Sequence[fx.Node], scope: Scope) -> list[fx.Node | Scope]:
    line = line_at(run[0], scope.depth) if run else None
    working = [node for node in run if not is_size(graph, node)]
    names = assigned_names(line.code) if line is not None else ()
    if len(working) < _LONG_PREAMBLE or len(names) != 1 or names[0] == "_":
        return list(run)
    return [
        Scope(scope.path, scope.kind, f"{scope.key}:{names[0]}", scope.depth, list(run), function=names[0])
    ]
