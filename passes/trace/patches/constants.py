"""Values of tensors that the model computes from nothing but constants.

times = torch.linspace(0, 4, 5)
steps = torch.ceil((times[-1] - times[0]) / 0.5).item()      8, in every call

sizes = torch.tensor([(4, 4), (2, 2)])
parts = x.split([height * width for height, width in sizes], 1)      16 and 4, for which torch itself asks
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx, nn
from torch._C import TensorBase
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from pd2bw_fx.program import written_by_schema

_TRUTH = torch.ops.aten.is_nonzero.default
_ASKING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_ASKING_UNTAGGED = {
    _TRUTH,
    torch.ops.aten.repeat_interleave.self_Tensor,
    torch.ops.aten.nonzero_numpy.default,
    torch.ops.aten.where.default,
    torch.ops.aten.combinations.default,
}
_LIFTED = torch.ops.aten.lift_fresh_copy.default
_COPIED = (_LIFTED, torch.ops.aten.clone.default)
_OF_SIZES = (  # what depends on the sizes of an operand, and not on its values
    torch.ops.aten.sym_size.int,
    torch.ops.aten.sym_numel.default,
    torch.ops.aten.zeros_like.default,
    torch.ops.aten.ones_like.default,
)
_TRIED = (2, 3, 8, 65)  # sizes to compare outcomes at
_torchs: Callable[..., Any] = proxy_tensor.proxy_call


@contextmanager
def fold_constants() -> Iterator[None]:
    """Makes numbers of constants plain numbers while torch traces, whoever asks (for a size, for an index).

    Operators on constants are computed where the shape of the result depends on values
    (`unique_consecutive`).
    """

    def call(mode: Any, func: Any, pre_dispatch: bool, args: Any, kwargs: Any) -> Any:
        asks = func in _ASKING_UNTAGGED or _ASKING & set(func.tags)
        if asks and not func._schema.is_mutable:
            results = _results(func, args, kwargs, mode)
            if results is not None:
                return pytree.tree_map_only(
                    Tensor, lambda t: _torchs(mode, _LIFTED, pre_dispatch, (t,), {}), results
                )
        return _torchs(mode, func, pre_dispatch, args, kwargs)

    with patch.object(proxy_tensor, "proxy_call", call):
        yield


def constant_number(tensor: Tensor) -> Any:
    """Returns the number that a tensor of one element holds in every call, or None if it may change.

    It may where it depends on an input, on a random number, or on what stays from call to call.
    """
    mode = get_proxy_mode()
    return None if mode is None else _results(TensorBase.item, (tensor,), {}, mode)


def outcomes_by_size(tensor: Tensor) -> set[bool] | None:
    """Returns how a condition comes out at several sizes, or None if it depends on more than sizes.

    mask = torch.zeros(x.shape[:2]); if mask.any():      {False}
    """
    mode: Any = get_proxy_mode()
    slot = None if mode is None else get_proxy_slot(tensor, mode.tracer, None)
    if slot is None:
        return None
    found = _made_by(slot.proxy.node, until=_OF_SIZES)
    sized = {node for node in found if node.target in _OF_SIZES}
    if any(free_unbacked_symbols(node.meta["val"]) for node in sized):
        return None
    if any(map(_is_none_of_constants, found - sized)):
        return None
    with _outside_of_the_trace():
        try:
            values = [
                _computed(slot.proxy.node, found, mode.tracer.root, {n: _at(n, size) for n in sized})
                for size in _TRIED
            ]
        except Exception:  # there need not be an outcome at all of these sizes
            return {False, True}
    return None if any(value is None for value in values) else set(map(bool, values))


def _at(node: fx.Node, size: int) -> Any:
    """Returns the value of a node of `_OF_SIZES` where all open sizes are this one."""
    value = node.meta["val"]
    if not isinstance(value, Tensor):
        return _number_at(value, size)
    shape = [_number_at(extent, size) for extent in value.shape]
    return (torch.zeros if node.target is torch.ops.aten.zeros_like.default else torch.ones)(
        shape, dtype=value.dtype
    )


def _number_at(value: Any, size: int) -> int:
    if not isinstance(value, torch.SymInt):
        return int(value)
    expression = value.node.expr
    return int(expression.subs(dict.fromkeys(expression.free_symbols, size)))


def _results(func: Any, args: Any, kwargs: Any, mode: Any) -> Any:
    """Returns the results of the operator on constants, or None where an operand is no constant."""
    leaves, form = pytree.tree_flatten((args, kwargs))
    with _outside_of_the_trace():
        values = [_value(leaf, mode) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        if any(value is None and leaf is not None for value, leaf in zip(values, leaves, strict=True)):
            return None
        known_args, known_kwargs = pytree.tree_unflatten(values, form)
        return func(*known_args, **known_kwargs)


@contextmanager
def _outside_of_the_trace() -> Iterator[None]:
    """Switches the tracer's modes off, which would take the constants for a part of the model."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield


def _value(tensor: Tensor, mode: Any) -> Tensor | None:
    slot = get_proxy_slot(tensor, mode.tracer, None)
    if slot is None:
        return _held(tensor, mode.tracer)
    node: fx.Node = slot.proxy.node
    if any(map(_is_none_of_constants, _sources(node))):
        return None
    made_by = _made_by(node)
    return None if any(map(_is_none_of_constants, made_by)) else _computed(node, made_by, mode.tracer.root)


def _held(tensor: Tensor, tracer: Any) -> Tensor | None:
    """Returns a copy of a tensor that the model keeps in a plain attribute, unless the program writes it."""
    if type(tensor) is not Tensor or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return None
    nodes = tracer.graph.find_nodes(op="get_attr")
    held = {node for node in nodes if getattr(tracer.root, str(node.target), None) is tensor}
    written = (place for node in tracer.graph.nodes for place in written_by_schema(node))
    return None if any(held & _sources(place) for place in written) else tensor.clone()


def _made_by(node: fx.Node, until: Sequence[Any] = ()) -> set[fx.Node]:
    """Returns the nodes that `node` is computed from, with those that write to any of them."""
    found, new = set[fx.Node](), _sources(node, until)
    while new - found:
        found |= new
        writers = (
            other
            for other in node.graph.nodes
            if other not in found and any(found & _sources(place) for place in written_by_schema(other))
        )
        new = {source for writer in writers for source in _sources(writer, until)}
    return found


def _sources(node: fx.Node, until: Sequence[Any] = ()) -> set[fx.Node]:
    """Returns `node` and all nodes that it is computed from, without those behind calls of `until`."""
    found, left = set[fx.Node](), [node]
    while left:
        source = left.pop()
        if source not in found:
            found.add(source)
            left += () if source.target in until else source.all_input_nodes
    return found


def _is_none_of_constants(node: fx.Node) -> bool:
    return node.op not in ("get_attr", "call_function") or _draws(node) or _writes_what_stays(node)


def _draws(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _writes_what_stays(node: fx.Node) -> bool:
    """Whether the node writes to what the next call finds, as `self.calls += 1` does."""
    if node.target is torch.ops.aten.detach_.default:  # called on every constant; changes no value
        return False
    places = written_by_schema(node)
    return any(source.op == "get_attr" for place in places for source in _sources(place, until=_COPIED))


def _computed(
    node: fx.Node, made_by: Set[fx.Node], root: nn.Module, given: Mapping[fx.Node, Any] | None = None
) -> Tensor | None:
    values = dict[fx.Node, Any](given or {})
    for source in node.graph.nodes:
        if source not in made_by or source in values:
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
