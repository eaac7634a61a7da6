"""Rewrites in-place operations on activations as functional ones.

Autograd does not allow writes to a tensor that came over a link, which is a leaf, and a value that is
recomputed must not have been written since. So `x.add_(y)` becomes `add(x, y)`, and later readers of x or of
a view of x read the result. Where a view is written, its base changes too:

    row = select(x, 1, 0)            row = select(x, 1, 0)
    copy_(row, y)               ->   x_1 = select_scatter(x, y, 1, 0)
    sum(x)                           sum(x_1)

The memory of parameters and buffers is still written in place. So is memory that is written in a way that has
no functional form here: all writes to it stay, and `Operator.memory_group` keeps them in one stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.experimental.symbolic_shapes import statically_known_true

from pd2bw_fx.program import region

from .facts import Facts
from .lift import Draft
from .nodes import operator_name
from .overloads import defaults_left_out, functional_overload

_ATEN = torch.ops.aten
# Operators that return their operand under another name or shape: a new value of the view is one of the
# operand.
_SAME_ELEMENTS = {
    "alias",
    "contiguous",
    "to",
    "dropout",
    "lift_fresh",
    "type_as",
    "slice",
    "expand",
    "detach_",
}
_RESHAPES = {"view", "reshape", "flatten", "unflatten", "_unsafe_view", "squeeze", "unsqueeze", "view_as"}
_SCATTERS = {
    "select": _ATEN.select_scatter.default,
    "slice": _ATEN.slice_scatter.default,
    "diagonal": _ATEN.diagonal_scatter.default,
}
_PARTS = {"unbind", "split", "split_with_sizes", "chunk"}
_ASSIGNMENTS = {"copy_", "fill_", "zero_"}
_OF_ZEROS = {"empty": _ATEN.zeros.default, "new_empty": _ATEN.new_zeros.default}


def make_functional(draft: Draft, facts: Facts) -> Draft:
    """Returns the program without in-place writes, but for those to memory that must be written."""
    if not any(facts.written.values()):
        return draft
    owners = draft.graph.find_nodes(op="get_attr")
    state = frozenset(storage for node in owners for storage in facts.storages[node.name])
    rewriter = _Rewriter(facts, _kept_in_place(draft, facts) | state, state)
    for node in draft.graph.nodes:
        rewriter.rewrite(node)
    return Draft(rewriter.graph, draft.values)


def reshape_as_views(draft: Draft) -> None:
    """Rewrites `x.unsqueeze_(0)`, which writes nothing, as a view that later readers of x read."""
    position = {node: i for i, node in enumerate(draft.graph.nodes)}
    for node in position:
        view = functional_overload(node)
        if view is None or torch.Tag.inplace_view not in node.target.tags:
            continue
        if view._schema.returns[0].alias_info is not None:
            node.target = view
            node.all_input_nodes[0].replace_all_uses_with(
                node, delete_user_cb=lambda user, place=position[node]: position[user] > place
            )


def _kept_in_place(draft: Draft, facts: Facts) -> frozenset[int]:
    """Returns the memory that is written in a way that has no functional form here."""
    kept: set[int] = set()
    for node in draft.graph.nodes:
        written = facts.written.get(node.name, ())
        if written and not _has_functional_form(node, facts):
            kept |= {storage for target in written for storage in facts.storages[target.name]}
    return frozenset(kept)


def _has_functional_form(node: fx.Node, facts: Facts) -> bool:
    target, value = facts.written[node.name][0], facts.values[node.name]
    if len(facts.written[node.name]) != 1 or not node.args or node.args[0] is not target:
        return False
    if node.meta.get("no_grad") and _has_gradient(target, facts):
        return False  # autograd does not see this write, and would see its functional form
    before = facts.values[target.name]
    if not isinstance(value, torch.Tensor) or not isinstance(before, torch.Tensor):
        return False
    if operator_name(node) == "fill_diagonal_":
        if before.dim() != 2 or len(node.args) > 2 or node.kwargs or before.is_complex():
            return False
    elif functional_overload(node) is None and operator_name(node) not in _ASSIGNMENTS:
        return False
    if value.shape != before.shape or not _same_device(node, before, facts):
        return False
    return all(_is_invertible(view, base, facts) for view, base in _views(target, facts))


def _has_gradient(target: fx.Node, facts: Facts) -> bool:
    bases = (base for _, base in _views(target, facts))
    return any(facts.requires_grad(node.name) for node in (target, *bases))


def _same_device(node: fx.Node, target: torch.Tensor, facts: Facts) -> bool:
    operands = (facts.values[arg.name] for arg in node.all_input_nodes)
    return all(t.device == target.device for t in operands if isinstance(t, torch.Tensor) and t.dim() > 0)


def _views(node: fx.Node, facts: Facts) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yields each view with its base, from a value up to the first owner of its memory."""
    while True:
        bases = facts.aliases.get(node.name, ())
        if bases and not isinstance(facts.values[bases[0].name], torch.Tensor):
            bases = facts.aliases.get(bases[0].name, ())  # an element of a tuple of views
        if not bases:
            return
        yield node, bases[0]
        node = bases[0]


