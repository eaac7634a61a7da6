"""Removes what only the tracer needed: assertions, guards, identity casts, dead code."""

from __future__ import annotations

from collections.abc import Sequence
from operator import getitem
from typing import Any, cast

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .casts import CASTS
from .facts import Facts
from .lift import Draft
from .nodes import asserts_assumption, is_random, operator_name, put_in_place

_GUARDS = {
    "_assert_tensor_metadata",
    "_assert_async",
    "_assert_scalar",
    "_functional_assert_async",
    "_functional_assert_scalar",
    "sym_constrain_range",
    "sym_constrain_range_for_size",
    "_check",
    "_assert",
}
_PUTTING = (
    torch.ops.aten.select_scatter.default,
    torch.ops.aten.slice_scatter.default,
    torch.ops.aten.diagonal_scatter.default,
)


def remove_guards(draft: Draft) -> None:
    for node in reversed(list(draft.graph.nodes)):
        is_guard = node.op == "call_function" and operator_name(node) in _GUARDS
        if is_guard and not node.users and not asserts_assumption(node):
            draft.graph.erase_node(node)


def remove_identities(draft: Draft, facts: Facts) -> None:
    """Removes operators that return their operand's values and gradient.

    These are aliases, casts to the tensor's own type, reshapes that lead back to a shape, pairs of
    transpositions, `cat` of a single part, and what puts a part where it is already. Others stay: casts that
    do something under autocast, copies of memory that is written, and whatever stops a gradient, as every new
    tensor or view does under `no_grad`. The 1 of `x / 2**i` stays too, beside rounds with other numbers.
    """
    counted = _lines_with_other_numbers(draft)
    written, differentiated = _written_storages(facts), _written_storages(facts, with_gradients=True)
    for node in list(draft.graph.nodes):
        if node.op != "call_function":
            continue
        if operator_name(node) == "detach" and facts.storages[node.name] & differentiated:
            continue  # without `detach` the memory itself would become part of the autograd graph
        if _line_with_number(node) in counted:
            continue
        same = _same_before(node, facts)
        if same is None or facts.requires_grad(same.name) != facts.requires_grad(node.name):
            continue
        if _may_copy(node, same, facts) and (facts.storages[node.name] | facts.storages[same.name]) & written:
            continue
        if node.target is torch.ops.aten.cat.default and not _lies_in_order(same, facts):
            _put_in_order(node, same)
        else:
            put_in_place(node, same)


_WITH_NUMBERS = {"add": 0, "mul": 1, "div": 1}  # the number that changes nothing


def _line_with_number(node: fx.Node) -> tuple[str, str] | None:
    """Returns the author's lines that lead to an operator with a number, and its name."""
    name = operator_name(node) if node.op == "call_function" else ""
    lines = node.meta.get("stack_trace")
    is_with = name in _WITH_NUMBERS and len(node.args) == 2 and isinstance(node.args[1], int | float)
    return (lines, name) if lines and is_with else None


def _lines_with_other_numbers(draft: Draft) -> set[tuple[str, str]]:
    found = ((_line_with_number(node), node) for node in draft.graph.nodes)
    return {line for line, node in found if line is not None and node.args[1] != _WITH_NUMBERS[line[1]]}


def _same_before(node: fx.Node, facts: Facts) -> fx.Node | None:
    """Returns the earlier node that has the same value as `node`, or None."""
    if _is_identity(node, facts):
        return node.all_input_nodes[0]
    if operator_name(node) == "t" and operator_name(node.all_input_nodes[0]) == "t":
        return node.all_input_nodes[0].all_input_nodes[0]
    if node.target is torch.ops.aten.cat.default:
        return _only_part(node)
    if node.target in _PUTTING and _is_put_already(node):
        return cast(fx.Node, node.args[0])
    same = _of_the_same_shape_before(node)
    if any(operator_name(reader) == "embedding_bag" for reader in node.users):
        return None  # F.embedding_bag makes bags of one word each by this
    return same


