"""Regions of an exported program that `torch.vmap` maps, rewritten as operators on whole batches.

torch.export leaves a mapped function as its author wrote it, between two calls that change the meaning of
every operator in between. No stage could begin or end there, and nobody could read it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch._C import _functorch
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils import _pytree as pytree

_OF_TRANSFORMS = "torch._functorch.predispatch"
_IDLE = "lazy_load_decompositions"
_OPENS, _CLOSES = "_vmap_increment_nesting", "_vmap_decrement_nesting"
# Operators with the same values and gradients, by the names that people use.
_PLAIN = MappingProxyType(
    {
        torch.ops.aten._unsafe_view.default: torch.ops.aten.view.default,
        torch.ops.aten._softmax.default: torch.ops.aten.softmax.int,
        torch.ops.aten._log_softmax.default: torch.ops.aten.log_softmax.int,
    }
)


def write_out_vmap(module: fx.GraphModule) -> None:
    """Rewrites every mapped region of an exported program.

    Raises what torch raises where it cannot map an operator over batches of an open size.
    """
    for part in _parts_with_transforms(module):
        _write_out_each(part)
        part.recompile()


def has_transforms(module: fx.GraphModule) -> bool:
    return any(True for _ in _parts_with_transforms(module))


def _parts_with_transforms(module: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """Yields the module and those of its `with` blocks that call a transform of torch.func."""
    for part in module.modules():
        if isinstance(part, fx.GraphModule) and any(_transform(node) for node in part.graph.nodes):
            yield part


def _write_out_each(module: fx.GraphModule) -> None:
    region: list[fx.Node] = []
    depth = 0
    for node in list(module.graph.nodes):
        name = _transform(node)
        if name == _IDLE:
            module.graph.erase_node(node)
            continue
        depth += (name == _OPENS) - (name == _CLOSES)
        if depth or name == _CLOSES:
            region.append(node)
        if region and not depth:
            _write_out(module, region)
            region = []


def _transform(node: fx.Node) -> str:
    is_one = getattr(node.target, "__module__", None) == _OF_TRANSFORMS
    return str(getattr(node.target, "__name__", "")) if is_one else ""


def _write_out(module: fx.GraphModule, region: Sequence[fx.Node]) -> None:
    inside = set(region)
    outside = [node for user in region for node in user.all_input_nodes if node not in inside]
    read = [
        node for node in dict.fromkeys(outside) if node.op != "get_attr"
    ]  # get_attr: the body of a `with`
    results = [node for node in region if not node.users.keys() <= inside]
    body = fx.Graph()
    copies = {node: body.placeholder(node.name) for node in read}
    for node in (*(node for node in dict.fromkeys(outside) if node.op == "get_attr"), *region):
        copies[node] = body.node_copy(node, copies.__getitem__)
    body.output([copies[node] for node in results])
    # A mapped layer is not the layer's own function: its operators belong to the module that maps it.
    place = {key: region[0].meta[key] for key in ("nn_module_stack",) if key in region[0].meta}
    place["of_map"] = True
    written = _traced(fx.GraphModule(module, body), [node.meta["val"] for node in read], place)

    with module.graph.inserting_before(region[0]):
        new = dict(zip(written.find_nodes(op="placeholder"), read, strict=True))
        for node in written.nodes:
            if node.op == "call_function":
                new[node] = in_plain_words(module.graph.node_copy(node, new.__getitem__))
    returned: Any = written.output_node().args[0]
    for node, result in zip(results, returned, strict=True):
        node.replace_all_uses_with(new[result])
    for node in reversed(region):
        module.graph.erase_node(node)


def in_plain_words(node: fx.Node) -> fx.Node:
    """Renames the node's operator, where torch has run an internal one, to the one that people use."""
    plain = _PLAIN.get(node.target) if isinstance(node.target, torch._ops.OpOverload) else None
    if plain is not None and not any(
        argument is True for argument in node.args
    ):  # a softmax that converts to float32
        node.target = plain
        node.args = tuple(argument for argument in node.args if argument is not False)
    return node


def _traced(module: fx.GraphModule, values: Sequence[Any], place: dict[str, Any]) -> fx.Graph:
    """Traces what runs below the map; each operator has the source line of the one that it comes from."""

    def run(*operands: Any) -> Any:
        return _Mapped(module, place).run(*operands)

    detached = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, list(values))
    with _end_transforms():
        graph: fx.Graph = make_fx(run)(*detached).graph
    graph.eliminate_dead_code()
    return graph


@contextmanager
def _end_transforms() -> Iterator[None]:
    """Leaves all levels of transforms afterwards: an error in a region would leave torch inside one."""
    depth = _functorch.get_dynamic_layer_stack_depth()
    try:
        yield
    finally:
        _functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)


class _Mapped(fx.Interpreter):
    """Interprets a region; each new node gets the metadata `place`, beside its value and source line."""

    def __init__(self, module: fx.GraphModule, place: dict[str, Any]) -> None:
        super().__init__(module)
        self.place = place

    def run_node(self, n: fx.Node) -> Any:
        mode = get_proxy_mode()
        assert mode is not None
        graph = mode.tracer.graph
        before = len(graph.nodes)
        value = super().run_node(n)
        line = {key: n.meta[key] for key in ("stack_trace",) if key in n.meta}
        for node in list(graph.nodes)[before:]:
            node.meta.update(self.place | line)
        return value

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        name = getattr(target, "__name__", "")
        if name == "wrap_with_set_grad_enabled":
            enabled, body, *operands = args
            return _Mapped(body, {**self.place, "no_grad": not enabled}).run(*operands)
        if name == "wrap_with_autocast":
            device_type, dtype, enabled, cache_enabled, body, *operands = args
            # Its casts become operators of their own.
            with torch.autocast(device_type, dtype, enabled, cache_enabled):
                return _Mapped(body, self.place).run(*operands)
        return super().call_function(target, args, kwargs)
