"""What a method's body is made of, and which of it is written inside a longer expression."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx, nn

from .cut import is_size, operands
from .naming import is_final, operator_name
from .scopes import Line, Scope, assigned_names, line_at
from .stage_tree import StageTree, occurrences

Region = tuple[object, object]


class Body:
    """One call's operators and inner calls in program order (`items`), and what is known of each."""

    def __init__(self, tree: StageTree, scope: Scope) -> None:
        self.tree = tree
        self.scope = scope
        self.items = [item for item in scope.items if not self._is_inlined(item)]
        self.reads = tree.reads(scope)
        self.symbols = tree.symbols(scope)
        self.gives = tree.gives(scope)

    def _is_inlined(self, item: fx.Node | Scope) -> bool:
        return not isinstance(item, Scope) and is_size(self.tree.graph, item)

    def results(self, item: fx.Node | Scope) -> list[fx.Node]:
        """What an item makes that anything else reads."""
        if isinstance(item, Scope):
            return self.tree.gives(item)
        used = item in self.gives or any(item in self.operands_of(other) for other in self.items)
        return [item] if used else []

    def operands_of(self, item: fx.Node | Scope) -> list[fx.Node]:
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

    def is_recurrent(self, item: fx.Node | Scope) -> bool:
        """A whole LSTM or GRU, which gives a tuple."""
        if not isinstance(item, Scope) or not self.tree.is_layer(item):
            return False
        return isinstance(self.tree.modules[item.path], nn.LSTM | nn.GRU)

    def author_name(self, item: fx.Node | Scope, result: fx.Node) -> str | None:
        """What the author's statement calls its result, if this is it."""
        line = self.line(item)
        names = assigned_names(line.code) if line is not None else ()
        if len(names) != 1 or names[0] == "_" or not is_final(self.tree, result, self.scope.depth):
            return None
        return names[0]

    def is_element(self, item: fx.Node | Scope) -> bool:
        """An element of a tuple that an operator of this body makes: it is bound there."""
        if isinstance(item, Scope) or not _takes_element(item):
            return False
        source = item.args[0]
        return isinstance(source, fx.Node) and not _is_tensor(source) and source in self.items

    def elements(self, item: fx.Node | Scope) -> dict[int, fx.Node | None] | None:
        """For an operator that makes a tuple: its elements by place, None for those that nobody reads."""
        if isinstance(item, Scope) or _is_tensor(item):
            return None
        taken = {
            int(str(other.args[1])): other
            for other in self.items
            if not isinstance(other, Scope) and _takes_element(other) and other.args[0] is item
        }
        return {place: taken.get(place) for place in range(len(item.meta["val"]))}


def _takes_element(node: fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem"


def _is_tensor(node: fx.Node) -> bool:
    return node.op == "placeholder" or not isinstance(node.meta.get("val"), list | tuple)


class Folding:
    """Which results are written inside their only reader's expression.

    `kept` results are not; `size_readers` are arguments whose sizes are read by the items at these places.
    """

    def __init__(self, body: Body, kept: set[fx.Node], size_readers: dict[fx.Node, set[int]]) -> None:
        self.body = body
        self.items = body.items
        self.end = len(self.items)
        self.kept = kept
        self.results = [body.results(item) for item in self.items]
        self.ordered = [body.is_ordered(item) for item in self.items]
        self.maker = {result: index for index, made in enumerate(self.results) for result in made}
        self.users = self._users(size_readers)
        self.folded = self._folded()

    def is_folded(self, index: int) -> bool:
        """Whether the item at this place has no statement of its own."""
        results = self.results[index]
        return len(results) == 1 and results[0] in self.folded

    def emitted_at(self, index: int) -> int:
        """The position where an item is really written: that of the statement it is folded into."""
        while index < self.end and self.is_folded(index):
            index = self.users[self.results[index][0]][0]
        return index

    def last_use(self, node: fx.Node) -> int:
        return max((self.emitted_at(index) for index in self.users.get(node, [])), default=-1)

    def _users(self, size_readers: dict[fx.Node, set[int]]) -> dict[fx.Node, list[int]]:
        users: dict[fx.Node, list[int]] = {}
        for index, item in enumerate(self.items):
            for operand in self.body.operands_of(item):
                times = 1 if isinstance(item, Scope) else occurrences((item.args, dict(item.kwargs)), operand)
                users.setdefault(operand, []).extend([index] * max(times, 1))
        for node in self.body.gives:
            users.setdefault(node, []).append(self.end)
        for node, readers in size_readers.items():
            users.setdefault(node, []).extend(readers)
        return users

    def _folded(self) -> set[fx.Node]:
        """What is written inside its reader's expression, as long as everything is computed in its order.

        Autograd adds up gradients in the reverse order of the computations, and random numbers come in
        theirs: another order would be right, and not bit for bit the same.
        """
        folded: set[fx.Node] = set()
        for index in reversed(range(self.end)):
            results = self.results[index]
            # What links the members of a chain has lines of its own, so that equal ones roll up.
            if len(results) != 1 or results[0] in self.body.tree.links:
                continue
            if self._may_fold(index, self.items[index], results[0]):
                folded.add(results[0])
                if not self._is_in_order(folded):
                    folded.remove(results[0])
        return folded

    def _is_in_order(self, folded: set[fx.Node]) -> bool:
        evaluated = [index for index in self._evaluated(folded) if self.ordered[index]]
        return evaluated == sorted(evaluated)

    def _evaluated(self, folded: set[fx.Node]) -> Iterator[int]:
        """The items in the order in which Python evaluates the statements."""
        for index, results in enumerate(self.results):
            if len(results) != 1 or results[0] not in folded:
                yield from self._evaluated_within(index, folded)

    def _evaluated_within(self, index: int, folded: set[fx.Node]) -> Iterator[int]:
        item = self.items[index]
        inner = [node for node in self.body.operands_of(item) if node in folded]
        if not isinstance(item, Scope) and operator_name(item) == "rsub":
            inner.reverse()  # written as other - self
        for node in inner:
            yield from self._evaluated_within(self.maker[node], folded)
        yield index

    def _may_fold(self, index: int, item: fx.Node | Scope, result: fx.Node) -> bool:
        users = self.users.get(result, [])
        if len(users) != 1 or result in self.kept or self.body.author_name(item, result):
            return False
        if self.body.elements(item) is not None:
            return False
        if self.body.is_element(item) or self.body.is_recurrent(item):
            return False
        reader = users[0]
        if reader == self.end:
            return len(self.body.gives) == 1 and index == self.end - 1
        if isinstance(item, Scope) and item.function is not None:
            return False
        return self.body.region(item) == self.body.region(self.items[reader])