def _is_put_already(node: fx.Node) -> bool:
    """Whether the same was put there just before: `x[:, 0] += y` adds to the part, and then assigns it."""
    base = node.args[0] if node.args else None
    if not isinstance(base, fx.Node) or base.target is not node.target:
        return False
    return (base.args[1:], base.kwargs) == (node.args[1:], node.kwargs)


def _may_copy(node: fx.Node, same: fx.Node, facts: Facts) -> bool:
    """Whether the node may have memory of its own: it does on the example, or is several reshapes away."""
    return facts.storages[node.name] != facts.storages[same.name] or same not in node.all_input_nodes


def _put_in_order(cat: fx.Node, part: fx.Node) -> None:
    """Replaces `cat` of one part by `contiguous`: the result is contiguous, even of a transposed part."""
    cat.target, cat.args, cat.kwargs = torch.ops.aten.contiguous.default, (part,), {}


def remove_default_formats(draft: Draft) -> None:
    """Removes `memory_format=torch.preserve_format`, the default, which autograd writes in `ones_like`."""
    for node in draft.graph.nodes:
        is_default = node.kwargs.get("memory_format") is torch.preserve_format
        if is_default and operator_name(node).endswith("_like"):
            node.kwargs = {name: value for name, value in node.kwargs.items() if name != "memory_format"}


def even_bounds(draft: Draft) -> None:
    """Rewrites `x.clamp(0.01, 10)` of floats as `x.clamp(0.01, 10.0)`.

    Torch's ONNX export accepts only bounds of one type.
    """
    for node in draft.graph.nodes:
        value = node.meta.get("val")
        is_real = isinstance(value, torch.Tensor) and value.is_floating_point()
        if is_real and node.target in (torch.ops.aten.clamp.default, torch.ops.aten.clamp_.default):
            bounds = (*node.args[1:], *node.kwargs.values())
            if {type(bound) for bound in bounds if bound is not None} == {int, float}:
                node.args = (node.args[0], *map(_as_real, node.args[1:]))
                node.kwargs = {name: _as_real(bound) for name, bound in node.kwargs.items()}


def _as_real(bound: Any) -> Any:
    return float(bound) if type(bound) is int else bound


def separate_repeated_outputs(draft: Draft, facts: Facts) -> None:
    """Gives a value that the model returns twice an alias for each repetition."""
    output = draft.graph.output_node()
    results: list[Any] = list(cast("Sequence[Any]", output.args[0]))
    for place, value in enumerate(results):
        if isinstance(value, fx.Node) and value in results[:place]:
            with draft.graph.inserting_before(output):
                again = draft.graph.call_function(torch.ops.aten.alias.default, (value,))
            again.meta["val"] = value.meta.get("val")
            facts.values[again.name] = facts.values.get(value.name)
            facts.storages[again.name] = facts.storages.get(value.name, frozenset())
            facts.aliases[again.name] = (value,)
            if facts.requires_grad(value.name):
                facts.assumed_gradients.add(again.name)
            results[place] = again
    output.args = (tuple(results),)


def _is_identity(node: fx.Node, facts: Facts) -> bool:
    name, operand = operator_name(node), node.args[0] if node.args else None
    if not isinstance(operand, fx.Node) or not isinstance(node.target, torch._ops.OpOverload):
        return False
    if name in {"alias", "detach", "lift_fresh_copy"}:
        return True
    if name == "contiguous":
        return len(node.args) == 1 and not node.kwargs and _lies_in_order(operand, facts)
    before, after = operand.meta.get("val"), node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    if name in CASTS and not node.kwargs.get("copy") and node.kwargs.get("memory_format") is None:
        is_same = (before.dtype, before.device, before.layout) == (after.dtype, after.device, after.layout)
        return is_same and node.name not in facts.working_casts
    if before.dtype != after.dtype or _sizes(before) != _sizes(after):
        return False
    if name == "add":
        return node.args[1:] == (0,) and not node.kwargs and not _has_signed_zeros(before)
    if name in {"mul", "div"}:
        return node.args[1:] == (1,) and not node.kwargs
    return name in {"slice", "slice_backward", "view", "reshape", "expand"}


