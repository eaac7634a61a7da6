"""One method: the statements of a module's forward, named as the author named them where that is known."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx, nn

from .cut import is_size, operands, size_symbol
from .literals import identifier, plain
from .scopes import Line, Scope, assigned_names, is_outermost, line_at, module_calls
from .spell import Scene, Source, spell
from .stage_tree import StageTree, occurrences

_LONGEST_FOLDED = 88  # characters of a line that still reads well with its parts folded in

# What a value is called that its author gave no name.
_RESULT_NAMES = {
    "add": "total", "sub": "difference", "mul": "product", "div": "ratio", "matmul": "product",
    "addmm": "projected", "linear": "projected", "layer_norm": "normed", "batch_norm": "normed",
    "dropout": "dropped", "view": "viewed", "reshape": "viewed", "transpose": "turned", "permute": "turned",
    "embedding": "embedded", "scaled_dot_product_attention": "attended", "cross_entropy_loss": "loss",
    "to": "cast", "mean": "mean", "cat": "joined", "unsqueeze": "widened", "expand": "expanded",
    "slice": "part", "select": "part", "index": "picked", "split": "parts", "chunk": "parts",
}  # fmt: skip

Region = tuple[object, object]


@dataclass(frozen=True, slots=True)
class Statement:
    """A line of a body: `text` holds module references still in their written-out form (see `reference`)."""

    text: str
    comment: str = ""
    region: Region = (None, None)


@dataclass(frozen=True, slots=True)
class Method:
    """A written forward: its arguments in call order, its body, what it returns."""

    arguments: tuple[str, ...]
    annotations: tuple[str, ...]
    body: tuple[Statement, ...]


def reference(path: str) -> str:
    """A module or parameter by its path from `self`, spelled once the attribute tree is known."""
    return f"\ue000{path}\ue001"


class MethodWriter:
    """Writes one call's body. `call_text` spells an inner call given its argument texts."""

    def __init__(
        self, tree: StageTree, scope: Scope, call_text: Callable[[Scope, Scope, list[str]], str]
    ) -> None:
        self.tree = tree
        self.scope = scope
        self.call_text = call_text
        self.items = [item for item in scope.items if not self._is_inlined(item)]
        self.reads = tree.reads(scope)
        self.symbols = tree.symbols(scope)
        self.gives = tree.gives(scope)
        self.kept: set[fx.Node] = set()  # results that a longer line may not take in
        self.size_readers: dict[fx.Node, set[int]] = {}  # arguments kept for their sizes: where these are read

    def write(self) -> Method:
        """Fold as much as reads well: write, and unfold what made a line too long, until none is."""
        while True:
            draft = _Draft(self)
            method = draft.write()
            if not draft.too_long and not draft.lost_sizes:
                return method
            for node, index in draft.lost_sizes:
                self.size_readers.setdefault(node, set()).add(index)
            self.kept |= draft.too_long

    def _is_inlined(self, item: fx.Node | Scope) -> bool:
        return not isinstance(item, Scope) and is_size(self.tree.graph, item)

    def results(self, item: fx.Node | Scope) -> list[fx.Node]:
        """What an item makes that anything else reads."""
        if isinstance(item, Scope):
            return self.tree.gives(item)
        used = item in self.gives or any(item in self.item_operands(other) for other in self.items)
        return [item] if used else []

    def item_operands(self, item: fx.Node | Scope) -> list[fx.Node]:
        if isinstance(item, Scope):
            return self.tree.reads(item)
        return [o for o in operands(self.tree.graph, item) if not is_size(self.tree.graph, o)]

    def line(self, item: fx.Node | Scope) -> Line | None:
        node = next(item.nodes) if isinstance(item, Scope) else item
        return line_at(node, self.scope.depth)

    def region(self, item: fx.Node | Scope) -> Region:
        if isinstance(item, Scope):
            if not self.tree.is_layer(item) and item.function is None:
                return (None, None)
            item = next(item.nodes)
        return (item.meta.get("no_grad"), item.meta.get("autocast"))

    def is_ordered(self, item: fx.Node | Scope) -> bool:
        """Whether it matters when it is computed: for its gradient, its random numbers, what it writes."""
        nodes = list(item.nodes) if isinstance(item, Scope) else [item]
        found = (self.tree.graph.operators[node.name] for node in nodes)
        return any(
            o.requires_grad or o.is_random or o.writes_buffers or o.memory_group is not None for o in found
        )


