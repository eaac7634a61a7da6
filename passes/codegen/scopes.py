"""Lifts the module tree back from the flat program: which operators belong to which module's call.

The operators of one call stand together in program order, also once those of other stages are taken out. So a
stage's tree is found by reading its operators from first to last.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx, nn

from pd2bw_fx.graph import GIVEN_AS, OF_A_MAP, RETURNED_AT, OperatorGraph

from .cut import is_size
from .statements import assigned_names

# A preamble shorter than this reads better where it is than as a function of its own.
_LONG_PREAMBLE = 6
_FRAME = re.compile(r'File "([^"]*)", line (\d+), in ([^\n]*)\n[ \t]*([^\n]*)')
_LAYERS_OF_TORCH = nn.modules.__file__.rpartition("/")[0]
_FUNCTIONS_OF_TORCH = nn.functional.__file__


@dataclass(frozen=True, slots=True)
class Line:
    """The first line of an author's statement that was running when an operator was traced.

    The statement is in some `forward`, or in a function that one calls. Then `outer` has the lines of the
    calls that led there, the forward's first.
    """

    file: str
    number: int
    code: str
    outer: tuple[Line, ...] = ()
    function: str = field(default="", compare=False)  # in which the line is

    @property
    def chain(self) -> tuple[Line, ...]:
        """The lines that were being run, the forward's first."""
        return *self.outer, replace(self, outer=())

    @property
    def of_the_forward(self) -> Line:
        return self.outer[0] if self.outer else self

    @property
    def of_the_author(self) -> Line | None:
        """The innermost line that is not torch's own."""
        return next((line for line in reversed(self.chain) if line.module_of_torch is None), None)

    @property
    def module_of_torch(self) -> str | None:
        """The torch module that the line is in ("torch.nn.modules.loss"), or None for an author's line."""
        folder, _, name = self.file.rpartition("/")
        if self.file == _FUNCTIONS_OF_TORCH:
            return nn.functional.__name__
        return f"torch.nn.modules.{name.removesuffix('.py')}" if folder == _LAYERS_OF_TORCH else None

    @property
    def assigned(self) -> tuple[str, ...]:
        """The names that the author assigns on this line; the loop of an nn.Sequential is torch's own."""
        return () if self.is_of_a_sequential else assigned_names(self.code)

    @property
    def is_of_a_sequential(self) -> bool:
        return self.module_of_torch == nn.modules.container.__name__

    def __str__(self) -> str:
        return f"{self.file.rpartition('/')[2]}:{self.number}"


@dataclass(frozen=True, slots=True)
class Passed:
    """The place of a value among a call's arguments or results.

    `name` is its name there, if it has one, and `number` how many arguments or results there are.
    """

    place: float = math.inf
    name: str = ""
    number: int = 0


@dataclass(frozen=True, slots=True)
class AuthorCall:
    """A call of a function of the author's: the line that it stands on, and the function's parameters.

    `caller` is the key of the module's call in which it stands. `given_as` maps names on the line to the
    parameters that their values are given as. `unnamed` are the parameters that are given what other
    expressions make, each behind the names that the outermost operation of its expression may have.
    """

    line: Line
    caller: str
    parameters: tuple[str, ...]
    given_as: Mapping[str, str]
    unnamed: tuple[tuple[frozenset[str], str], ...]


@dataclass(slots=True)
class Scope:
    """One call of a module, or a function of its own in the stage (`function` is its name).

    A function is a preamble, or one of the author's; then `call` is where the author calls it, and `returns`
    its results in the author's order, if it has several. `items` are operators and inner calls in program
    order. `depth` counts modules from the root, whose depth is 0.
    """

    path: str
    kind: str  # qualified type: "torch.nn.modules.linear.Linear"
    key: str  # tells repeated calls of one module apart
    depth: int
    items: list[fx.Node | Scope] = field(default_factory=list)
    function: str | None = None
    call: AuthorCall | None = None
    returns: tuple[fx.Node, ...] = ()

    @property
    def nodes(self) -> Iterator[fx.Node]:
        for item in self.items:
            if isinstance(item, Scope):
                yield from item.nodes
            else:
                yield item

    @property
    def is_of_a_map(self) -> bool:
        """Whether this is the call of a layer inside a function that is mapped, as by torch.vmap."""
        return self.key.endswith(OF_A_MAP)

    @property
    def type_name(self) -> str:
        return self.kind.rpartition(".")[2]

    def argument(self, node: fx.Node) -> Passed:
        """Returns where the author passes a value to the call, unless the call has it from elsewhere."""
        return self._passed(node, GIVEN_AS)

    def result(self, node: fx.Node) -> Passed:
        """Returns where the author's forward returns a value, unless it leaves the call in another way."""
        if node in self.returns:
            return Passed(self.returns.index(node), number=len(self.returns))
        return self._passed(node, RETURNED_AT)

    def _passed(self, node: fx.Node, kind: str) -> Passed:
        return passed_to(self.key, node, kind) if self.function is None else Passed()


