"""`resize_`, which has no functional form: a tensor that is only made to be resized is made at that size.

e = empty((0,)); resize_(e, (n, 1))  ->  empty((n, 1))
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from pd2bw_fx.errors import TraceError

from .describe import source_line
from .lift import Draft
from .nodes import operator_name

_ATEN = torch.ops.aten
_WITHOUT_VALUES = {"empty", "new_empty", "empty_like"}


def make_at_their_size(draft: Draft) -> None:
    """Removes `resize_` and `resize_as_`; raises TraceError where they resize a tensor with values."""
    position = {node: place for place, node in enumerate(draft.graph.nodes)}
    for node in position:
        if node.op != "call_function" or operator_name(node) not in {"resize_", "resize_as_"}:
            continue
        before = node.args[0]
        assert isinstance(before, fx.Node)
        with draft.graph.inserting_before(node):
            same = _of_its_size(draft.graph, node, before, position)
        if same is None:
            raise TraceError(
                f"the forward gives a tensor that has values another number of them by {operator_name(node)} "
                f"({source_line(node.meta.get('stack_trace'))}), which leaves in it what its memory has; "
                "expected one without values: make another, x.new_empty(size), or take a part, x[:size]"
            )
        same.meta = dict(node.meta)
        later = {user for user in before.users if position.get(user, -1) > position[node]}
        node.replace_all_uses_with(same)
        before.replace_all_uses_with(same, delete_user_cb=later.__contains__)
        draft.graph.erase_node(node)


def _of_its_size(
    graph: fx.Graph, node: fx.Node, before: fx.Node, position: dict[fx.Node, int]
) -> fx.Node | None:
    value, resized = before.meta.get("val"), node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not isinstance(resized, torch.Tensor):
        return None
    is_like, given = operator_name(node) == "resize_as_", node.args[1]
    is_first = all(position.get(user, -1) >= position[node] for user in before.users)
    if statically_known_true(value.numel() == 0) or (operator_name(before) in _WITHOUT_VALUES and is_first):
        return _empty_like(graph, given, value) if is_like else _empty(graph, before, given)
    if statically_known_true(value.numel() == resized.numel()) and value.is_contiguous():
        return graph.call_function(_ATEN.view_as.default if is_like else _ATEN.view.default, (before, given))
    return None


def _empty(graph: fx.Graph, before: fx.Node, size: Any) -> fx.Node:
    if operator_name(before) == "empty":
        return graph.call_function(before.target, (size,), before.kwargs)  # type: ignore[arg-type]
    if operator_name(before) == "new_empty":
        return graph.call_function(_ATEN.new_empty.default, (before.args[0], size), before.kwargs)
    return graph.call_function(_ATEN.new_empty.default, (before, size))


def _empty_like(graph: fx.Graph, other: Any, value: torch.Tensor) -> fx.Node | None:
    """Emits an empty contiguous tensor of the other's size and the value's type; None if it cannot be one."""
    like = other.meta.get("val")
    if not isinstance(like, torch.Tensor) or like.device != value.device or not like.is_contiguous():
        return None
    return graph.call_function(
        _ATEN.empty_like.default, (other,), {} if like.dtype == value.dtype else {"dtype": value.dtype}
    )
