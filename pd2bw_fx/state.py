"""A model's tensors: by their names in the graph, once each, and as the model's own state_dict has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from pd2bw_fx.errors import InputError
from pd2bw_fx.graph import OperatorGraph, ParameterSpec


def as_state_dict(specs: Iterable[ParameterSpec], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Keys, shapes and ties of the original model's own state_dict."""
    return {
        name: tensors[spec.name]
        for spec in specs
        if spec.persistent
        for name in (spec.name, *spec.tied_names)
    }


def accepted(graph: OperatorGraph, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By name in the graph, and in the model's types, what is given under these or tied names.

    Raises InputError for a name that the model does not have, another shape, and unlike values under the
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
            raise InputError(f"{graph.model_name} has no tensor named {name!r}")
        if spec.persistent and tuple(tensor.shape) != spec.spec.example_shape:
            raise InputError(
                f"{name!r} has shape {tuple(tensor.shape)}, and {graph.model_name}'s has "
                f"{spec.spec.example_shape}"
            )
        own = tensor.detach().to(spec.spec.dtype)
        other = taken.setdefault(spec.name, own)
        if other is not own and not torch.equal(other, own):
            names = ", ".join((spec.name, *spec.tied_names))
            raise InputError(
                f"{name!r} is given other values than it has by another name; of one are {names}"
            )
    return taken
