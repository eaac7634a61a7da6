"""Custom autograd functions as classes, with a forward and a backward in torch's public words."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from pd2bw_fx.custom_function import CustomFunction
from pd2bw_fx.errors import TraceError

from .calls import occurrences
from .expression import Scene, Source
from .layout import laid_out, signature_lines
from .literals import identifier, plain
from .naming import result_name
from .scopes import frames_of
from .spell import spell
from .statements import assigned_names

_LONGEST_FOLDED = 80


def class_of(function: CustomFunction) -> list[str]:
    """Returns the lines of the function's class; its calls read `NAME.apply(..)`."""
    body = _Body(function.tensors, [*function.results, *function.saved])
    lines = list(_forward(function, body))
    origin = f", from {plain(function.origin)}" if function.origin else ""
    return [
        f"class {function.name}(torch.autograd.Function):",
        f'    """A forward and a backward of its own{origin}."""',
        "",
        *lines,
        "",
        *_backward(function, [body.text(node) for node in function.saved]),
    ]


def _forward(function: CustomFunction, body: _Body) -> Iterator[str]:
    lines = body.lines(function.forward)
    given = [f"{body.text(node)}: Tensor" for node in function.tensors]
    kinds = ["Tensor"] * len(function.results)
    yield "    @staticmethod"
    yield from signature_lines("forward", ["ctx", *given], _kind(kinds, function.returns_tuple), 4)
    yield from lines
    if function.saved:
        yield from laid_out(f"ctx.save_for_backward({body.several(function.saved)})", 8)
    if function.not_differentiable:
        marked = [function.results[place] for place in function.not_differentiable]
        yield from laid_out(f"ctx.mark_non_differentiable({body.several(marked)})", 8)
    yield from body.returned(function.results, as_tuple=function.returns_tuple)


def _backward(function: CustomFunction, saved: Sequence[str]) -> Iterator[str]:
    """Yields the lines of the backward; `saved` is how the forward writes the values that it saves."""
    placeholders, several = list(function.backward.find_nodes(op="placeholder")), len(function.gradients) > 1
    wanted = [node for node in function.gradients if node is not None]
    body = _Body(placeholders, wanted, saved)
    lines = body.lines(function.backward)
    num_saved = len(saved)
    given = [f"{body.text(node)}: Tensor" for node in placeholders[num_saved:]]
    kinds = ["None" if node is None else "Tensor" for node in function.gradients]
    yield "    @staticmethod"
    yield from signature_lines("backward", ["ctx", *given], _kind(kinds, several), 4)
    if num_saved:
        names = body.several(placeholders[:num_saved])
        yield from laid_out(
            f"({names},) = ctx.saved_tensors" if num_saved == 1 else f"{names} = ctx.saved_tensors", 8
        )
    yield from lines
    yield from body.returned(function.gradients, as_tuple=several)


def _kind(kinds: Sequence[str], is_tuple: bool) -> str:
    return f"tuple[{', '.join(kinds)}]" if is_tuple else kinds[0]


