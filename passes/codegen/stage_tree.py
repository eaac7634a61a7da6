"""A stage's module tree, with what each call reads and returns.

It also says which parameters live where, and which calls are layers that are printed as themselves.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any, TypeVar

from torch import fx, nn

from pd2bw_fx.custom_function import custom_function
from pd2bw_fx.errors import TraceError
from pd2bw_fx.graph import RETURNED_AT, OperatorGraph, ParameterSpec
from pd2bw_fx.modes import passes_through_in_evaluation

from .author_functions import separate_calls
from .calls import (
    copies_a_weight,
    follows_device,
    names_device,
    readers,
    returning,
    unlike_calls,
    whole_calls,
)
from .cut import (
    Cut,
    divisors,
    is_number,
    is_size,
    multiple_of_size,
    size_symbol,
    spec_of,
    tensors_read,
    times_size,
)
from .layer_calls import takes_and_gives_what_the_layer_does
from .layers import has_other_numbers, is_idle, is_in_evaluation, is_layer, is_sequential
from .normed_layers import calls_what_the_layer_calls, changes_its_norm
from .numbers import numbers
from .scopes import Scope, above, lift, module_calls, rename, walk
from .unread_results import LAYERS_OF_TORCH, returned_unread

# Among the sizes that a call is given, it stands for the device on which tensors are made out of nothing.
DEVICE = "device"
_T = TypeVar("_T")


class StageTree:
    """The calls of one stage, and answers about them.

    Nothing here changes once the tree is built, except for the names given to what calls return and to helper
    functions, which are added as these are written.
    """

    def __init__(self, graph: OperatorGraph, stage: Cut) -> None:
        assert graph.root is not None, "a graph read from a file cannot be generated from"
        self._answers: dict[tuple[str, int], list[Any]] | None = None  # kept once nothing changes any more
        self.graph = graph
        self.stage = stage
        self.model: nn.Module = graph.root
        self.numbers = numbers(graph)  # constants that are written where they are read, by name
        self.port_names: dict[str, str] = {}  # value that crosses -> its name in all stages
        self.names_given: dict[int, dict[fx.Node, str]] = {}  # by id of a call: its names for its results
        self.helper_names: dict[int, str] = {}  # by id of a call: its helper function's name
        self.modules: dict[str, nn.Module] = dict(graph.root.named_modules(remove_duplicate=False))
        nodes = [node for node in stage.nodes if not is_size(graph, node)]
        functions = (custom_function(node.target) for node in nodes)
        self.functions = list(dict.fromkeys(f for f in functions if f is not None))  # as first called
        self.root = lift(graph, nodes)
        separate_calls(graph, self.root)
        for scope in walk(self.root):  # an exported program has no modules where there are no tensors
            self.modules.setdefault(scope.path, nn.Module())
        self._whole_calls = whole_calls(graph)
        self._returning = returning(graph)
        self._readers = readers(graph, stage)
        self._rehome(self.root)
        self.returned_unread: dict[fx.Node, int] = {}
        self.returned_unread = returned_unread(self)
        self._unlike_calls = unlike_calls(self)
        self.chains: set[int] = set()  # calls of an nn.Sequential that is printed as one
        self.sequences: set[int] = set()  # calls of an instance of a subclass, which has a class of its own
        self._links: dict[int, set[fx.Node]] = defaultdict(set)  # by id of the call that they are in
        self.layers: set[int] = set()
        self._take_apart(self.root)
        self.layers = self._layers()
        self.owned: dict[str, set[str]] = defaultdict(set)  # class path -> local parameter names
        self._place_parameters()
        self._answers = {}

    @property
    def function_names(self) -> set[str]:
        """The names of custom autograd functions, whose classes stand before all others."""
        return {function.name for function in self.functions}

    def is_layer(self, scope: Scope) -> bool:
        return id(scope) in self.layers

    def is_chain(self, scope: Scope) -> bool:
        return id(scope) in self.chains

    def is_sequence(self, scope: Scope) -> bool:
        """Whether nn.Sequential's own forward is what runs the members of the called module."""
        return id(scope) in self.chains or id(scope) in self.sequences

    def are_sequences(self, calls: Sequence[Scope]) -> bool:
        """Whether a module holds nothing itself, and its calls are only those of its members in turn."""
        return not self.owned[calls[0].path] and all(id(scope) in self.sequences for scope in calls)

    def is_link(self, scope: Scope, node: fx.Node) -> bool:
        """Whether a member of a taken-apart nn.Sequential hands this value of a call on to the next one."""
        return node in self._links[id(scope)]

    def _layers(self) -> set[int]:
        """Collects the calls of modules all of whose calls can be printed as a layer's."""
        calls = [scope for scope in walk(self.root) if scope.function is None]
        others = {scope.path for scope in calls if not self._is_layer(scope)}
        layers = [scope for scope in calls if scope.path not in others]
        inside = {id(inner) for scope in layers for inner in walk(scope)}
        reached = {path for scope in calls if id(scope) not in inside for path in above(scope.path)}
        layers = [scope for scope in layers if scope.path not in reached]
        for scope in layers:
            scope.items = [*scope.nodes]  # the calls inside it are the layer's own affair
        return {id(scope) for scope in layers}

    def is_whole(self, scope: Scope) -> bool:
        """Whether all operators of a call are in this stage."""
        own = {n.name for n in scope.nodes if not self.graph.operators[n.name].is_replicable}
        whole = self._whole_calls[scope.key] if scope.path else set(self.graph.operators)
        return whole == own

    def passes_through_in_evaluation(self, scope: Scope) -> bool:
        """Whether a call returns its one input in evaluation, and all of it is in this stage."""
        module = self.modules.get(scope.path)
        return (
            bool(scope.path)
            and scope.function is None
            and module is not None
            and passes_through_in_evaluation(module)
            and len(self.reads(scope)) == len(self.gives(scope)) == 1
            and self.is_whole(scope)
        )

    def _kept(self, kind: str, scope: Scope, answer: Callable[[Scope], list[_T]]) -> list[_T]:
        """Returns an answer about a call, which is worked out once after the tree is built."""
        if self._answers is None:
            return answer(scope)
        key = kind, id(scope)
        if key not in self._answers:
            self._answers[key] = answer(scope)
        return list(self._answers[key])

    def reads(self, scope: Scope) -> list[fx.Node]:
        """Lists the values that a call needs from outside, without its own parameters and sizes.

        They stand in the order in which the author passes them, and values that the call has from elsewhere
        come last. A stage's own inputs stand in the order in which they are read, with the model's inputs in
        the model's order.
        """
        return self._kept("reads", scope, self._reads)

    def _reads(self, scope: Scope) -> list[fx.Node]:
        inside = set(scope.nodes)
        found: dict[fx.Node, None] = {}
        for node in scope.nodes:
            for value in tensors_read(self.graph, node):
                if value not in inside and not self._is_own(scope, value):
                    found.setdefault(value)
        if scope is self.root:
            found |= dict.fromkeys(self.stage.inputs)  # some for their sizes alone, or to be handed on
            place = {name: number for number, name in enumerate(self.graph.inputs)}
            given = iter(sorted((v for v in found if v.name in place), key=lambda v: place[v.name]))
            return [next(given) if value.name in place else value for value in found]
        return sorted(found, key=lambda node: scope.argument(node).place)

    def gives(self, scope: Scope) -> list[fx.Node]:
        """Lists the values of a call that are read outside it, in the order in which the author returns them.

        Values that would be read there in other calls of its kind are included (see unread_results.py).
        """
        return self._kept("gives", scope, self._gives)

    def _gives(self, scope: Scope) -> list[fx.Node]:
        inside = set(scope.nodes)
        returned = set(self.stage.outputs)
        made = [
            node
            for node in scope.nodes
            if node in returned
            or any(reader not in inside for reader in self._readers[node])
            or self.returned_unread.get(node, scope.depth + 1) <= scope.depth
        ]
        if scope is self.root:
            return [n for n in self.stage.outputs if n not in inside] + made
        return sorted(made, key=lambda node: scope.result(node).place)

    def symbols(self, scope: Scope) -> list[str]:
        """Lists the sizes that a call uses and can read off none of its arguments.

        DEVICE is among them if it needs a device and has no argument to take it from.
        """
        return self._kept("symbols", scope, self._symbols)

    def _symbols(self, scope: Scope) -> list[str]:
        if self.is_layer(scope):
            return []
        needed: dict[str, None] = {}
        reads = self.reads(scope)
        at_hand = {size for value in reads for size in self.shape(value)}
        for item in scope.items:
            if isinstance(item, Scope):
                needed |= dict.fromkeys(self.symbols(item))
            else:
                needed |= dict.fromkeys(self._symbols_of(item, at_hand))
                needed |= {DEVICE: None} if names_device(item) else {}
            read = self.reads(item) if isinstance(item, Scope) else tensors_read(self.graph, item)
            needed |= {DEVICE: None} if any(self.makes(scope, operand) for operand in read) else {}
            needed |= {DEVICE: None} if follows_device(item) else {}
        at_hand |= {DEVICE} if scope is self.root or not all(map(is_number, reads)) else set()
        multiples = {size for size in needed if (product := times_size(size)) and product[1] in at_hand}
        return [symbol for symbol in needed if symbol not in at_hand | multiples]

    def shape(self, node: fx.Node) -> tuple[int | str, ...]:
        spec = spec_of(self.graph, node)
        return () if spec is None or spec.shape is None else spec.shape

    def leaves_otherwise(self, node: fx.Node, key: str) -> bool:
        """Whether a hook takes this value out of the call of this key, which returns other values."""
        is_used_outside = any(all(key != inside for inside, *_ in module_calls(u)) for u in node.users)
        return is_used_outside and self.returns_others(node, key)

    def returns_others(self, node: fx.Node, key: str) -> bool:
        """Whether the call of this key, in which a value is made, returns other values."""
        return key in self._returning and key not in node.meta.get(RETURNED_AT, {})

    def parameter(self, scope: Scope, node: fx.Node) -> str | None:
        """Returns the name under which a parameter is within reach of a call, or None."""
        if scope.function is not None:
            return None
        return _name_under(scope.path, self._spec(node))

    def _spec(self, node: fx.Node) -> ParameterSpec:
        name = str(node.target)
        spec = self.graph.parameters.get(name) or self.graph.buffers.get(name)
        if spec is None:
            raise TraceError(f"the traced program reads {name!r}, which is no parameter, buffer or constant")
        return spec

    def makes(self, scope: Scope, node: fx.Node) -> bool:
        """Whether a call makes a constant from its number itself, as the author does not pass the constant.

        A layer of torch is given the constant.
        """
        if node.op != "get_attr" or str(node.target) not in self.numbers:
            return False
        is_layer = scope.kind.startswith(LAYERS_OF_TORCH) and not isinstance(
            self.modules.get(scope.path), nn.Sequential
        )
        return not is_layer and scope.argument(node).place == math.inf

    def _is_own(self, scope: Scope, node: fx.Node) -> bool:
        if node.op != "get_attr":
            return False
        return self.makes(scope, node) or self.parameter(scope, node) is not None

    def _symbols_of(self, node: fx.Node, at_hand: Set[int | str]) -> Iterator[str]:
        for operand in node.all_input_nodes:
            if is_size(self.graph, operand):
                symbol = size_symbol(self.graph, operand)
                multiple = multiple_of_size(self.graph, operand)
                if isinstance(symbol, str):
                    yield symbol
                elif symbol is None and (multiple is None or not divisors(*multiple, at_hand)):
                    yield from self._symbols_of(operand, at_hand)

    def _rehome(self, scope: Scope) -> None:
        """Moves calls of modules that the caller does not hold under their first name.

        They get another name under which the caller holds it, or else their items are written inline.
        """
        items: list[fx.Node | Scope] = []
        todo = deque(scope.items)
        for item in todo:
            if isinstance(item, Scope):
                self._rehome(item)
        while todo:
            item = todo.popleft()
            if isinstance(item, Scope):
                is_inside = item.path.startswith(scope.path + "." if scope.path else "")
                if not is_inside and item.function is None:
                    other = self._other_name(scope.path, item.path)
                    if other is None:
                        todo.extendleft(reversed(item.items))  # what it calls may be out of reach, too
                        continue
                    rename(item, other)
            items.append(item)
        scope.items = items

    def _take_apart(self, scope: Scope) -> None:
        """Keeps a whole nn.Sequential as one; of a part of one, the caller calls the members."""
        items: list[fx.Node | Scope] = []
        for item in scope.items:
            if isinstance(item, Scope):
                self._take_apart(item)
                module = self.modules.get(item.path)
                if isinstance(module, nn.Sequential) and item.function is None:
                    is_own = type(module) is not nn.Sequential
                    if self._is_chain(item):
                        (self.sequences if is_own else self.chains).add(id(item))
                    elif not is_own:
                        self._links[id(scope)] |= {n for i in item.items for n in _given_by(self, i)}
                        items += item.items
                        continue
            items.append(item)
        if scope.function is None and is_sequential(self.modules[scope.path]):
            self._links[id(scope)] |= {n for i in items if isinstance(i, Scope) for n in _given_by(self, i)}
        scope.items = items

    def _is_chain(self, scope: Scope) -> bool:
        """Whether a call runs the members of an nn.Sequential in turn, each on what the last one returned.

        Each is called once, and nothing else reads the values between them (a hook might, or a derivative in
        the forward). Only identities may be missing.

        A chain runs each member's `forward`, its first method. A member whose calls do different things has
        other methods too, and such a member rules out a chain.
        """
        module = self.modules[scope.path]
        if not is_sequential(module):
            return False
        called = [item.path for item in scope.items if isinstance(item, Scope)]
        idle = [f"{scope.path}.{n}" for n, m in module.named_children() if is_idle(m)]
        members = [f"{scope.path}.{n}" for n, _ in module.named_children()]
        if [path for path in members if path not in idle or path in called] != called:
            return False
        if len(called) != len(scope.items) or not self.is_whole(scope):
            return False
        handed: list[fx.Node] = self.reads(scope)
        for item in scope.items:
            assert isinstance(item, Scope)
            if self.reads(item) != handed or len(handed) != 1 or self.symbols(item):
                return False
            if item.path in self._unlike_calls:
                return False
            handed = self.gives(item)
        return len(handed) == 1 and self.gives(scope) == handed

    def _other_name(self, holder: str, path: str) -> str | None:
        wanted = self.modules[path]
        return next((n for n, m in self.modules.items() if m is wanted and n.startswith(holder + ".")), None)

    def _is_layer(self, scope: Scope) -> bool:
        module = self.modules.get(scope.path)
        if module is None or scope.function is not None or not scope.path:
            return False
        if not is_layer(module, training=self.model.training):
            return False
        if any(module is changing for changing in self.graph.changing):
            return False  # the attributes that it was called with are gone
        if not calls_what_the_layer_calls(scope, module):
            return False
        if any(map(copies_a_weight, scope.nodes)) and not changes_its_norm(module):
            return False
        if module.training and any(map(is_in_evaluation, scope.nodes)):
            return False  # the forward has put it in that mode for this call
        if any(has_other_numbers(module, node) for node in scope.nodes):
            return False
        whole = self._whole_calls[scope.key]
        own = {n.name for n in scope.nodes if not self.graph.operators[n.name].is_replicable}
        return whole == own and takes_and_gives_what_the_layer_does(self, scope, module)

    def _place_parameters(self) -> None:
        scopes = [s for s in walk(self.root) if s.function is None and not self.is_chain(s)]
        classes = {s.path for s in scopes if not self.is_layer(s)}
        inside_layers = {s.path for s in walk(self.root) if self.is_layer(s)}
        for scope in walk(self.root):
            if self.is_layer(scope):
                continue
            for item in scope.items:
                read = self.reads(item) if isinstance(item, Scope) else tensors_read(self.graph, item)
                for operand in read:
                    if operand.op == "get_attr" and str(operand.target) not in self.numbers:
                        name = self.parameter(scope, operand) or self._spec(operand).name
                        self._own(name, classes, inside_layers)
        for name in self.stage.unread:
            self._own(name, classes, inside_layers)

    def _own(self, name: str, classes: set[str], layers: set[str]) -> None:
        if any(name.startswith(path + ".") for path in layers):
            return
        owner = max((p for p in classes if not p or name.startswith(p + ".")), key=len)
        self.owned[owner].add(name)


def _given_by(tree: StageTree, item: fx.Node | Scope) -> list[fx.Node]:
    return tree.gives(item) if isinstance(item, Scope) else [item]


def _name_under(path: str, spec: ParameterSpec) -> str | None:
    prefix = path + "." if path else ""
    names: Sequence[str] = (spec.name, *spec.tied_names)
    return next((name for name in names if name.startswith(prefix)), None)
