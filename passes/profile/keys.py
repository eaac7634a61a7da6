"""Keys of calls: with the same key they take equally long. One with ONLY_HERE in it is of this run alone."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from torch import Tensor, fx, nn

from pd2bw_fx.custom_function import custom_function
from pd2bw_fx.drawing import Operator
from pd2bw_fx.source_check import NAMESPACES_OF_TORCH

ONLY_HERE = "only in this process"


def key_of(
    node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any], *, layer: nn.Module | None
) -> Hashable:
    """Returns a key that is equal for calls of the same operator, sizes, types and constants.

    `layer` is what the call of a module calls.
    """
    regions = (node.meta.get("no_grad"), node.meta.get("autocast"))
    return (_called(node, layer), _described(tuple(args)), _described(dict(kwargs)), regions)


def _described(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return (tuple(value.shape), value.stride(), value.dtype, value.requires_grad)
    if isinstance(value, list | tuple):
        return tuple(_described(item) for item in value)
    if isinstance(value, dict):
        return tuple((key, _described(item)) for key, item in value.items())
    return (type(value), str(value))


def _called(node: fx.Node, layer: nn.Module | None) -> Hashable:
    """Returns a key for what is called.

    Only torch's own operators, functions and layers are known by their names. All other code may be
    changed before the next run, so its key begins with ONLY_HERE.
    """
    if layer is not None:
        if not type(layer).__module__.startswith("torch."):
            return (ONLY_HERE, node.name)
        state = [(name, tuple(t.shape), t.dtype) for name, t in layer.state_dict(keep_vars=True).items()]
        return (repr(layer), layer.training, tuple(state))
    if isinstance(node.target, str):
        return node.target
    if isinstance(node.target, Operator):
        return str(node.target) if _is_torchs(node.target) else (ONLY_HERE, str(node.target))
    module = getattr(node.target, "__module__", None) or ""
    name = f"{module}.{getattr(node.target, '__name__', node.name)}"
    return name if module.partition(".")[0] in ("torch", "_operator") else (ONLY_HERE, name)


def _is_torchs(operator: Operator) -> bool:
    """Returns whether an operator is torch's own, or made of torch's own with their hash in its name."""
    function = custom_function(operator)
    if function is not None:
        targets = [node.target for graph in (function.forward, function.backward) for node in graph.nodes]
        return all(_is_torchs(target) for target in targets if isinstance(target, Operator))
    return str(operator).partition(".")[0] in NAMESPACES_OF_TORCH  # "aten" of aten.add.Tensor