class _Draft:
    """One attempt at a body, with a fixed set of results that stay on lines of their own."""

    def __init__(self, writer: MethodWriter) -> None:
        self.writer = writer
        self.items = writer.items
        self.end = len(self.items)
        self.maker = {r: i for i, item in enumerate(self.items) for r in writer.results(item)}
        self.users = self._users()
        self.folded = self._folded()
        self.bound: dict[fx.Node, str] = {}
        self.sources: dict[fx.Node, Source] = {}
        self.too_long: set[fx.Node] = set()
        self.lost_sizes: set[tuple[fx.Node, int]] = set()
        self.position = 0  # of the item being written

    def write(self) -> Method:
        arguments = self._bind_arguments()
        body: list[Statement] = []
        for self.position, item in enumerate(self.items):
            statement = self._statement(self.position, item)
            body += [] if statement is None else [statement]
        self.position = self.end
        if self.writer.gives:
            body.append(self._return())
        annotations = ["Tensor"] * len(self.writer.reads) + ["int"] * len(self.writer.symbols)
        return Method(tuple(arguments), tuple(annotations), tuple(body))

    # Who reads what, and what is folded into its reader.

    def _users(self) -> dict[fx.Node, list[int]]:
        users: dict[fx.Node, list[int]] = {}
        for index, item in enumerate(self.items):
            for operand in self.writer.item_operands(item):
                times = 1 if isinstance(item, Scope) else occurrences((item.args, dict(item.kwargs)), operand)
                users.setdefault(operand, []).extend([index] * max(times, 1))
        for node in self.writer.gives:
            users.setdefault(node, []).append(self.end)
        for node, readers in self.writer.size_readers.items():
            users.setdefault(node, []).extend(readers)
        return users

    def _folded(self) -> set[fx.Node]:
        """What is written inside its reader's expression, as long as everything is computed in its order.

        Autograd adds up gradients in the reverse order of the computations, and random numbers come in
        theirs: another order would be right, and not bit for bit the same.
        """
        folded: set[fx.Node] = set()
        for index, item in enumerate(self.items):
            results = self.writer.results(item)
            # What links the members of a chain has lines of its own, so that equal ones roll up.
            if len(results) == 1 and results[0] not in self.writer.tree.links:
                folded |= {results[0]} if self._may_fold(index, item, results[0]) else set()
        while (delayed := self._first_delayed(folded)) is not None:
            folded.remove(delayed)
        return folded

    def _first_delayed(self, folded: set[fx.Node]) -> fx.Node | None:
        """The first result that folding lets be computed after one that it comes before."""
        latest = -1
        for index in self._evaluated(folded):
            if not self.writer.is_ordered(self.items[index]):
                continue
            if index < latest:
                return self.writer.results(self.items[index])[0]
            latest = index
        return None

    def _evaluated(self, folded: set[fx.Node]) -> Iterator[int]:
        """The items in the order in which Python evaluates the statements."""
        for index, item in enumerate(self.items):
            results = self.writer.results(item)
            if len(results) != 1 or results[0] not in folded:
                yield from self._evaluated_within(index, folded)

    def _evaluated_within(self, index: int, folded: set[fx.Node]) -> Iterator[int]:
        item = self.items[index]
        inner = [node for node in self.writer.item_operands(item) if node in folded]
        if not isinstance(item, Scope) and operator_name(item) == "rsub":
            inner.reverse()  # written as other - self
        for node in inner:
            yield from self._evaluated_within(self.maker[node], folded)
        yield index

    def _may_fold(self, index: int, item: fx.Node | Scope, result: fx.Node) -> bool:
        users = self.users.get(result, [])
        if len(users) != 1 or result in self.writer.kept or self._author_name(item, result):
            return False
        if _elements(item, self.items) is not None:
            return False
        if not isinstance(item, Scope) and _is_element(item, self.items):
            return False
        reader = users[0]
        if reader == self.end:
            return len(self.writer.gives) == 1 and index == self.end - 1
        if isinstance(item, Scope) and (item.function is not None or self._is_recurrent(item)):
            return False
        return self.writer.region(item) == self.writer.region(self.items[reader])

    def _emitted_at(self, index: int) -> int:
        """The position where a reader is really written: that of the statement it is folded into."""
        while index < self.end:
            results = self.writer.results(self.items[index])
            if len(results) != 1 or results[0] not in self.folded:
                return index
            index = self.users[results[0]][0]
        return index

    def _last_use(self, node: fx.Node) -> int:
        return max((self._emitted_at(index) for index in self.users.get(node, [])), default=-1)

    # Names.

    def _bind_arguments(self) -> list[str]:
        names: list[str] = []
        for node in self.writer.reads:
            name = self._free(argument_name(self.writer.tree, self.writer.scope, node), -1)
            self.bound[node] = name
            self.sources[node] = Source(name)
            names.append(name)
        return [*names, *(identifier(symbol) for symbol in self.writer.symbols)]

    def _author_name(self, item: fx.Node | Scope, result: fx.Node) -> str | None:
        line = self.writer.line(item)
        names = assigned_names(line.code) if line is not None else ()
        if (
            len(names) != 1
            or names[0] == "_"
            or not is_final(self.writer.tree, result, self.writer.scope.depth)
        ):
            return None
        return names[0]

    def _name(self, index: int, item: fx.Node | Scope, result: fx.Node) -> str:
        if isinstance(item, Scope) and item.function is not None:
            return self._free(item.function, index)
        if result in self.writer.tree.links:
            return self._free("hidden", index)
        wanted = self._author_name(item, result) or self._inner_name(item, result)
        if wanted is not None and not self._is_live(wanted, index):
            return wanted
        return self._free(result_name(item, result), index)

    def _inner_name(self, item: fx.Node | Scope, result: fx.Node) -> str | None:
        """For `hidden, balance = block(hidden)`: what the block itself calls them, the rest by elimination."""
        if not isinstance(item, Scope):
            return None
        results = self.writer.results(item)
        inner = {r: name_within(self.writer.tree, r, item.depth) for r in results}
        line = self.writer.line(item)
        targets = assigned_names(line.code) if line is not None else ()
        if len(targets) == len(results) and inner[result] not in targets:
            left = [name for name in targets if name not in inner.values()]
            unnamed = [r for r in results if inner[r] not in targets]
            if len(left) == 1 and unnamed == [result] and left[0] != "_":
                return left[0]
        return inner[result]

    def _is_live(self, name: str, index: int) -> bool:
        """Whether a value of this name is still read after the statement at `index`."""
        return name in self.writer.symbols or any(
            bound == name and self._last_use(node) > index for node, bound in self.bound.items()
        )

    def _free(self, name: str, index: int) -> str:
        taken = set(self.bound.values()) if index < 0 else set()
        candidate, count = name, 1
        while candidate in taken or self._is_live(candidate, index):
            count += 1
            candidate = f"{name}_{count}"
        return candidate

    # Statements.

    def _statement(self, index: int, item: fx.Node | Scope) -> Statement | None:
        if not isinstance(item, Scope) and _is_element(item, self.items):
            return None  # bound where the tuple is made
        results = self.writer.results(item)
        source = self._source(item)
        if len(results) == 1 and results[0] in self.folded:
            self.sources[results[0]] = source
            return None
        target = self._target(index, item, results)
        text = f"{target} = {source.text}" if target else source.text
        if len(text) > _LONGEST_FOLDED:
            self._unfold(item)
        return Statement(text, self._comment(item, results), self.writer.region(item))

    def _target(self, index: int, item: fx.Node | Scope, results: Sequence[fx.Node]) -> str:
        elements = _elements(item, self.items)
        if elements is not None:
            return self._tuple_target(index, item, elements)
        names: list[str] = []
        for result in results:
            name = self._name(index, item, result)
            self._bind(result, name)
            names.append(name)
        if isinstance(item, Scope) and self.writer.tree.is_layer(item):
            names = self._recurrent_target(item, results, names)
        return ", ".join(names)

    def _recurrent_target(self, item: Scope, results: Sequence[fx.Node], names: list[str]) -> list[str]:
        """An LSTM gives (output, (hidden, cell)), a GRU (output, hidden)."""
        if not self._is_recurrent(item):
            return names
        place = {int(str(r.args[1])): name for r, name in zip(results, names, strict=True)}
        if isinstance(self.writer.tree.modules[item.path], nn.GRU):
            return [place.get(0, "_"), place.get(1, "_")]
        state = f"({place.get(1, '_')}, {place.get(2, '_')})" if {1, 2} & place.keys() else "_"
        return [place.get(0, "_"), state]

    def _is_recurrent(self, item: Scope) -> bool:
        layer = self.writer.tree.is_layer(item)
        return layer and isinstance(self.writer.tree.modules[item.path], nn.LSTM | nn.GRU)

    def _tuple_target(self, index: int, item: fx.Node | Scope, elements: dict[int, fx.Node | None]) -> str:
        line = self.writer.line(item)
        wanted = assigned_names(line.code) if line is not None else ()
        names: list[str] = []
        for place, element in elements.items():
            if element is None:
                names.append("_")
                continue
            hint = wanted[place] if place < len(wanted) == len(elements) and wanted[place] != "_" else ""
            own = f"part_{place + 1}"
            name = hint if hint and not self._is_live(hint, index) and hint not in names else own
            self._bind(element, name if name == hint else self._free(name, index))
            names.append(self.bound[element])
        return ", ".join(names) + ("," if len(names) == 1 else "")

    def _bind(self, node: fx.Node, name: str) -> None:
        self.bound[node] = name
        self.sources[node] = Source(name)

    def _source(self, item: fx.Node | Scope) -> Source:
        if isinstance(item, Scope):
            texts = [self._expression(node).text for node in self.writer.tree.reads(item)]
            texts += [self._size(symbol).text for symbol in self.writer.tree.symbols(item)]
            return Source(self.writer.call_text(self.writer.scope, item, texts))
        return spell(item, Scene(self._expression, self._device))

    def _expression(self, node: fx.Node) -> Source:
        if node in self.sources:
            return self.sources[node]
        if is_size(self.writer.tree.graph, node):
            symbol = size_symbol(self.writer.tree.graph, node)
            if symbol is None:
                return spell(node, Scene(self._expression, self._device))
            return self._size(symbol)
        path = self.writer.tree.parameter(self.writer.scope, node) if node.op == "get_attr" else None
        assert path is not None, f"{node.name} is not within reach of {self.writer.scope.path!r}"
        return Source(reference(_below(self.writer.scope.path, path)))

    def _size(self, symbol: int | str) -> Source:
        if isinstance(symbol, int):
            return Source(str(symbol))
        if symbol in self.writer.symbols:
            return Source(identifier(symbol))
        bearers = [node for node in self.bound if symbol in self.writer.tree.shape(node)]
        emitted = self._emitted_at(self.position)
        standing = [node for node in bearers if self._last_use(node) >= emitted]
        if not standing:  # its name may be another's by then: write again, and keep it
            standing = [node for node in bearers if node in self.writer.reads]
            assert standing, f"no tensor of {self.writer.scope.path!r} has the size {symbol}"
            self.lost_sizes.add((standing[0], self.position))
        shape = self.writer.tree.shape(standing[0])
        return Source(f"{self.bound[standing[0]]}.shape[{shape.index(symbol)}]")

    def _device(self) -> str:
        if self.writer.reads:
            return f"{self.bound[self.writer.reads[0]]}.device"
        return "None"

    def _unfold(self, item: fx.Node | Scope) -> None:
        """The longest of what is folded into this line gets a line of its own."""
        inside = [node for node in self.writer.item_operands(item) if node in self.folded]
        if inside:
            self.too_long.add(max(inside, key=lambda node: len(self.sources[node].text)))

    def _return(self) -> Statement:
        texts = [self._expression(node).text for node in self.writer.gives]
        statement = Statement(f"return {', '.join(texts)}")
        if len(statement.text) > _LONGEST_FOLDED:
            self.too_long |= {node for node in self.writer.gives if node in self.folded}
        last = self.items[-1] if self.items else None
        if last is not None and len(self.writer.gives) == 1 and self.writer.gives[0] in self.folded:
            comment = self._comment(last, self.writer.gives)
            return replace(statement, comment=comment, region=self.writer.region(last))
        return statement

    def _comment(self, item: fx.Node | Scope, results: Sequence[fx.Node]) -> str:
        """The author's line, and the shape where it is another than the operand's."""
        line = self.writer.line(item)
        parts = [plain(str(line))] if line is not None else []
        if len(results) == 1 and (shape := self.writer.tree.shape(results[0])):
            before = [self.writer.tree.shape(node) for node in self._unfolded_operands(item)]
            if not before or before[0] != shape:
                parts.append(f"({', '.join(str(size) for size in shape)})")
        return " ".join(parts)

    def _unfolded_operands(self, item: fx.Node | Scope) -> list[fx.Node]:
        found: list[fx.Node] = []
        for node in self.writer.item_operands(item):
            if node in self.folded:
                found += self._unfolded_operands(self.items[self.maker[node]])
            elif node.op != "get_attr":
                found.append(node)
        return found