def _has_signed_zeros(value: torch.Tensor) -> bool:
    """Whether the tensor may hold -0.0, to which adding 0 gives 0.0."""
    return value.is_floating_point() or value.is_complex()


def _lies_in_order(node: fx.Node, facts: Facts) -> bool:
    known = (facts.values.get(node.name), node.meta.get("val"))
    in_order = all(_is_in_order(value) for value in known if isinstance(value, torch.Tensor))
    return in_order and not _is_turned_attention(node, facts)


def reshape_attended(draft: Draft, facts: Facts) -> None:
    """Rewrites `attended.transpose(1, 2).view(..)` as `reshape`.

    Which kernel attends decides how its result lies. Where the trace's lays it by rows, torch leaves the
    author's `contiguous` out of the trace, and the kernel of another device would have needed it.
    """
    written = _written_storages(facts)
    for node in draft.graph.nodes:
        is_view = node.target is torch.ops.aten.view.default
        if is_view and _is_turned_attention(node.args[0], facts) and not facts.storages[node.name] & written:
            node.target = torch.ops.aten.reshape.default


def _is_turned_attention(node: fx.Node, facts: Facts) -> bool:
    """Whether the value is a view of an attention's result that a `view` cannot take at all strides."""
    turned = operator_name(node) in _TURNING
    while operator_name(node) not in _IN_ORDER_ANYWHERE and (of := facts.aliases.get(node.name)):
        node = of[0]
        turned = turned or operator_name(node) in _TURNING
    return turned and operator_name(node) == "scaled_dot_product_attention"


_TURNING = {"transpose", "permute", "movedim", "swapaxes", "t", "numpy_T", "mT"}
_IN_ORDER_ANYWHERE = {"contiguous", "reshape", "flatten"}  # `reshape` copies where no view has the shape


def _is_in_order(value: torch.Tensor) -> bool:
    """Whether a tensor is contiguous by its strides: at any batch size, even if the example has one row."""
    expected: Any = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if not statically_known_true(stride == expected):
            return False
        expected = expected * size
    return True


def _of_the_same_shape_before(node: fx.Node) -> fx.Node | None:
    """Returns the node, before a chain of reshapes, that has the shape of `node`; None if there is none.

    There are such chains around a layer that is mapped.
    """
    shape, source = _sizes_and_type(node), node
    while shape is not None and source.op == "call_function" and operator_name(source) in _RESHAPES:
        before = source.args[0]
        if not isinstance(before, fx.Node):
            return None
        source = before
        if _sizes_and_type(source) == shape:
            return source
    return None  # also for programs by torch.fx, which knows no shapes


_RESHAPES = {"view", "reshape", "unsqueeze", "squeeze"}


def remove_true_terms(draft: Draft, facts: Facts) -> None:
    """Replaces `True & mask` by the mask: masks that are made of parts begin so."""
    written = _written_storages(facts)
    for node in list(draft.graph.nodes):
        if node.op != "call_function" or operator_name(node) not in {"__and__", "bitwise_and"}:
            continue
        term, mask = node.args[:2]
        if not _is_true(term) or not isinstance(mask, fx.Node):
            continue
        if (facts.storages[node.name] | facts.storages[mask.name]) & written:
            continue
        if _sizes_and_type(mask) == _sizes_and_type(node):
            put_in_place(node, mask)


def _is_true(term: object) -> bool:
    """Whether the term is a scalar True that nothing writes: a boolean `new_ones` that only `&` reads."""
    if not isinstance(term, fx.Node) or operator_name(term) != "new_ones":
        return False
    value = term.meta.get("val")
    read = all(operator_name(user) in {"__and__", "bitwise_and"} for user in term.users)
    return isinstance(value, torch.Tensor) and value.dtype == torch.bool and value.dim() == 0 and read


def _written_storages(facts: Facts, *, with_gradients: bool = False) -> set[int]:
    """Returns the memory that is written; with `with_gradients`, only by writers that a gradient flows to."""
    return {
        storage
        for writer, targets in facts.written.items()
        if not with_gradients or facts.requires_grad(writer)
        for node in targets
        for storage in facts.storages[node.name]
    }