def _is_invertible(view: fx.Node, base: fx.Node, facts: Facts) -> bool:
    """Whether a new value of the view gives a new value of its base."""
    if facts.written.get(view.name):
        return True  # an in-place operator returns what it wrote
    if facts.values[view.name].dtype != facts.values[base.name].dtype:
        return False  # the same bits as other numbers
    if operator_name(view) == "getitem":
        parts = view.args[0]
        assert isinstance(parts, fx.Node)
        return operator_name(parts) in _PARTS and _part_bounds(view, facts) is not None
    if operator_name(view) in _SAME_ELEMENTS | _RESHAPES and _is_all_of(view, base, facts):
        return True
    if operator_name(view) == "diagonal":
        return not view.kwargs and not facts.values[base.name].is_complex()
    return operator_name(view) in _SCATTERS.keys() | {"transpose", "permute", "t"}


def _is_what_it_wrote(node: fx.Node, written: tuple[fx.Node, ...], facts: Facts) -> bool:
    """Whether the result is the written operand, so that its readers may read that: `x.add_(y)` is x."""
    value, before = facts.values[node.name], facts.values[written[0].name]
    return (
        len(written) == 1
        and isinstance(value, torch.Tensor)
        and isinstance(before, torch.Tensor)
        and written[0] in facts.aliases[node.name]
        and value.shape == before.shape
        and value.requires_grad == before.requires_grad
    )


def _is_all_of(view: fx.Node, base: fx.Node, facts: Facts) -> bool:
    """Whether a view has as many elements as its base, whatever the open sizes are."""
    return bool(statically_known_true(_sized(view, facts).numel() == _sized(base, facts).numel()))


def _is_always_empty(view: fx.Node, facts: Facts) -> bool:
    return bool(statically_known_true(_sized(view, facts).numel() == 0))


def _sized(node: fx.Node, facts: Facts) -> torch.Tensor:
    """Returns the value with its open sizes, if the tracer knew them, or with those of the example."""
    traced, value = node.meta.get("val"), facts.values[node.name]
    found = traced if isinstance(traced, torch.Tensor) else value
    assert isinstance(found, torch.Tensor)
    return found


def _part_bounds(element: fx.Node, facts: Facts) -> tuple[int, int] | None:
    """Returns where an element of a split begins and ends, or None where that depends on an open size."""
    parts, index = element.args
    assert isinstance(parts, fx.Node)
    assert isinstance(index, int)
    traced = parts.meta.get("val", facts.values[parts.name])
    if operator_name(parts) == "unbind":
        return index, index + 1
    dim = _dim(parts, 2)
    sizes = [part.shape[dim] for part in traced[: index + 1]]
    if not all(isinstance(size, int) for size in sizes):
        return None
    return sum(sizes[:-1]), sum(sizes)


def _dim(node: fx.Node, position: int) -> int:
    dim = node.args[position] if len(node.args) > position else node.kwargs.get("dim", 0)
    assert isinstance(dim, int)
    return dim