def passed_to(key: str, node: fx.Node, kind: str = GIVEN_AS) -> Passed:
    """Returns where the author passes a value to the call of this key, or has it from there."""
    known = node.meta.get(kind, {})
    return Passed(*known[key]) if key in known else Passed()


def walk(scope: Scope) -> Iterator[Scope]:
    yield scope
    for item in scope.items:
        if isinstance(item, Scope):
            yield from walk(item)


def rename(call: Scope, path: str) -> None:
    """Gives a call another name of its module, and with it the calls of what the module holds."""
    first = call.path
    for inner in walk(call):
        if inner.path == first or inner.path.startswith(first + "."):
            inner.path = path + inner.path.removeprefix(first)


def lift(graph: OperatorGraph, nodes: Sequence[fx.Node]) -> Scope:
    """Builds the tree of calls of these nodes, with the model itself at its root."""
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
    """Lists the module calls around a node as (key, path, type), outermost first, without the root."""
    stack = node.meta.get("nn_module_stack") or {}
    calls = []
    for key, (path, kind) in stack.items():
        if path:
            kind_name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
            calls.append((key, path, kind_name))
    return calls


def line_at(node: fx.Node, depth: int) -> Line | None:
    """Returns the line at which the forward of the module at this depth stood when the node was traced.

    `Line.outer` is set where that forward had called a function.
    """
    calls = node.meta.get("nn_module_stack") or {}
    if calls and all(path for path, _ in calls.values()):
        return None
    kinds = [str(kind) for _, kind in calls.values()] or [""]  # a loss outside of the model is in no module
    if node.op == "call_module":
        del kinds[-1]  # torch.fx has not entered it
    frames = _frames_of_calls(frames_of(node), kinds)
    return frames[depth] if depth < len(frames) else None


def _frames_of_calls(frames: Sequence[Line], kinds: Sequence[str]) -> list[Line | None]:
    """Returns the frame of each call, outermost first; the innermost frame is the innermost call's.

    A layer of torch that is made in a forward (`nn.CrossEntropyLoss()(x, y)`, `self.layers[:3](x)`) has a
    frame, but is no call. In a hook (`torch.nn.utils.weight_norm`) the innermost call has no frame yet.
    """
    found: list[Line | None] = [None] * (len(kinds) - len(frames))
    left, surplus = list(frames), len(frames) - len(kinds)
    for kind in reversed(kinds[: len(kinds) - len(found)]):
        while surplus > 0 and left[-1].of_the_forward.module_of_torch not in (None, kind.rpartition(".")[0]):
            left.pop()
            surplus -= 1
        found.append(left.pop() if left else None)
    return found[::-1]


def frames_of(node: fx.Node) -> list[Line]:
    """Lists the author's lines where an operator was traced, one per module's forward, innermost last."""
    return list(_frames(node.meta.get("stack_trace") or ""))


@functools.lru_cache(maxsize=8192)
def _frames(trace: str) -> tuple[Line, ...]:
    found: list[Line] = []
    for file, number, name, code in _FRAME.findall(trace):
        is_called = bool(found) and name != "forward" and not file.endswith("torch/__init__.py")
        outer = found[-1].chain if is_called else ()
        found[-1 if is_called else len(found) :] = [Line(file, int(number), code, outer, name)]
    return tuple(found)


def _separate_preambles(graph: OperatorGraph, scope: Scope) -> None:
    """Makes functions of long runs of operators that one of the author's lines makes from inputs alone."""
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
    line = line_at(item, depth) if graph.operators[item.name].is_replicable else None
    return None if line is None else line.of_the_forward


def _as_function(graph: OperatorGraph, run: Sequence[fx.Node], scope: Scope) -> list[fx.Node | Scope]:
    working = [node for node in run if not is_size(graph, node)]
    is_long = len(working) >= _LONG_PREAMBLE and len({line_at(node, scope.depth) for node in working}) > 1
    name = _name_of_preamble(run, working[-1], scope.depth) if is_long else None
    if name is None:
        return list(run)
    return [Scope(scope.path, scope.kind, f"{scope.key}:{name}", scope.depth, list(run), function=name)]


def _name_of_preamble(run: Sequence[fx.Node], made: fx.Node, depth: int) -> str | None:
    """Returns the name that the forward's line assigns, or one assigned in a function that the line calls.

    The latter is taken where what follows the preamble was run by the same line.
    """
    line = line_at(made, depth)
    if line is None:
        return None
    readers = (line_at(user, depth) for user in made.users if user not in run)
    going_on = [reader.chain for reader in readers if reader is not None]
    for place, outer in enumerate(line.chain, start=1):
        if any(chain[:place] == line.chain[:place] for chain in going_on):
            continue
        names = outer.assigned
        return names[0] if len(names) == 1 and names[0] != "_" else None
    return None


def above(path: str) -> Iterator[str]:
    """Yields the paths of the modules that hold the one at this path, from the outermost on."""
    names = path.split(".")
    yield from (".".join(names[:end]) for end in range(1, len(names)))
