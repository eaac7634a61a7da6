"""Writes the classes of a stage's tree: each distinct module once, however often it occurs."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import Tensor, nn

from pd2bw_fx.graph import ParameterSpec, dtype_name
from pd2bw_fx.names import free_name

from .attributes import Attributes
from .classes import ClassText, Draft, class_texts
from .layer_calls import idle_layers
from .layers import constructor, sequential
from .layout import WIDTH, signature_lines, written
from .literals import MAIN, identifier, plain, quoted
from .loops.rolled_up import rolled_up
from .method import write_method
from .numbers import few_numbers
from .scopes import Scope, above, line_at, walk
from .stage_tree import StageTree
from .template import Call, ClassOf, Fixed, Leaf, Part, Template
from .written import Method, reference

_MOST_COUNTED = 6  # results that an annotation has one by one


class StageWriter:
    """Writes the classes and helper functions of one stage; `classes` has them in order of definition."""

    def __init__(self, tree: StageTree, root_name: str) -> None:
        self.tree = tree
        self.classes: list[ClassText] = []
        self.functions: list[tuple[str, tuple[str, ...]]] = []
        self.root_name = root_name
        self.ties: dict[str, str] = {}  # further name of a tensor -> its name in the graph
        self.tied_to: dict[str, str] = {}  # further name of a tensor -> the one it is tied to here
        self._by_path: dict[str, list[Scope]] = defaultdict(list)
        self._drafts: dict[str, Draft] = {}  # by path, inner classes first
        self._attributes: dict[str, Attributes] = {}  # by the path of the class
        self._methods: dict[int, str] = {}  # scope -> the method's name in its class
        self._arguments: dict[tuple[str, int, int], tuple[str, ...]] = {}  # of the author's functions
        self._idle: set[str] = set()  # layers that nobody calls
        for scope in walk(tree.root):
            if scope.function is None and not tree.is_chain(scope):
                self._by_path[scope.path].append(scope)
        self._from_outside = self._called_from_outside()

    def _called_from_outside(self) -> dict[str, list[Scope]]:
        """Finds, for each class, calls of what it holds by other classes: `self.encoder.norm(x)`."""
        calls: dict[str, list[Scope]] = defaultdict(list)
        for scopes in self._by_path.values():
            for scope in scopes:
                for item in scope.items:
                    if isinstance(item, Scope) and item.function is None:
                        holder = self._holder(item.path)
                        if holder != scope.path:
                            calls[holder].append(item)
        return calls

    def _holder(self, path: str) -> str:
        """Returns the path of the innermost class that holds a module."""
        holders = [p for p in above(path) if p in self._by_path]
        return next((p for p in reversed(holders) if not self.tree.is_layer(self._by_path[p][0])), "")

    def write(self) -> Method:
        """Writes all classes, the root's last; returns the root's forward."""
        method, *_ = self._draft_class("")
        taken = {MAIN, *dict(self.functions), *self.tree.function_names}
        self.classes = class_texts(list(self._drafts.values()), self.tree.modules, taken)
        return method

    def _draft_class(self, path: str) -> list[Method]:
        """Drafts the class of the module at a path; returns its methods."""
        scopes = self._by_path[path]
        is_sequence = self.tree.are_sequences(scopes)
        attributes = Attributes(path, self._module_at, self._attributes.get, is_sequence=is_sequence)
        self._attributes[path] = attributes
        for scope in () if is_sequence else scopes:
            self._write_inner(scope, attributes)
        for item in self._from_outside[path]:
            attributes.add(_relative(item.path, path), self._constructor(item))
        for name, member in self._members(scopes[0]).items() if is_sequence else ():
            attributes.add(name, member)
        self._write_idle_layers(path, attributes)
        for name in sorted(self.tree.owned[path]):
            relative = _relative(name, path)
            if not attributes.holds(relative):
                attributes.add(relative, *self._tensor(name))
        methods: list[tuple[str, Method, str]] = []
        for method, calls in [] if is_sequence else self._distinct_methods(scopes):
            name = free_name("forward", {*attributes.root.children, *(known for known, *_ in methods)})
            methods.append((name, method, _returned(calls[0], self.tree)))
            self._methods |= {id(scope): name for scope in calls}
        scope = scopes[0]
        whole = self.tree.is_whole(scope)
        base = self.root_name if not path else identifier(scope.type_name, fallback="Module")
        line = next((line.of_the_forward for n in scope.nodes if (line := line_at(n, scope.depth))), None)
        self._drafts[path] = Draft(
            path=path,
            base=base if whole or not path else f"{base}Part",
            whole=whole,
            origin="" if line is None or line.module_of_torch else plain(line.file.rpartition("/")[2]),
            attributes=attributes,
            methods=tuple(methods),
            endings=() if path else tuple(self._root_endings(attributes)),
        )
        return [method for _, method, _ in methods]

    def _distinct_methods(self, scopes: Sequence[Scope]) -> list[tuple[Method, list[Scope]]]:
        """Returns the distinct methods of a module with their calls, in the order of the first calls.

        In a first round, values may come from elsewhere than in the others, and then have other names there.
        As arguments they get the names that most calls have for them.
        """
        found: list[tuple[Method, list[Scope]]] = []
        for scope in scopes:
            method = write_method(self.tree, scope, self._call_text)
            _add(found, method, [scope], (other.common_with(method) for other, _ in found))
        distinct: list[tuple[Method, list[Scope]]] = []
        for method, calls in sorted(found, key=lambda entry: -len(entry[1])):
            _add(distinct, method, calls, (self._also_of(calls, other) for other, _ in distinct))
        return sorted(distinct, key=lambda entry: min(map(scopes.index, entry[1])))

    def _also_of(self, calls: Sequence[Scope], method: Method) -> Method | None:
        """Returns the method for these calls too, which are written as it is with its names for arguments.

        They stay written that way. Where they do something else, they are written with names of their own
        again, and the result is None.
        """
        if len(self.tree.reads(calls[0])) + len(self.tree.symbols(calls[0])) != len(method.arguments):
            return None
        common: Method | None = method
        for scope in calls:
            common = common and common.common_with(
                write_method(self.tree, scope, self._call_text, method.arguments)
            )
            if common is None:
                write_method(self.tree, scope, self._call_text)
                return None
        return common

    def _write_inner(self, scope: Scope, attributes: Attributes) -> None:
        """Writes what a body calls before the body: classes, layers and helper functions."""
        for item in scope.items:
            if not isinstance(item, Scope):
                continue
            if item.function is not None:
                self._write_function(item)
            elif self._holder(item.path) == scope.path:
                attributes.add(_relative(item.path, scope.path), self._constructor(item))

    def _write_idle_layers(self, path: str, attributes: Attributes) -> None:
        """Adds layers that nobody calls, as layers, where all of their tensors are held here."""
        for holder in idle_layers(self.tree, path):
            attributes.add(_relative(holder, path), constructor(self.tree.modules[holder]))
            self._idle.add(holder)

    def _constructor(self, scope: Scope) -> Template:
        """Returns what builds the module of a call; if the module has a class, that is drafted first."""
        if self.tree.is_layer(scope):
            return constructor(self.tree.modules[scope.path])
        if not self.tree.is_chain(scope):
            if scope.path not in self._drafts:
                self._draft_class(scope.path)
            return ClassOf(scope.path)
        return sequential(self._members(scope))

    def _members(self, scope: Scope) -> dict[str, Template]:
        """Returns what builds the members of an nn.Sequential, by name."""
        called = {s.path: self._constructor(s) for s in scope.items if isinstance(s, Scope)}
        idle = Fixed("nn.Identity()")
        names = [name for name, _ in self.tree.modules[scope.path].named_children()]
        return {name: called.get(f"{scope.path}.{name}", idle) for name in names}

    def _write_function(self, scope: Scope) -> None:
        attributes = Attributes(scope.path, self._module_at, self._attributes.get)
        self._write_inner(scope, attributes)
        base = f"make_{scope.function}" if scope.call is None else identifier(scope.function or "")
        method = self._helper(scope, base)
        body = tuple(written(rolled_up(method.body, attributes, method.arguments), attributes, 4))
        others = {MAIN, *self.tree.function_names}
        while True:
            name = free_name(base, others)
            head = tuple(signature_lines(name, _annotated(method), _returned(scope, self.tree), 0))
            known = dict(self.functions).get(name)
            if known is None:
                self.functions.append((name, (*head, *body)))
            if known is None or known == (*head, *body):
                self.tree.helper_names[id(scope)] = name
                return
            others.add(name)

    def _helper(self, scope: Scope, base: str) -> Method:
        """Writes a helper function; calls of one of the author's share its arguments' names and no shapes."""
        if scope.call is None:
            return write_method(self.tree, scope, self._call_text)
        key = base, len(self.tree.reads(scope)), len(self.tree.symbols(scope))
        method = write_method(self.tree, scope, self._call_text, self._arguments.get(key, ()))
        self._arguments.setdefault(key, method.arguments)
        return replace(method, body=tuple(replace(line, shape=()) for line in method.body))

    def _call_text(self, caller: Scope, item: Scope, arguments: list[str]) -> str:
        joined = ", ".join(arguments)
        if item.function is not None:
            return f"{self.tree.helper_names[id(item)]}({joined})"
        relative = _relative(item.path, caller.path)
        method = self._methods.get(id(item), "forward")
        return f"{reference(relative)}{'' if method == 'forward' else '.' + method}({joined})"

    def _module_at(self, path: str) -> nn.Module | None:
        return self.tree.modules.get(path)

    def _tensor(self, name: str) -> tuple[Template, str]:
        """Returns what builds a parameter or buffer that no layer holds, and its kind."""
        spec = self._spec(name)
        few = few_numbers(self.tree.graph, spec.name)
        if few is not None:
            typed = () if few.is_of_their_type else (_typed(dtype_name(few.dtype)),)
            return Call("torch.tensor", (Part(Leaf("values", few.values)), *typed)), "buffer"
        shape = spec.spec.example_shape or tuple(int(size) for size in spec.spec.shape or ())
        dtype = dtype_name(spec.spec.dtype)
        parts = [Part(Leaf("size", int(size))) for size in shape]
        parts += [] if shape else [Part(Fixed("()"))]
        parts += [] if dtype == "float32" else [_typed(dtype)]
        empty = Call("torch.empty", tuple(parts))
        if spec.name in self.tree.graph.buffers:
            return empty, "buffer"
        frozen = () if spec.trainable else (Part(Fixed("False"), "requires_grad", by_name=True),)
        return Call("nn.Parameter", (Part(empty), *frozen)), "parameter"

    def _spec(self, name: str) -> ParameterSpec:
        graph = self.tree.graph
        found = graph.parameters.get(name) or graph.buffers.get(name)
        if found is not None:
            return found
        specs = (*graph.parameters.values(), *graph.buffers.values())
        return next(spec for spec in specs if name in spec.tied_names)

    def _root_endings(self, attributes: Attributes) -> list[str]:
        """Returns the lines that tie modules of this stage, and those that freeze parameters."""
        endings = []
        held = self.held_names()
        layers = self._idle | {s.path for s in walk(self.tree.root) if self.tree.is_layer(s)}
        for name, canonical in held.items():
            if name == canonical:
                continue
            first = canonical if canonical in held else next(n for n, c in held.items() if c == canonical)
            self.ties[name] = canonical
            if name != first:
                self.tied_to[name] = first
                endings.append(self._tie(name, attributes.refer(first), attributes))
        parameters = [name for name, canonical in held.items() if canonical in self.tree.graph.parameters]
        frozen = [name for name in parameters if not self._spec(name).trainable]
        in_layers = [name for name in frozen if any(name.startswith(path + ".") for path in layers)]
        outermost = dict.fromkeys(_outermost_frozen(name, frozen, parameters) for name in in_layers)
        return [*endings, *(f"{attributes.refer(path)}.requires_grad_(False)" for path in outermost)]

    def _tie(self, name: str, value: str, attributes: Attributes) -> str:
        target = attributes.refer(name)
        if not target.endswith(")"):
            return f"{target} = {value}"
        holder, _, last = name.rpartition(".")  # it can only be reached by a call
        kind = "parameter" if self._spec(name).name in self.tree.graph.parameters else "buffer"
        return f"{attributes.refer(holder)}.register_{kind}({quoted(last)}, {value})"

    def held_names(self) -> dict[str, str]:
        """Maps the local name of every parameter and buffer of the stage to its name in the graph."""
        held: dict[str, str] = {}
        for scope in walk(self.tree.root):
            if self.tree.is_layer(scope):
                module = self.tree.modules[scope.path]
                tensors: dict[str, Tensor] = dict(module.named_parameters()) | dict(module.named_buffers())
                held |= {f"{scope.path}.{n}": self._spec(f"{scope.path}.{n}").name for n in tensors}
        for names in self.tree.owned.values():
            held |= {name: self._spec(name).name for name in sorted(names)}
        return held


def _outermost_frozen(name: str, frozen: Sequence[str], parameters: Sequence[str]) -> str:
    """Returns the path of the largest module around a frozen parameter that has no other ones, or its own."""
    parts = name.split(".")
    for end in range(len(parts)):
        within = "".join(f"{part}." for part in parts[:end])
        inside = (other for other in parameters if other.startswith(within))
        if set(frozen).issuperset(inside):
            return within.removesuffix(".")
    return name


def _typed(dtype: str) -> Part:
    return Part(Fixed(f"torch.{dtype}"), "dtype", by_name=True)


def _relative(name: str, path: str) -> str:
    """Returns a name of the whole model as the module at `path` knows it."""
    return name[len(path) + 1 :] if path else name


def _add(
    known: list[tuple[Method, list[Scope]]],
    method: Method,
    calls: list[Scope],
    common: Iterable[Method | None],
) -> None:
    """Adds calls to those of the first known method that theirs has a common one with, or by themselves."""
    for place, both in enumerate(common):
        if both is not None:
            known[place] = both, known[place][1] + calls
            return
    known.append((method, calls))


def _annotated(method: Method) -> list[str]:
    return [f"{a}: {kind}" for a, kind in zip(method.arguments, method.annotations, strict=True)]


def _returned(scope: Scope, tree: StageTree) -> str:
    gives = len(tree.gives(scope))
    if gives < 2:
        return "Tensor" if gives else "None"
    return f"tuple[{', '.join(['Tensor'] * gives)}]" if gives <= _MOST_COUNTED else "tuple[Tensor, ...]"


def docstring(text: ClassText) -> list[str]:
    """Returns the docstring of a class, which says what it is in the original model."""
    paths = [plain(path) for path in text.paths]
    from_to = f"{paths[0]} to {paths[-1]} ({len(paths)} of them)"
    part = "" if text.whole else "This stage's part of "
    origin = f", from {text.origin}" if text.origin else ""
    line = f'    """{part}{", ".join(paths)}{origin}."""'
    if len(paths) > 3 or (len(line) > WIDTH and len(paths) > 1):
        line = f'    """{part}{from_to}{origin}."""'
    if len(line) <= WIDTH:
        return [line]
    words = line.strip().strip('"')
    width = min(WIDTH - 7, len(words) - 1)  # ruff has the quotes of a single line beside it
    wrapped = textwrap.wrap(words, width, break_long_words=False, break_on_hyphens=False)
    return [f'    """{wrapped[0]}', *(f"    {rest}" for rest in wrapped[1:]), '    """']
