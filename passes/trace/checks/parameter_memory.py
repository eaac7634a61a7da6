"""Tensors in the memory of a parameter that are not the parameter itself.

In the model such a tensor follows the training of the parameter. No stage could reproduce that.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from pd2bw_fx.errors import InputError, TraceError
from pd2bw_fx.traced import Traced

_Extent = tuple[int, int]  # the first address, and the one after the last


def parameter_in_memory_of(tensors: Iterable[Any], model: nn.Module) -> str | None:
    """Returns the first trainable parameter that shares memory with, or is, one of the tensors."""
    trained = [
        (name, _extent(parameter)) for name, parameter in model.named_parameters() if parameter.requires_grad
    ]
    for tensor in tensors:
        own = _extent(tensor)
        for name, extent in trained:
            if own is not None and extent is not None and _overlap(own, extent):
                return name
    return None


def require_memory_apart(traced: Traced) -> None:
    """Raises InputError if a trace reads a trainable parameter and another tensor in its memory."""
    read, model = _read(traced), traced.model
    pair = _in_one_memory(
        (name, tensor)
        for name, tensor in (*model.named_buffers(), *model.named_parameters())
        if id(tensor) in read
    )
    if pair is not None:
        parameter, other = pair
        raise InputError(
            f"{other!r} is in the memory of the parameter {parameter!r}, but another tensor: training one "
            "would change the other in the model, and not in the stages. Assign the parameter itself to tie "
            "them (b.weight = a.weight), or give it a copy (.clone())"
        )


def _in_one_memory(named: Iterable[tuple[str, Tensor]]) -> tuple[str, str] | None:
    """Returns the names of the first trainable parameter and other tensor that share memory, or None."""
    known = [(extent, name, t.requires_grad) for name, t in named if (extent := _extent(t)) is not None]
    # By whether it is trained: the tensor so far that ends last.
    ends_last: dict[bool, tuple[_Extent, str]] = {}
    for extent, name, is_trained in sorted(known):
        for trained in (True, False):
            if trained in ends_last and (trained or is_trained) and _overlap(ends_last[trained][0], extent):
                other = ends_last[trained][1]
                return (other, name) if trained else (name, other)
        if is_trained not in ends_last or extent[1] > ends_last[is_trained][0][1]:
            ends_last[is_trained] = extent, name
    return None


def _read(traced: Traced) -> set[int]:
    """Returns the identities of the parameters and buffers that a trace reads."""
    program, model = traced.program, traced.model
    state = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    named = {f"{traced.prefix}{name}": tensor for name, tensor in state}
    if isinstance(program, ExportedProgram):
        read = {node.name for node in program.graph.find_nodes(op="placeholder") if node.users}
        names = [spec.target for spec in program.graph_signature.input_specs if spec.arg.name in read]
    else:
        whole = [str(node.target) for node in program.graph.find_nodes(op="call_module")]
        names = [str(node.target) for node in program.graph.find_nodes(op="get_attr")]
        names += [name for name in named for module in whole if name.startswith(f"{module}.")]
    return {id(named[name]) for name in names if name in named}


def require_untrained(constants: Iterable[Any], model: nn.Module) -> None:
    """Raises TraceError for a constant of a trace that is in the memory of a parameter."""
    parameter = parameter_in_memory_of(constants, model)
    if parameter is not None:
        raise TraceError(
            f"the forward reads a tensor in the memory of the parameter {parameter!r} that is not the "
            "parameter itself (.data or .detach() of it, or a part, kept in an attribute): it changes in "
            f"training, and a trace would keep its values; write self.{parameter}.detach() in the forward"
        )


def _overlap(one: _Extent, other: _Extent) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def _extent(tensor: Any) -> _Extent | None:
    """Returns the addresses of a tensor's memory; None if it has none, or leaves gaps for other tensors."""
    if type(tensor) not in (Tensor, nn.Parameter):  # a fake or quantized tensor, for example
        return None
    if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
        return None
    length = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if length != tensor.numel():
        return None
    return tensor.data_ptr(), tensor.data_ptr() + length * tensor.element_size()
