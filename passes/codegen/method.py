"""Writes one method: the statements of a module's forward, with the author's names where they are known."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence, Set
from dataclasses import replace

import torch
from torch import fx, nn

from .body import Body, Region
from .cut import is_number, is_size, multiple_of_size, size_symbol
from .expression import PLUS, Scene, Source
from .folding import Folding
from .idioms import normalized
from .layer_calls import attention_of, linear_of
from .literals import identifier, plain
from .local_names import LocalNames
from .loops.author_loops import counter_of, list_of, round_of
from .loops.unfold_alike import unfold_alike
from .naming import element_name, list_returned, result_name
from .part_writes import PartWrite
from .parts import name_of_list, names_of_parts
from .put_away import list_with
from .scopes import Scope, walk
from .sizes import Sizes, said_of
from .spell import spell
from .stage_tree import DEVICE, StageTree
from .written import LONGEST_FOLDED, Method, Statement, reference

_WITH_PLACES = ", return_indices=True)"  # of maxima: the operator has them in any case
_FIRST = "[0]"  # the output of an attention layer, which gives its weights beside it
_SHORT_OPERAND = 40  # characters of an operand that fits on a line of its own when a statement takes several


def write_method(
    tree: StageTree,
    scope: Scope,
    call_text: Callable[[Scope, Scope, list[str]], str],
    arguments: Sequence[str] = (),
) -> Method:
    """Writes the forward of one call.

    `call_text` spells an inner call, given the texts of its arguments. `arguments` are names for the
    forward's own arguments, where these are not to be named after what this call is given.

    As much is folded as reads well. The body is written with all of it folded, and what makes a line too long
    is unfolded, until no line is too long. If it reads a size often, it is written again with a name for it.
    """
    body = Body(tree, scope)
    draft, method = _written(body, call_text, arguments, frozenset())
    if named := draft.sizes.read_often(draft.texts):
        draft, method = _written(body, call_text, arguments, named)
    tree.names_given[id(scope)] = draft.names_given()
    return method


def _written(
    body: Body, call_text: Callable[[Scope, Scope, list[str]], str], arguments: Sequence[str], sizes: Set[str]
) -> tuple[_Draft, Method]:
    """Writes a body with names for these sizes, until no line is too long."""
    kept: set[fx.Node] = set()
    size_readers: dict[fx.Node, set[int]] = {}
    while True:
        draft = _Draft(body, Folding(body, kept, size_readers), call_text, arguments, sizes)
        method = draft.write()
        if not draft.too_long and not draft.sizes.lost:
            return draft, method
        for node, index in draft.sizes.lost:
            size_readers.setdefault(node, set()).add(index)
        kept |= unfold_alike(draft.folding, draft.too_long)


class _Draft:
    """One attempt at a body, with a fixed set of results that stay on lines of their own."""

    def __init__(
        self,
        body: Body,
        folding: Folding,
        call_text: Callable[[Scope, Scope, list[str]], str],
        arguments: Sequence[str],
        sizes: Set[str],
    ) -> None:
        self.body = body
        self.folding = folding
        self.call_text = call_text
        self.arguments = arguments
        self.names = LocalNames(body, folding, sizes)
        self.sizes = Sizes(body, folding, self.names)
        self.sources: dict[fx.Node, Source] = {}
        self.too_long: set[fx.Node] = set()
        self.lists: dict[tuple[fx.Node, ...], str] = {}  # lists of numbers -> their names
        self.texts: dict[int, str] = {}  # the statements by place, without second names
        self.position = 0  # the place of the item being written
        self.written: list[Statement] = []

    def write(self) -> Method:
        arguments = self._arguments()
        body = self.written
        body += [Statement(text) for text in self.sizes.definitions()]
        for index, item in enumerate(self.body.items):
            self.position = index
            for statement in self._statements(index, item):
                self.texts[index] = statement.text
                body.append(statement)
        self.position = self.folding.end
        if self.body.gives:
            body.append(self._return())
            self.texts[self.position] = body[-1].text
        annotations = [_annotation(node) for node in self.body.reads]
        annotations += ["torch.device" if symbol == DEVICE else "int" for symbol in self.body.symbols]
        passes = self.body.tree.passes_through_in_evaluation(self.body.scope)
        return Method(tuple(arguments), tuple(annotations), tuple(body), arguments[0] if passes else None)

    def names_given(self) -> dict[fx.Node, str]:
        """Returns the names of what the body returns, also of what is written in `return f(x), g(x)`."""
        bound = self.names.bound
        several = self.body.gives if len(self.body.gives) > 1 else ()
        inline = {n: self.names.of_inline(n) for n in several if n in self.folding.folded}
        return inline | {node: bound[node] for node in self.body.gives if node in bound}

    def _arguments(self) -> list[str]:
        wanted = [*self.arguments[: len(self.body.reads)]]
        for node, name in itertools.zip_longest(self.body.reads, wanted):
            self._bind(node, name or self.names.of_argument(node))
        names = [self.names.bound[node] for node in self.body.reads]
        return [*names, *(identifier(symbol) for symbol in self.body.symbols)]

    def _statements(self, index: int, item: fx.Node | Scope) -> list[Statement]:
        """Writes the statement of an item; there is none for an item that is written elsewhere."""
        if self.body.is_element(item):
            return []  # bound where the tuple is made
        results = self.body.results(item)
        write = self.body.part_write(item)
        if write is not None:
            return [self._part_write(item, write)]
        source = self._source(item)
        if len(results) == 1 and results[0] in self.folding.folded:
            self.sources[results[0]] = source
            return []
        self._rename(index, item, results)
        target = self._target(index, item, results)
        text = f"{target} = {source.text}" if target else source.text
        if target.endswith(", _") and source.text.startswith("F.adaptive_max_pool"):
            text = f"{target.removesuffix(', _')} = {source.text.removesuffix(_WITH_PLACES)})"
        if self.body.is_taken_apart(item) and len(results) == 1:
            text = f"{target}, _ = {source.text.removesuffix(_FIRST)}"
        if len(text) > LONGEST_FOLDED:
            self._unfold(item, len(text))
        statement = Statement(text, *self._comment(item, results), self._region(item))
        return [self._with_its_loop(statement, item)]

    def _part_write(self, item: fx.Node | Scope, write: PartWrite) -> Statement:
        """Writes an assignment to a part of a tensor, which keeps its name."""
        text = write.spelled(self._scene())
        if len(text) > LONGEST_FOLDED:
            self._unfold(item, len(text))
        self._bind(write.nodes[-1], self.names.bound[write.base])
        statement = Statement(text, *self._comment(item, [write.nodes[-1]]), self._region(item))
        return replace(self._with_its_loop(statement, item), is_pure=False)

    def _with_its_loop(self, statement: Statement, item: fx.Node | Scope) -> Statement:
        line, results = self.body.line(item), self.body.results(item)
        named = self.body.author_name(item, results[0]) or "" if len(results) == 1 else ""
        statement = replace(statement, named=named, together=self.body.names_together(item))
        own = None if line is None else line.of_the_author
        if line is None or own is None:
            return statement
        place, listed = round_of(line), list_of(own) or list_returned(line) or list_with(line, named)
        is_pure = place.is_always and self.folding.is_pure(self.position)
        return replace(statement, counter=counter_of(own), listed=listed, round=place, is_pure=is_pure)

    def _rename(self, index: int, item: fx.Node | Scope, results: Sequence[fx.Node]) -> None:
        """Writes the author's `residual = x` before `x = self.norm(x)`, where the old x is read again."""
        found, line = self.names.second_name(index, item, results), self.body.line(item)
        if found is None or line is None:
            return
        node, second = found
        before = self.names.bound[node]
        self._bind(node, second.name)
        place = "" if second.line.module_of_torch else plain(str(second.line))
        region, at = self._region(item), len(self.written)
        while at and second.can_stand_before(self.written[at - 1], at=line, old=before):
            at -= 1
            region = self.written[at].region
        self.written.insert(at, Statement(f"{second.name} = {before}", place, region=region))

    def _target(self, index: int, item: fx.Node | Scope, results: Sequence[fx.Node]) -> str:
        elements = self.body.elements(item)
        if elements is not None:
            return self._tuple_target(index, item, elements)
        names: list[str] = []
        for result in results:
            name = self.names.of_result(index, item, result)
            self._bind(result, name)
            names.append(name)
        if isinstance(item, Scope) and self.body.tree.is_layer(item):
            names = self._recurrent_target(item, results, names)
        return ", ".join(names)

    def _recurrent_target(self, item: Scope, results: Sequence[fx.Node], names: list[str]) -> list[str]:
        """Returns a recurrent layer's targets: (output, (hidden, cell)) of an LSTM, else (output, hidden)."""
        if not self.body.is_recurrent(item):
            return names
        place = {int(str(r.args[1])): name for r, name in zip(results, names, strict=True)}
        if not isinstance(self.body.tree.modules[item.path], nn.LSTM):
            return [place.get(0, "_"), place.get(1, "_")]
        state = f"({place.get(1, '_')}, {place.get(2, '_')})" if {1, 2} & place.keys() else "_"
        return [place.get(0, "_"), state]

    def _tuple_target(self, index: int, item: fx.Node | Scope, elements: dict[int, fx.Node | None]) -> str:
        line, taken = self.body.line(item), {p: e for p, e in elements.items() if e is not None}
        hints = names_of_parts(line, item, elements, self.body.scope.depth)
        are_numbers = item in self.body.number_lists
        later = {} if are_numbers else self.names.of_what_they_become(elements)
        for place, element in taken.items():
            own = self.body.author_name(element, element) if len(taken) == 1 else None
            hints[place] = hints.get(place) or own or later.get(element, "")
        is_list = not any(hints.values()) and not any(
            element in self.body.gives for element in taken.values()
        )
        listed = name_of_list(line, item, elements, are_numbers=are_numbers) if is_list else None
        if listed is not None:
            name = self.names.free(listed, index)
            if isinstance(item, fx.Node) and are_numbers:
                self.lists[tuple(self.body.number_lists[item])] = name
            for place, element in taken.items():
                self._bind(element, f"{name}[{place}]")
            return name
        names = ["_"] * len(elements)
        for place, element in taken.items():
            hint, own = hints[place], element_name(item, place)
            name = hint if hint and not self.names.is_live(hint, index) and hint not in names else own
            self._bind(element, name if name == hint else self.names.free(name, index))
            names[place] = self.names.bound[element]
        return ", ".join(names) + ("," if len(names) == 1 else "")

    def _bind(self, node: fx.Node, name: str) -> None:
        self.names.bind(node, name)
        self.sources[node] = Source(name)

    def _source(self, item: fx.Node | Scope) -> Source:
        if isinstance(item, Scope):
            given = self.body.arguments_of(item)
            texts = [self._scene().text(argument) for argument in given]
            texts += [self._size(symbol).text for symbol in self.body.tree.symbols(item)]
            attention = attention_of(self.body.tree, item)
            if attention is not None:
                called = self.call_text(self.body.scope, item, attention.spelled(texts, self._device()))
                return Source(called + _FIRST if len(self.body.results(item)) == 1 else called)
            return Source(self.call_text(self.body.scope, item, texts))
        if item in self.body.normalized:
            return normalized(self.body.normalized[item], self._scene())
        if item in self.body.number_lists:
            return Source(f"{self._scene().receiver(item.args[0])}.tolist()")
        if item in self.body.sums:
            return self._sum(self.body.summands(item))
        layer = linear_of(self.body.tree, self.body.scope, item)
        if layer is not None:
            called = reference(_below(self.body.scope.path, layer))
            return Source(f"{called}({self._scene().text(item.args[0])})")
        return spell(item, self._scene())

    def _sum(self, numbers: Sequence[fx.Node]) -> Source:
        listed = self.lists.get(tuple(numbers))
        if listed is not None:
            return Source(f"sum({listed})")
        return Source(" + ".join(self._expression(number).within(PLUS) for number in numbers), PLUS)

    def _scene(self) -> Scene:
        is_training = self.body.tree.model.training
        return Scene(self._expression, self._device, is_training=is_training, lists=self.lists)

    def _expression(self, node: fx.Node) -> Source:
        if node in self.sources:
            return self.sources[node]
        if is_size(self.body.tree.graph, node):
            symbol = size_symbol(self.body.tree.graph, node)
            multiple = multiple_of_size(self.body.tree.graph, node)
            if multiple is not None and (source := self.sizes.multiple(*multiple, self.position)) is not None:
                return source
            if symbol is None:
                return spell(node, self._scene())
            return self._size(symbol)
        if self.body.tree.makes(self.body.scope, node):
            return Source(self.body.tree.numbers[str(node.target)].spelled(self._device()))
        path = self.body.tree.parameter(self.body.scope, node) if node.op == "get_attr" else None
        assert path is not None, f"{node.name} is not within reach of {self.body.scope.path!r}"
        return Source(reference(_below(self.body.scope.path, path)))

    def _size(self, symbol: int | str) -> Source:
        return Source(self._device()) if symbol == DEVICE else self.sizes.spelled(symbol, self.position)

    def _device(self) -> str:
        if DEVICE in self.body.symbols:
            return DEVICE
        items, reads = self.body.items, self.body.reads
        near = self.body.operands_of(items[self.position]) if self.position < len(items) else ()
        tensor = next((n for n in (*near, *reads) if n in self.names.bound and not is_number(n)), None)
        if tensor is not None:
            return f"{self.names.bound[tensor]}.device"
        return self._device_without_inputs()

    def _device_without_inputs(self) -> str:
        """Returns the device of the stage's own tensors; without any, the one where torch makes tensors."""
        tree = self.body.tree
        layers = [tree.modules[scope.path] for scope in walk(tree.root) if tree.is_layer(scope)]
        owned = {name for names in tree.owned.values() for name in names}
        held = any(next(layer.parameters(), None) is not None for layer in layers)
        if held or not owned.isdisjoint(tree.graph.parameters):
            return "next(self.parameters()).device"
        return "next(self.buffers()).device" if owned else "torch.get_default_device()"

    def _unfold(self, item: fx.Node | Scope, length: int) -> bool:
        """Gives a line of its own to the longest part that fits, of what is folded into a line too long.

        Returns False where that would not help: what has many operands is long without any of them being
        long.
        """
        inside = [node for node in self.body.operands_of(item) if node in self.folding.folded]
        lengths = {node: len(self.sources[node].text) for node in inside}
        for node, inner_length in lengths.items():
            target = result_name(self.body.items[self.folding.maker[node]], node)
            if len(f"{target} = ") + inner_length > LONGEST_FOLDED:
                if not self._unfold(self.body.items[self.folding.maker[node]], inner_length):
                    self.too_long.add(node)
                return True
        longest = max(inside, key=lengths.__getitem__, default=None)
        if longest is None:
            return False
        if length - sum(lengths.values()) > LONGEST_FOLDED and lengths[longest] <= _SHORT_OPERAND:
            return False
        while longest.target is torch.ops.aten.unsqueeze.default:  # several unsqueezes are one subscript
            base = longest.args[0]
            if not isinstance(base, fx.Node) or base not in self.folding.folded:
                break
            longest = base
        self.too_long.add(longest)
        return True

    def _return(self) -> Statement:
        texts = [self._expression(node).text for node in self.body.gives]
        statement = Statement(f"return {', '.join(texts)}")
        folded = [node for node in self.body.gives if node in self.folding.folded]
        if len(statement.text) > LONGEST_FOLDED:
            if len(self.body.gives) > 1:
                self.too_long |= set(folded)
            elif folded:
                self._unfold(self.body.items[self.folding.maker[folded[0]]], len(statement.text))
        last = self.body.items[-1] if self.body.items else None
        if last is not None and len(self.body.gives) > 1 and folded:
            place, _ = self._comment(last, self.body.gives)
            return replace(statement, place=place, region=self._region(last))
        if last is not None and len(self.body.gives) == 1 and self.body.gives[0] in self.folding.folded:
            place, shape = self._comment(last, self.body.gives)
            statement = replace(statement, place=place, shape=shape, region=self._region(last))
            return self._with_its_loop(statement, last)
        return statement

    def _region(self, item: fx.Node | Scope) -> Region:
        """Returns the region of an item, with the device type of its autocast as it is written."""
        no_grad, autocast, number = self.body.region(item)
        if autocast is None:
            return no_grad, None, number
        named, dtype, enabled = autocast
        return no_grad, (f"{self._device()}.type" if named is None else f'"{named}"', dtype, enabled), number

    def _comment(
        self, item: fx.Node | Scope, results: Sequence[fx.Node]
    ) -> tuple[str, tuple[int | str, ...]]:
        """Returns the author's line, if it is not torch's own, and the shape where it changes."""
        line = self.body.line(item)
        own = None if line is None else line.of_the_author
        place = "" if own is None else plain(str(own))
        if len(results) != 1:
            return place, ()
        shape = self.body.tree.shape(results[0])
        before = [self.body.tree.shape(node) for node in self.folding.operands_of(item)]
        return place, () if before and before[0] == shape else tuple(map(said_of, shape))


def _annotation(node: fx.Node) -> str:
    """Returns the annotation of an argument: a tensor, or a number that was read out of one."""
    value = node.meta.get("val")
    numbers = (("float", torch.SymFloat | float), ("bool", torch.SymBool | bool), ("int", torch.SymInt | int))
    return next((name for name, kinds in numbers if isinstance(value, kinds)), "Tensor")


def _below(scope: str, path: str) -> str:
    return path[len(scope) + 1 :] if scope else path