def _below(scope: str, path: str) -> str:
    return path[len(scope) + 1 :] if scope else path


def _is_element(node: fx.Node, items: Sequence[fx.Node | Scope]) -> bool:
    """An element of a tuple that an operator of the same body makes: it is bound there."""
    if node.op != "call_function" or getattr(node.target, "__name__", "") != "getitem":
        return False
    source = node.args[0]
    return isinstance(source, fx.Node) and not _is_tensor(source) and source in items


def _is_tensor(node: fx.Node) -> bool:
    return node.op == "placeholder" or not isinstance(node.meta.get("val"), list | tuple)


def _elements(item: fx.Node | Scope, items: Sequence[fx.Node | Scope]) -> dict[int, fx.Node | None] | None:
    """For an operator that makes a tuple: its elements by place, None for those that nobody reads."""
    if isinstance(item, Scope) or _is_tensor(item):
        return None
    taken = {
        int(str(other.args[1])): other
        for other in items
        if not isinstance(other, Scope)
        and other.op == "call_function"
        and other.args[:1] == (item,)
        and getattr(other.target, "__name__", "") == "getitem"
    }
    return {place: taken.get(place) for place in range(len(item.meta["val"]))}


def is_final(tree: StageTree, node: fx.Node, depth: int) -> bool:
    """Whether a value is what its author's statement is for, not an inner part of it.

    In a loop the next round reads it on the same line; then it is the statement's own if the statement
    reads what it assigns and the value is of its outermost operation.
    """
    line, calls = line_at(node, depth), module_calls(node)[:depth]
    beside = [u for u in node.users if line_at(u, depth) == line and module_calls(u)[:depth] == calls]
    if not beside or line is None:
        return True
    return is_outermost(line.code, operator_name(node), is_call=len(module_calls(node)) > depth)


