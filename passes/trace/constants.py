"""Tensors that a trace has made of nothing but constants, and their values.

times = torch.linspace(0, 4, 5)
steps = torch.ceil((times[-1] - times[0]) / 0.5).item()      8, in every call
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._C import TensorBase
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils._python_dispatch import _disable_current_modes

from pd2bw_fx.program import written_by_schema


def constant_number(tensor: Tensor) -> Any:
    """What a tensor of one element in the trace holds; None where an input, a draw, or what stays from call
    to call may have made it another one."""
    mode: Any = get_proxy_mode()
    slot = None if mode is None else get_proxy_slot(tensor, mode.tracer, None)
    if slot is None:
        return None
    node: fx.Node = slot.proxy.node
    made_by = _made_by(node)
    if any(_is_none_of_constants(source) for source in made_by):
        return None
    # The tracer's modes would take the constants for a part of the model.
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        value = _computed(node, made_by, mode.tracer.root)
        return None if value is None else TensorBase.item(value)


def _made_by(node: fx.Node) -> set[fx.Node]:
    """What it is computed from, and what has written any of that."""
    found, new = set[fx.Node](), _sources(node)
    while new - found:
        found |= new
        writers = (
            other
            for other in node.graph.nodes
            if other not in found and any(found & _sources(place) for place in written_by_schema(other))
        )
        new = {source for writer in writers for source in _sources(writer)}
    return found


def _sources(node: fx.Node) -> set[fx.Node]:
    found, left = set[fx.Node](), [node]
    while left:
        source = left.pop()
        if source not in found:
            found.add(source)
            left += source.all_input_nodes
    return found


def _is_none_of_constants(node: fx.Node) -> bool:
    return node.op not in ("get_attr", "call_function") or _draws(node) or _writes_what_stays(node)


def _draws(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _writes_what_stays(node: fx.Node) -> bool:
    """`self.calls += 1`: what is there in the next call."""
    if node.target is torch.ops.aten.detach_.default:  # of every constant, and changes no value
        return False
    return any(source.op == "get_attr" for place in written_by_schema(node) for source in _sources(place))


def _computed(node: fx.Node, made_by: Set[fx.Node], root: nn.Module) -> Tensor | None:
    values = dict[fx.Node, Any]()
    for source in node.graph.nodes:
        if source not in made_by:
            continue
        if source.op == "call_function":
            function: Callable[..., Any] = source.target
            args, kwargs = fx.map_arg((source.args, source.kwargs), values.__getitem__)
            values[source] = function(*args, **kwargs)
            continue
        held = getattr(root, str(source.target), None)
        if not isinstance(held, Tensor) or isinstance(held, FakeTensor):
            return None
        values[source] = held.clone()
    value = values[node]
    return value if isinstance(value, Tensor) else None
