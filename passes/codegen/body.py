"""The items of a method's body, and what is known of each."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from pd2bw_fx.program import autocast_of

from .argument_names import given_to
from .cut import is_size, tensors_read
from .idioms import normalizations
from .layer_calls import attention_of, call_arguments
from .layers import LAYERS_GIVING_TUPLES
from .naming import (
    is_final,
    is_one_of_several,
    left_otherwise,
    name_of_filled,
    operator_name,
    outer_name,
)
from .number_lists import number_lists, sums_of
from .part_writes import PartWrite, part_writes
from .passed_values import passed_names
from .scopes import Line, Scope, line_at
from .stage_tree import StageTree
from .statements import (
    makes_one_by_one,
    names_of_what_it_makes,
)

_ROUNDS = 3  # an item repeated this often on one line belongs to a loop
# no_grad, autocast, and a number that tells adjacent autocast regions with equal settings apart.
Region = tuple[object, Any, int]
NO_REGION: Region = (None, None, 0)
Marks = tuple[object, Any, str]  # an operator's no_grad, autocast and autocast region's name
NO_MARKS: Marks = (None, None, "")


class Body:
    """One call's operators and inner calls in program order (`items`), and what is known of each."""

    def __init__(self, tree: StageTree, scope: Scope) -> None:
        self.tree = tree
        self.scope = scope
        self.reads = given_to(tree, scope)
        self.symbols = tree.symbols(scope)
        self.gives = tree.gives(scope)
        self.normalized: dict[fx.Node, list[fx.Node]] = {}  # last operator -> all of them
        self._part_writes: dict[fx.Node, PartWrite] = {}  # by its last operator
        self.number_lists: dict[fx.Node, list[fx.Node]] = {}  # the operator that makes a list -> its numbers
        self.sums: dict[fx.Node, list[fx.Node]] = {}  # the last addition of a whole list -> all of them
        self._depth_of_calls = 0 if scope.call is None else len(scope.call.line.chain)
        self._author_names: dict[tuple[int, fx.Node], str | None] = {}
        self._passed: dict[fx.Node, str] | None = None  # once it is asked
        self.items = self._items()
        self._listed = {number: made for made, numbers in self.number_lists.items() for number in numbers}
        self._operands = {id(item): self._read_by(item) for item in self.items}
        self._read = {operand for operands in self._operands.values() for operand in operands}
        self._elements = self._elements_taken()
        self._together = self._assigned_together()
        self._regions = dict(zip(map(id, self.items), self._told_apart(), strict=True))
        self._times = Counter(map(self._in_source, self.items))

    def _items(self) -> list[fx.Node | Scope]:
        """Lists the items of the body.

        Sizes are left out, as they are written where they are used. F.normalize is one item, and so are an
        assignment to a part of a tensor, and a list of numbers or its sum.
        """
        items = [i for i in self.scope.items if isinstance(i, Scope) or not is_size(self.tree.graph, i)]
        for nodes in normalizations(items):
            is_of_one_region = all(self._marks(node) == self._marks(nodes[-1]) for node in nodes)
            if is_of_one_region and not set(self.gives) & set(nodes[:-1]):
                self.normalized[nodes[-1]] = nodes
        for last, write in part_writes(items).items():
            if len({self._marks(node) for node in (write.base, *write.nodes)}) == 1:
                self._part_writes[last] = write
        for made, numbers in number_lists(items).items():
            if len({self._marks(node) for node in (made, *numbers)}) == 1:
                self.number_lists[made] = numbers
        self.sums = sums_of(self.number_lists, items)
        together = (
            *self.normalized.values(),
            *(write.nodes for write in self._part_writes.values()),
            *self.sums.values(),
        )
        inner = {node for nodes in together for node in nodes[:-1]}
        inner |= {part for made in self.number_lists for part in made.users}
        return [item for item in items if isinstance(item, Scope) or item not in inner]

    def part_write(self, item: fx.Node | Scope) -> PartWrite | None:
        """Returns the assignment to a part of a tensor that an item is, or None."""
        return self._part_writes.get(item) if isinstance(item, fx.Node) else None

    def results(self, item: fx.Node | Scope) -> list[fx.Node]:
        """Returns the values that an item makes and that something else reads."""
        if isinstance(item, Scope):
            return self.tree.gives(item)
        return [item] if item in self._read or item in self.gives else []

    def operands_of(self, item: fx.Node | Scope) -> list[fx.Node]:
        return self._operands[id(item)]

    def summands(self, total: fx.Node) -> list[fx.Node]:
        """Returns the numbers that one of `sums` adds up."""
        first = self.sums[total][0].args[0]
        return next(numbers for numbers in self.number_lists.values() if first in numbers)

    def arguments_of(self, call: Scope) -> list[fx.Node | tuple[fx.Node, ...]]:
        """Lists what a call is given, in order; both states of an LSTM are one argument."""
        return call_arguments(self.tree, call) if call.call is None else [*given_to(self.tree, call)]

    def _read_by(self, item: fx.Node | Scope) -> list[fx.Node]:
        if isinstance(item, Scope):
            return given_to(self.tree, item)
        if (write := self.part_write(item)) is not None:
            return [write.base, *([write.value] if isinstance(write.value, fx.Node) else [])]
        if item in self.sums:
            return self.summands(item)
        if item in self._listed:
            return [self._listed[item]]
        nodes = self.normalized.get(item, [item])
        return tensors_read(self.tree.graph, nodes[0])

    def line(self, item: fx.Node | Scope) -> Line | None:
        if isinstance(item, Scope) and item.call is None:
            line = line_at(next(item.nodes), self.scope.depth)
            return line if line is None or item.function is None else line.of_the_forward
        line = line_at(item, self.scope.depth) if isinstance(item, fx.Node) else _line_of_call(item)
        if line is None or not self._depth_of_calls:
            return line
        return replace(line, outer=line.outer[self._depth_of_calls :])

    def is_of_rounds(self, item: fx.Node | Scope) -> bool:
        """Whether the author's line makes such an item again and again, as the rounds of a loop do."""
        return self._times[self._in_source(item)] >= _ROUNDS

    def is_of_members(self, item: fx.Node | Scope) -> bool:
        """Whether the author's line calls this often what stands beside the called module in a list."""
        if not isinstance(item, Scope):
            return False
        line, holder = self.line(item), item.path.rpartition(".")[0]
        called = {each.path for each in self.items if isinstance(each, Scope) and self.line(each) == line}
        return sum(path.rpartition(".")[0] == holder for path in called) >= _ROUNDS

    def _in_source(self, item: fx.Node | Scope) -> tuple[Line | None, str]:
        return self.line(item), item.path if isinstance(item, Scope) else operator_name(item)

    def region(self, item: fx.Node | Scope) -> Region:
        return self._regions[id(item)]

    def _told_apart(self) -> list[Region]:
        """Returns the region of each item.

        Within an autocast region a weight is cast once, and the gradients of its uses are added up in the
        lower precision. So two adjacent regions that share a weight are entered one after the other, and
        calls that share a weight are put into the region that the author put around them. Without a shared
        weight the results are the same either way. Then adjacent regions are merged and a call enters its
        region inside, which reads better.
        """
        found: list[Region] = []
        cast: dict[str, set[str]] = {}  # author's region -> weights read since it began
        for item in self.items:
            no_grad, autocast, around = self._marks(item)
            before = found[-1] if found else NO_REGION
            number = before[2]
            if before[:2] != (no_grad, autocast) or autocast is None:
                number, cast = 0, {}
            read = self._weights(item) if autocast is not None else set()
            if any(name != around and not read.isdisjoint(names) for name, names in cast.items()):
                number, cast = number + 1, {}
            cast.setdefault(around, set()).update(read)
            found.append((no_grad, autocast, number))
        return found

    def _marks(self, item: fx.Node | Scope) -> Marks:
        if not isinstance(item, Scope):
            return item.meta.get("no_grad"), autocast_of(item), item.meta.get("autocast_region", "")
        first = next(item.nodes)
        if self.tree.is_layer(item) or item.function is not None:
            return self._marks(first)
        if self.tree.is_sequence(item):  # torch's forward enters no region: one is entered for all its layers
            return next((self._marks(member) for member in item.items if self._is_bare(member)), NO_MARKS)
        around = {node.meta.get("autocast_region") for node in item.nodes}
        if around == {first.meta.get("autocast_region")} != {None} and self._is_shared(item, around):
            return None, autocast_of(first), first.meta["autocast_region"]
        return NO_MARKS

    def _is_bare(self, item: fx.Node | Scope) -> bool:
        """Whether an item has no generated forward in which its region could be entered."""
        return not isinstance(item, Scope) or self.tree.is_layer(item) or self.tree.is_sequence(item)

    def _is_shared(self, call: Scope, around: set[str | None]) -> bool:
        """Whether another item of the same region reads a weight that this call reads."""
        others = (item for item in self.items if item is not call)
        beside = [i for i in others if {n.meta.get("autocast_region") for n in _nodes(i)} & around]
        return any(not self._weights(call).isdisjoint(self._weights(item)) for item in beside)

    def _weights(self, item: fx.Node | Scope) -> set[str]:
        read = (o for node in _nodes(item) for o in tensors_read(self.tree.graph, node))
        return {str(operand.target) for operand in read if operand.op == "get_attr"}

    def is_ordered(self, item: fx.Node | Scope) -> bool:
        """Whether it matters when an item is computed.

        It does for its gradient, for its random numbers and for what it writes.
        """
        if is_second_name(item):
            return False
        nodes = _nodes(item)
        found = (self.tree.graph.operators[node.name] for node in nodes)
        return any(
            o.requires_grad or o.is_random or o.writes_buffers or o.memory_group is not None for o in found
        )

    def is_pure(self, item: fx.Node | Scope) -> bool:
        """Whether an item draws no random numbers and writes nothing."""
        found = (self.tree.graph.operators[node.name] for node in _nodes(item))
        return not any(o.is_random or o.writes_buffers or o.memory_group is not None for o in found)

    def is_recurrent(self, item: fx.Node | Scope) -> bool:
        """Whether an item is a whole LSTM, GRU, RNN or LSTMCell, which returns a tuple."""
        if not isinstance(item, Scope) or not self.tree.is_layer(item):
            return False
        return isinstance(self.tree.modules[item.path], LAYERS_GIVING_TUPLES)

    def is_taken_apart(self, item: fx.Node | Scope) -> bool:
        """Whether the author takes the pair of an attention layer apart, `x, _ = self.attn(x, x, x)`."""
        line = self.line(item)
        return line is not None and len(line.assigned) == 2 and attention_of(self.tree, item) is not None

    def author_name(self, item: fx.Node | Scope, result: fx.Node) -> str | None:
        """Returns the author's name for an item's result; None where the statement is not for this result."""
        key = id(item), result
        if key not in self._author_names:
            self._author_names[key] = self._author_name(item, result) or self._name_when_written(result)
        return self._author_names[key]

    def _name_when_written(self, result: fx.Node) -> str | None:
        """Returns the `mask` of `mask[:, 0] = 1` for the tensor to a part of which the statement assigns."""
        last = next((last for last, write in self._part_writes.items() if write.base is result), None)
        return None if last is None else name_of_filled(last, self.line(last))

    def _author_name(self, item: fx.Node | Scope, result: fx.Node) -> str | None:
        line = self.line(item)
        names = line.assigned if line is not None else ()
        if left_otherwise(self.tree, result, self.scope.depth):
            return None
        if (
            isinstance(item, Scope)
            and len(self.results(item)) > 1
            and self.tree.returns_others(result, item.key)
        ):
            return None  # one of several that leave a cut module
        if len(names) > 1:
            return self._name_by_place(item)
        if line is not None and is_one_of_several(result, line, self.scope.depth):
            return None  # the name stands for the whole tuple
        if not names:
            named = self._name_by_place(item) or name_of_filled(result, line)
            return named or outer_name(result, self.scope.depth, self._depth_of_calls)
        return names[0] if names[0] != "_" and self._is_final(item, result) else None

    def _is_final(self, item: fx.Node | Scope, result: fx.Node) -> bool:
        call = item.call if isinstance(item, Scope) else None
        return is_final(result, self.scope.depth, None if call is None else call.line)

    def lines_between(self, first: int, last: int) -> list[Line]:
        """Returns the authors' lines of the items that come between two places, neither included."""
        lines = (self.line(item) for item in self.items[first + 1 : last])
        return [line for line in lines if line is not None]

    def passed_name(self, result: fx.Node) -> str | None:
        """Returns the parameter of the author's function to which a value without a name is passed."""
        if self._passed is None:
            own = [item for item in self.items if isinstance(item, fx.Node)]
            self._passed = passed_names(own, self.scope.depth)
        return self._passed.get(result)

    def names_together(self, item: fx.Node | Scope) -> tuple[str, ...]:
        """Returns the names that the author's statement assigns one by one, if the item makes one of them."""
        return self._together[id(item)][1] if id(item) in self._together else ()

    def _name_by_place(self, item: fx.Node | Scope) -> str | None:
        name, _ = self._together.get(id(item), ("_", ()))
        return name if name != "_" else None

    def _assigned_together(self) -> dict[int, tuple[str, tuple[str, ...]]]:
        """Maps the id of an item to its name, and all names, where a statement assigns values one by one.

        Such statements are `q, k = self.q(x), self.k(x)` and `q, k = (cut(t) for t in (q, k))`, and also `q,
        k = self.made(x)` where that function returns `self.q(x), self.k(x)`, or `q, k = turn(q), turn(k)`.
        """
        found: dict[int, tuple[str, tuple[str, ...]]] = {}
        for chain, items in itertools.groupby(self.items, key=self._statement_of_several):
            if not chain:
                continue
            group, names = list(items), chain[-1].assigned or (chain[-2].assigned if chain[1:] else ())
            names = names_of_what_it_makes(chain[-1].code, names)
            final = [item for item in group if self._makes_what_is_assigned(item, chain, group)]
            if len(final) == len(names):
                found |= {id(item): (name, names) for item, name in zip(final, names, strict=True)}
        return found

    def _statement_of_several(self, item: fx.Node | Scope) -> tuple[Line, ...]:
        """Returns the lines that lead to a statement that makes several values, where the item was traced."""
        line = self.line(item)
        chain = () if line is None else line.chain
        ends = reversed(range(1, len(chain) + 1))
        return next((chain[:end] for end in ends if makes_one_by_one(chain[end - 1].code)), ())

    def _makes_what_is_assigned(
        self, item: fx.Node | Scope, chain: tuple[Line, ...], group: Sequence[fx.Node | Scope]
    ) -> bool:
        """Whether an item of those that a statement runs makes one of the values that it assigns."""
        results, line = self.results(item), self.line(item)
        if len(results) != 1 or line is None:
            return False
        if line.chain == chain:
            return self._is_final(item, results[0])
        return not any(results[0] in self.operands_of(other) for other in group)

    def is_element(self, item: fx.Node | Scope) -> bool:
        """Whether an item is an element of a tuple that this body makes; it is bound where that is made."""
        if isinstance(item, Scope):
            return False
        if item in self._listed:
            return True
        if not _takes_element(item):
            return False
        source = item.args[0]
        return isinstance(source, fx.Node) and not _is_tensor(source) and id(source) in self._operands

    def elements(self, item: fx.Node | Scope) -> dict[int, fx.Node | None] | None:
        """Returns the elements of the tuple that an operator makes, by place.

        An element that nobody reads is None. The result is None for an item that makes no tuple.
        """
        if isinstance(item, Scope) or _is_tensor(item):
            return None
        taken = self._elements.get(item, {})
        return {place: taken.get(place) for place in range(len(item.meta["val"]))}

    def _elements_taken(self) -> dict[fx.Node, dict[int, fx.Node]]:
        found = {made: dict(enumerate(numbers)) for made, numbers in self.number_lists.items()}
        for item in self.items:
            if isinstance(item, Scope) or not _takes_element(item):
                continue
            source, place = item.args
            if isinstance(source, fx.Node) and not _is_tensor(source):
                found.setdefault(source, {})[int(str(place))] = item
        return found


def _nodes(item: fx.Node | Scope) -> list[fx.Node]:
    return list(item.nodes) if isinstance(item, Scope) else [item]


def _takes_element(node: fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem"


def _is_tensor(node: fx.Node) -> bool:
    return node.op == "placeholder" or not isinstance(node.meta.get("val"), list | tuple)


def _line_of_call(scope: Scope) -> Line | None:
    return None if scope.call is None else scope.call.line


def is_second_name(item: fx.Node | Scope) -> bool:
    """Whether an item only returns, under another name, a value that the model returns already."""
    return not isinstance(item, Scope) and item.target is torch.ops.aten.alias.default