@dataclass(slots=True)
class _Rewriter:
    """Copies the graph without in-place writes.

    A view is stale once its memory was written through another name. It is made anew, from its base's value,
    when it is next read.
    """

    facts: Facts
    kept: frozenset[int]  # memory that is written in place
    state: frozenset[int]  # the part of it that belongs to parameters and buffers
    graph: fx.Graph = field(default_factory=fx.Graph)
    current: dict[fx.Node, fx.Node] = field(
        default_factory=dict
    )  # old node -> new node with its present value
    stale: set[fx.Node] = field(default_factory=set)
    on_storage: dict[int, list[fx.Node]] = field(default_factory=dict)  # nodes so far, by their memory

    def rewrite(self, node: fx.Node) -> None:
        written = self.facts.written.get(node.name, ())
        if not written:
            self.current[node] = self._copy(node)
        elif self.facts.storages[written[0].name] & self.kept:
            in_place = self._copy(node)
            on_state = self.facts.storages[written[0].name] & self.state
            read_target = on_state and _is_what_it_wrote(node, written, self.facts)
            self.current[node] = self.current[written[0]] if read_target else in_place
        else:
            value = self._functional(node, written[0])
            self._write(written[0], value, node)
            self.current[node] = value
        for storage in self.facts.storages.get(node.name, ()):
            self.on_storage.setdefault(storage, []).append(node)

    def _copy(self, node: fx.Node) -> fx.Node:
        copied = self.graph.node_copy(node, self._now)
        if node.op == "placeholder":
            copied.name = node.name
        return copied

    def _now(self, node: fx.Node) -> fx.Node:
        if node not in self.stale:
            return self.current[node]
        written = self.facts.written.get(node.name)
        self._set(node, self._now(written[0]) if written else self._copy(node))
        return self.current[node]

    def _write(self, target: fx.Node, value: fx.Node, writer: fx.Node) -> None:
        """Passes a new value on from the written name to the owner of the memory."""
        steps = [(view, base, self._now(base)) for view, base in _views(target, self.facts)]
        for storage in self.facts.storages[target.name]:
            self.stale.update(self.on_storage[storage])
        self._set(target, value)
        for view, base, before in steps:
            value = self._inverse(view, before, value, writer)
            self._set(base, value)

    def _set(self, node: fx.Node, value: fx.Node) -> None:
        self.current[node] = value
        self.stale.discard(node)

    def _functional(self, node: fx.Node, target: fx.Node) -> fx.Node:
        """Emits the value that the in-place operator leaves in its target, as a value of its own."""
        args = fx.node.map_arg(node.args, self._now)
        kwargs = fx.node.map_arg(node.kwargs, self._now)
        before = self.facts.values[target.name]
        name = operator_name(node)
        if name == "zero_":
            return self._zeros(self._now(target), node)
        if name == "fill_" and not isinstance(node.args[1], fx.Node):
            return self._emit(_ATEN.full_like.default, (args[0], args[1]), node)
        if name == "fill_diagonal_":
            diagonal = self._emit(_ATEN.diagonal.default, (args[0],), node)
            filled = self._emit(_ATEN.full_like.default, (diagonal, args[1]), node)
            return self._emit(_ATEN.diagonal_scatter.default, (args[0], filled), node)
        if name in _ASSIGNMENTS:
            assert isinstance(node.args[1], fx.Node)
            return self._assigned(node, node.args[1], args, before)
        value = self._emit(functional_overload(node), args, node, {**kwargs, **defaults_left_out(node)})
        dtype = self._dtype(node)
        return value if dtype == before.dtype else self._emit(_ATEN.to.dtype, (value, before.dtype), node)

    def _zeros(self, before: fx.Node, node: fx.Node) -> fx.Node:
        """Emits zeros in place of a value: `x.new(3, 4).zero_()` is `torch.zeros(3, 4)`."""
        made = _OF_ZEROS.get(operator_name(before))
        if made is None:
            return self._emit(_ATEN.zeros_like.default, (before,), node)
        kwargs = {name: value for name, value in before.kwargs.items() if name != "memory_format"}
        zeros = self._emit(made, before.args, node, kwargs)
        zeros.meta |= {key: value for key, value in before.meta.items() if key == "val"}
        return zeros

    def _assigned(self, node: fx.Node, source: fx.Node, args: Any, before: torch.Tensor) -> fx.Node:
        given = self.facts.values[source.name]
        value: fx.Node = args[1]
        if given.dtype != before.dtype:
            value = self._emit(_ATEN.to.dtype, (value, before.dtype), node)
        if given.shape != before.shape:
            return self._emit(_ATEN.expand_as.default, (value, args[0]), node)
        if given.stride() != before.stride() and not self._is_put_into_another(node):
            kwargs = {"memory_format": torch.contiguous_format}
            return self._emit(_ATEN.clone.default, (value,), node, kwargs)
        return value

    def _is_put_into_another(self, node: fx.Node) -> bool:
        """Whether v of `out[:, t] = v` needs no layout of its own: a scatter takes any.

        That is so where nobody reads the written part itself.
        """
        target = self.facts.written[node.name][0]
        base = next((base for view, base in _views(target, self.facts) if view is target), None)
        if node.users or len(target.users) > 1 or base is None or operator_name(target) not in _SCATTERS:
            return False
        return not _is_all_of(target, base, self.facts)

    def _dtype(self, node: fx.Node) -> torch.dtype:
        """Returns the type of the functional form's result; the in-place form casts to its target's type."""
        fakes = fx.node.map_arg((node.args, dict(node.kwargs)), lambda arg: self.facts.values[arg.name])
        with self.facts.mode, region(node), torch.no_grad():
            result = functional_overload(node)(*fakes[0], **fakes[1], **defaults_left_out(node))
        assert isinstance(result, torch.Tensor)
        return result.dtype

    def _inverse(self, view: fx.Node, before: fx.Node, value: fx.Node, writer: fx.Node) -> fx.Node:
        """Emits the new value of the base: `before`, with `value` in the part that the view shows."""
        name = operator_name(view)
        base = self.facts.aliases[view.name][0]
        if self.facts.written.get(view.name):
            return value
        if _is_always_empty(view, self.facts):
            return before
        if name == "getitem":
            bounds = _part_bounds(view, self.facts)
            parts = view.args[0]
            assert bounds is not None
            assert isinstance(parts, fx.Node)
            if operator_name(parts) == "unbind":
                row = (_dim(parts, 1), bounds[0])
                return self._scattered(_ATEN.select_scatter.default, before, value, row, writer)
            rows = (_dim(parts, 2), *bounds)
            return self._scattered(_ATEN.slice_scatter.default, before, value, rows, writer)
        if _is_all_of(view, base, self.facts):
            if name in _RESHAPES:
                return self._emit(_ATEN.reshape_as.default, (value, before), writer)
            if name in _SAME_ELEMENTS:
                return value
        rest = fx.node.map_arg(view.args[1:], self._now)
        if name == "permute":
            order: Any = rest[0]
            inverse = [
                order.index(i) if i in order else order.index(i - len(order)) for i in range(len(order))
            ]
            return self._emit(_ATEN.permute.default, (value, inverse), writer)
        if name in {"transpose", "t"}:
            return self._emit(view.target, (value, *rest), writer)
        return self._scattered(_SCATTERS[name], before, value, tuple(rest), writer)

    def _scattered(
        self, scatter: Any, before: fx.Node, value: fx.Node, where: tuple[Any, ...], writer: fx.Node
    ) -> fx.Node:
        """Emits a scatter, of pairs for complex numbers: torch has no derivative of complex scatters."""
        known = before.meta.get("val")
        if known is None or not known.is_complex():
            return self._emit(scatter, (before, value, *where), writer)
        dimension = where[0] if where else 0
        place = (dimension if dimension >= 0 else dimension - 1, *where[1:])
        pairs = [self._pairs(node, writer) for node in (before, value)]
        return self._emit(
            _ATEN.view_as_complex.default, (self._emit(scatter, (*pairs, *place), writer),), writer
        )

    def _pairs(self, node: fx.Node, writer: fx.Node) -> fx.Node:
        if node.meta["val"].is_conj():
            node = self._emit(_ATEN.resolve_conj.default, (node,), writer)
        return self._emit(_ATEN.view_as_real.default, (node,), writer)

    def _emit(self, target: Any, args: Any, like: fx.Node, kwargs: Any = None) -> fx.Node:
        name = target._opname
        node = self.graph.create_node("call_function", target, tuple(args), kwargs or {}, name=name)
        node.meta = {key: value for key, value in like.meta.items() if key != "val"}
        fakes = fx.node.map_arg((node.args, dict(node.kwargs)), lambda arg: arg.meta.get("val"))
        mode = next((v.fake_mode for v in fakes[0] if isinstance(v, torch._subclasses.FakeTensor)), None)
        if mode is not None:
            # Torch's Python kernels are used: some of those in C++ accept no open sizes.
            with mode, enable_python_dispatcher(), torch.no_grad():
                node.meta["val"] = target(*fakes[0], **fakes[1])
        return node