def name_within(tree: StageTree, node: fx.Node, depth: int) -> str | None:
    """The author's name for a value in the outermost body at this depth or below that has one."""
    for inner in range(depth, len(module_calls(node)) + 1):
        line = line_at(node, inner)
        names = assigned_names(line.code) if line is not None else ()
        if len(names) == 1 and names[0] != "_" and is_final(tree, node, inner):
            return names[0]
    return None


def argument_name(tree: StageTree, scope: Scope, node: fx.Node) -> str:
    """What a body calls a value that it is given."""
    if node.op == "placeholder" and not scope.path:
        return identifier(node.name)
    inside = any((key, path) == (scope.key, scope.path) for key, path, _ in module_calls(node))
    if not inside and scope.path and scope.function is None and len(tree.reads(scope)) == 1:
        first = next(iter(inspect.signature(tree.modules[scope.path].forward).parameters.values()), None)
        if first is not None and first.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
            return identifier(first.name)
    if node.op == "placeholder":
        return identifier(node.name)
    depth = scope.depth if inside or scope.function is not None else max(scope.depth - 1, 0)
    line = line_at(node, depth)
    names = assigned_names(line.code) if line is not None else ()
    own = name_within(tree, node, depth)
    if own is not None:
        return own
    if len(names) > 1 and getattr(node.target, "__name__", "") == "getitem":
        place: Any = node.args[1]
        if isinstance(place, int) and place < len(names) and names[place] != "_":
            return names[place]
    return result_name(node, node)


def result_name(item: fx.Node | Scope, result: fx.Node) -> str:
    if isinstance(item, Scope):
        last = item.path.rpartition(".")[2]
        return identifier(last if not last.isdigit() else item.type_name.lower())
    if result.op == "get_attr":
        return identifier(str(result.target).rpartition(".")[2])
    name = operator_name(result)
    return identifier(_RESULT_NAMES.get(name, name))


def operator_name(node: fx.Node) -> str:
    return getattr(node.target, "__name__", str(node.target)).split(".")[0]
