"""A model's tensors: by name in the graph, once each, and in the form of the model's own state_dict."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor

from pd2bw_fx.errors import InputError
from pd2bw_fx.graph import OperatorGraph, ParameterSpec
from pd2bw_fx.names import did_you_mean

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by the bytes of an element


def as_state_dict(specs: Iterable[ParameterSpec], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns tensors with the keys, shapes and ties of the original model's own state_dict."""
    return {
        name: tensors[spec.name]
        for spec in specs
        if spec.persistent
        for name in (spec.name, *spec.tied_names)
    }


def state_of(tensor: Tensor) -> tuple[int, ...]:
    """Returns numbers that change with every write to a tensor: its place, and a sum and a hash of its bits.

    torch itself does not count the writes of fused optimizers, or those through `.data`.
    """
    where = tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version
    if tensor.is_meta or tensor.is_quantized or tensor.layout is not torch.strided or not tensor.numel():
        return where
    kind = _BITS.get(tensor.element_size(), torch.int64)
    bits = tensor.detach().resolve_conj().resolve_neg().contiguous().flatten().view(kind)
    order = int(torch.hash_tensor(bits).view(torch.int64)) if tensor.device.type == "cpu" else 0
    return *where, int(bits.sum()), order


def require_values(graph: OperatorGraph, tensors: Mapping[str, Tensor]) -> None:
    """Raises InputError naming a tensor that is still on the meta device."""
    empty = [name for name, tensor in tensors.items() if tensor.is_meta]
    if not empty:
        return
    more = f" and {len(empty) - 1} more" if len(empty) > 1 else ""
    kept = {spec.name for spec in (*graph.parameters.values(), *graph.buffers.values()) if spec.persistent}
    advice = "give them by load_state_dict, all at once or one file after another"
    if kept.isdisjoint(empty):
        advice = (
            "no state dict has them: load_state_dict(dict(model.named_buffers())) gives those of a model "
            "that is built on a device with memory"
        )
    raise InputError(f"{graph.model_name} has no values for {empty[0]!r}{more}, on the meta device; {advice}")


def require_scalar_loss(graph: OperatorGraph) -> None:
    """Raises InputError for a model whose loss is one number in a tensor of one dimension or more."""
    if graph.loss is not None:
        return
    for output in graph.outputs:
        specs = graph.operators[output.value].outputs if output.value in graph.operators else ()
        for spec in specs:
            shape = spec.example_shape
            if spec.requires_grad and shape and math.prod(shape) == 1:
                raise InputError(
                    f"what {graph.model_name} returns as {output.name.removeprefix('output_')!r} has shape "
                    f"{shape}, and is no loss; a scalar was expected: return its .mean()"
                )


def made_up(example: Mapping[str, Tensor], *, beside: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns values for inputs that have none, on the weights' device.

    They are normal numbers, the same each time, and zeros of types that are not floats.
    """
    device = next((tensor.device for tensor in beside.values()), torch.device("cpu"))
    drawn = torch.Generator().manual_seed(0)

    def values(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        if tensor.dtype.is_floating_point:
            return torch.randn(tensor.shape, generator=drawn, device="cpu").to(device, tensor.dtype)
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)

    return {name: values(tensor) for name, tensor in example.items()}


def accepted(graph: OperatorGraph, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the given tensors by name in the graph, in the model's types; tied names are accepted too.

    Raises InputError for a name that the model does not have, another shape, and different values under the
    names of one tied parameter.
    """
    specs = {
        name: spec
        for spec in (*graph.parameters.values(), *graph.buffers.values())
        for name in (spec.name, *spec.tied_names)
    }
    taken: dict[str, Tensor] = {}
    for name, tensor in given.items():
        spec = specs.get(name)
        if spec is None:
            raise InputError(f"{graph.model_name} has no tensor named {name!r}{_like(name, specs)}")
        if tuple(tensor.shape) != spec.spec.example_shape:
            raise InputError(
                f"{name!r} has shape {tuple(tensor.shape)}, and {graph.model_name}'s has "
                f"{spec.spec.example_shape}"
            )
        own = tensor.detach().to(spec.spec.dtype)
        other = taken.setdefault(spec.name, own)
        if other is not own and not torch.equal(other, own) and not same_bits(other, own):
            names = ", ".join((spec.name, *spec.tied_names))
            raise InputError(
                f"{name!r} is given other values than it has by another name; of one are {names}"
            )
    return taken


def _like(name: str, known: Collection[str]) -> str:
    """Returns which name was meant, for the end of a message: wrappers put prefixes in front of names."""
    own = max((each for each in known if name.endswith(f".{each}")), key=len, default=None)
    if own is not None:
        return f"; expected {own!r}, without the prefix {name.removesuffix(own)!r}"
    return did_you_mean(name, known)


def is_extra_state(name: str) -> bool:
    """Returns whether a key of a state_dict is for what a module's `get_extra_state` returned."""
    return name.rpartition(".")[2] == "_extra_state"


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors hold the same bits, so that a NaN equals itself."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    # A conjugate may be one by a mark alone, beside bits that are not its own.
    whole = (tensor.resolve_conj().resolve_neg().contiguous() for tensor in (one, other))
    return torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in whole))