def remove_broadcasts(draft: Draft) -> None:
    """Removes `torch.broadcast_tensors` where it changes nothing: losses call it even for equal sizes."""
    for node in list(draft.graph.nodes):
        source = node.args[0] if node.target is getitem else None
        if not isinstance(source, fx.Node) or operator_name(source) != "broadcast_tensors":
            continue
        if source.meta.get("no_grad"):
            continue  # a view that stops the gradient of its operand
        operand = source.args[0][node.args[1]]  # type: ignore[index]
        if isinstance(operand, fx.Node) and _sizes_and_type(operand) == _sizes_and_type(node):
            put_in_place(node, operand)


def remove_detached_constants(draft: Draft) -> None:
    """Removes `detach_` of constants: no gradient flows to them, and a write would tie readers together."""
    for node in list(draft.graph.nodes):
        operand = node.args[0] if node.args else None
        if operator_name(node) == "detach_" and isinstance(operand, fx.Node) and operand.op == "get_attr":
            value = draft.values[str(operand.target)]
            if isinstance(value, torch.Tensor) and not value.requires_grad:
                put_in_place(node, operand)


def fill_empty(draft: Draft) -> None:
    """Makes zeros of what `torch.empty` makes, if it is written part by part.

    A stage may send it on before all parts are written, and two runs must give the same.
    """
    for node in list(draft.graph.nodes):
        zeros = _ZEROS.get(operator_name(node)) if node.op == "call_function" else None
        if zeros is None or not any(operator_name(user) in _OF_PARTS for user in node.users):
            continue
        known = {argument.name for argument in zeros._schema.arguments}
        if node.kwargs.get("memory_format") is not None and "memory_format" not in known:
            continue
        with draft.graph.inserting_before(node):
            filled = draft.graph.call_function(
                zeros, node.args, {name: value for name, value in node.kwargs.items() if name in known}
            )
        filled.meta = dict(node.meta)
        put_in_place(node, filled)


_ZEROS = {
    "empty": torch.ops.aten.zeros.default,
    "new_empty": torch.ops.aten.new_zeros.default,
    "empty_like": torch.ops.aten.zeros_like.default,
}
_OF_PARTS = {"select", "slice", "diagonal", "index_put_", "index_copy_", "scatter_", "masked_scatter_"}


def _only_part(cat: fx.Node) -> fx.Node | None:
    """Returns the only part of `torch.cat`, or None; empty ones, with which caches begin, do not count."""
    parts = cat.args[0]
    assert isinstance(parts, list | tuple)
    nodes = [part for part in parts if isinstance(part, fx.Node)]
    full = [part for part in nodes if not _is_empty(part.meta.get("val"))]
    is_all = len(full) == 1 and _sizes_and_type(full[0]) == _sizes_and_type(cat)
    return full[0] if is_all and _sizes_and_type(cat) is not None else None


def _is_empty(value: object) -> bool:
    """Whether the tensor is 1-D and empty for every batch: a symbolic size never counts as 0."""
    if not isinstance(value, torch.Tensor) or value.ndim != 1:
        return False
    return isinstance(value.shape[0], int) and value.shape[0] == 0


def _sizes_and_type(node: fx.Node) -> tuple[list[str], torch.dtype] | None:
    value = node.meta.get("val")
    return (_sizes(value), value.dtype) if isinstance(value, torch.Tensor) else None


def _sizes(tensor: torch.Tensor) -> list[str]:
    return [str(size) for size in tensor.shape]


def remove_dead_code(draft: Draft, facts: Facts) -> None:
    """Removes nodes whose value nobody reads.

    These stay: nodes that write in place; modules that were not traced into, which may write their buffers;
    nodes that draw random numbers, without which later draws would differ; assertions that the trace holds.
    """
    for node in reversed(list(draft.graph.nodes)):
        is_needed = node.op in {"placeholder", "output", "call_module"} or node.users
        is_needed = is_needed or (node.op == "call_function" and is_random(node, None))
        is_needed = is_needed or asserts_assumption(node)
        if not is_needed and not facts.written.get(node.name):
            draft.graph.erase_node(node)