class _Body:
    """Writes the statements of one graph.

    A value that is read once is written where it is read, if that is short.
    """

    def __init__(
        self, arguments: Sequence[fx.Node], results: Sequence[fx.Node], names: Sequence[str] = ()
    ) -> None:
        """Names the arguments: the first ones by `names` where these are identifiers, the others by node."""
        self.arguments = arguments
        self.sources: dict[fx.Node, Source] = {}
        self.taken: set[str] = {"ctx"}
        self.results = results
        for place, node in enumerate(arguments):
            is_named = place < len(names) and names[place].isidentifier()
            self._bind(node, names[place] if is_named else identifier(node.name))

    def lines(self, graph: fx.Graph) -> list[str]:
        """Returns the statements of all operators, and binds the names that `text` then refers to."""
        nodes = [node for node in graph.nodes if node.op == "call_function"]
        uses = {node: _uses(node, self.results) for node in nodes}
        folded: dict[fx.Node, str] = {}
        written: list[str] = []
        for node in nodes:
            if node in self.sources:
                continue  # an entry of a tuple, which has its name
            source = self._spelled(node)
            for operand in sorted(node.all_input_nodes, key=lambda o: -len(folded.get(o, ""))):
                if operand in folded and len(source.text) > _LONGEST_FOLDED:
                    written += self._statement(operand, folded.pop(operand))
                    source = self._spelled(node)
            for operand in node.all_input_nodes:
                folded.pop(operand, None)
            if _writes(node):  # what is read behind it is computed before it all the same
                for waiting in list(folded):
                    written += self._statement(waiting, folded.pop(waiting))
                written += self._writing_statement(node, source.text)
                continue
            if uses[node] == 1 and self._author_name(node) is None:
                self.sources[node] = source
                folded[node] = source.text
                continue
            written += self._statement(node, source.text) if uses[node] else laid_out(source.text, 8)
        return written

    def _writing_statement(self, node: fx.Node, text: str) -> Iterator[str]:
        """Writes `x.add_(y)`, whose result is `x` from there on, if `x` is a variable."""
        written = node.args[0] if node.args else None
        if (
            isinstance(written, fx.Node)
            and self.text(written).isidentifier()
            and _returns_what_it_writes(node)
        ):
            self.sources[node] = self.sources[written]
            yield from laid_out(text, 8)
        else:
            yield from self._statement(node, text) if _uses(node, self.results) else laid_out(text, 8)

    def text(self, node: fx.Node) -> str:
        return self.sources[node].text

    def several(self, nodes: Sequence[fx.Node | None]) -> str:
        return ", ".join("None" if node is None else self.text(node) for node in nodes)

    def returned(self, nodes: Sequence[fx.Node | None], *, as_tuple: bool) -> Iterator[str]:
        texts = self.several(nodes)
        return laid_out(f"return ({texts},)" if as_tuple and len(nodes) == 1 else f"return {texts}", 8)

    def _statement(self, node: fx.Node, text: str) -> Iterator[str]:
        entries = self._entries(node)
        if entries:
            for entry, name in entries:
                self._bind(entry, name)
            yield from laid_out(f"{self.several([entry for entry, _ in entries])} = {text}", 8)
        else:
            self._bind(node, self._author_name(node) or result_name(node, node))
            yield from laid_out(f"{self.text(node)} = {text}", 8)

    def _entries(self, node: fx.Node) -> list[tuple[fx.Node, str]]:
        """Lists the entries of a tuple with their names, if the author's line unpacks it and all are read."""
        lines = frames_of(node)[-1:]
        names = assigned_names(lines[0].code) if lines else ()
        entries = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        if len(names) < 2 or len(entries) != len(node.users) or set(entries) != set(range(len(names))):
            return []
        return [(entries[place], name) for place, name in enumerate(names)]

    def _bind(self, node: fx.Node, wanted: str) -> None:
        name, count = wanted, 1
        while name in self.taken:
            count += 1
            name = f"{wanted}_{count}"
        self.taken.add(name)
        self.sources[node] = Source(name)

    def _author_name(self, node: fx.Node) -> str | None:
        """Returns the name that a node's line assigns, if the node is the last operator of that line."""
        lines = frames_of(node)[-1:]
        names = assigned_names(lines[0].code) if lines else ()
        if len(names) != 1 or names[0] == "_" or any(frames_of(u)[-1:] == lines for u in node.users):
            return None
        return names[0]

    def _spelled(self, node: fx.Node) -> Source:
        if node.target is torch.ops.aten.sym_size.int:
            return Source(f"{self._expression(node.args[0]).within(0)}.shape[{node.args[1]}]")
        if node.target is torch.ops.aten.sym_numel.default:
            return Source(f"{self._expression(node.args[0]).within(0)}.numel()")
        return spell(node, Scene(self._expression, self._device))

    def _expression(self, node: Any) -> Source:
        if node not in self.sources:
            raise TraceError(f"{node} of a custom autograd function is no value that it is given or makes")
        return self.sources[node]

    def _device(self) -> str:
        return f"{self.text(self.arguments[0])}.device" if self.arguments else "torch.get_default_device()"


def _uses(node: fx.Node, results: Sequence[fx.Node]) -> int:
    users = (user for user in node.users if user.op != "output")
    read = sum(occurrences((user.args, dict(user.kwargs)), node) for user in users)
    return read + sum(result is node for result in results)


def _returns_what_it_writes(node: fx.Node) -> bool:
    """Whether an operator's one result is its first operand, written."""
    schema = node.target._schema  # type: ignore[union-attr]
    written, returned = schema.arguments[0].alias_info, [r.alias_info for r in schema.returns]
    return bool(written and written.is_write) and [r and r.before_set for r in returned] == [
        written.before_set
    ]


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
