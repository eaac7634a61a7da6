"""Attributes that an author sets on parameters and buffers, such as `weight.org` in a binary network.

A trace has other tensors in their places, without these attributes: a forward that asks for one would take
the branch of a first call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from pd2bw_fx.errors import TraceError


def _of_fake_tensors() -> frozenset[str]:
    """Returns the attributes that torch itself sets on a fake tensor."""
    with FakeTensorMode() as mode:
        return frozenset(vars(mode.from_tensor(torch.empty(1))))


_OF_TORCH = _of_fake_tensors()


def attributes_on(tensor: Any) -> dict[str, Any]:
    """Returns what was set on a parameter or buffer; nothing for subclasses, which keep their parts there."""
    if type(tensor) not in (torch.Tensor, nn.Parameter) and not isinstance(tensor, FakeTensor):
        return {}
    return {name: value for name, value in vars(tensor).items() if name not in _OF_TORCH}


@contextmanager
def carry_attributes(
    originals: Mapping[str, torch.Tensor], current: Mapping[str, torch.Tensor]
) -> Iterator[None]:
    """Gives fake tensors the attributes of the originals in whose places they are.

    Afterwards these attributes, and those that the forward has set meanwhile, are removed.
    """
    instead = [(originals[name], tensor) for name, tensor in current.items() if name in originals]
    traced = [(original, tensor) for original, tensor in instead if isinstance(tensor, FakeTensor)]
    before = [(tensor, attributes_on(tensor)) for _, tensor in traced]
    try:
        for original, tensor in traced:
            vars(tensor).update(attributes_on(original))
        yield
    finally:
        for tensor, attributes in before:
            for name in attributes_on(tensor).keys() - attributes.keys():
                del vars(tensor)[name]


def require_none_read(constants: Iterable[Any], model: nn.Module) -> None:
    """Raises TraceError for a constant of a trace that is an attribute of a parameter or buffer."""
    kept = {
        id(value): f"{name}.{attribute}"
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        for attribute, held in attributes_on(tensor).items()
        for value in tree_leaves(held)
        if isinstance(value, torch.Tensor)
    }
    for constant in constants:
        if id(constant) in kept:
            raise set_on_a_tensor(kept[id(constant)])


def set_on_a_tensor(name: str) -> TraceError:
    """Returns the error for the attribute `name`: the tensor's name, a dot and the attribute's."""
    tensor, _, attribute = name.rpartition(".")
    return TraceError(
        f"the forward computes with {attribute!r}, which is an attribute of {tensor!r} itself; stages have "
        "parameters and buffers with nothing on them, and would keep what is there now for ever. Make it a "
        "parameter or buffer of the module; weights that are binarized in each call stay as they are, and "
        "the forward computes with w + (w.sign() - w).detach()"
    )
