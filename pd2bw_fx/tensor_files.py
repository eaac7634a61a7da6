"""Tensors in safetensors files: in the memory order that they had, complex numbers too."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pd2bw_fx.strides import order_of, packed, unpacked
from pd2bw_fx.units import counted

_ORDERS, _COMPLEX = "orders", "complex"  # in a file's metadata


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Writes a safetensors file, which is readable for those who may read other files of this process. Raises
    OSError.

    Such files have tensors in one memory order; where a tensor has another one, the metadata says so for
    `read_tensors`. They have no complex128: its numbers are written as pairs, of which the metadata tells
    too.
    """
    orders = {name: order for name, tensor in tensors.items() if (order := order_of(tensor))}
    whole = {name: _as_it_is(tensor).contiguous() for name, tensor in tensors.items()}
    pairs = [name for name, tensor in whole.items() if tensor.dtype is torch.complex128]
    whole |= {name: torch.view_as_real(whole[name]) for name in pairs}
    told = {_ORDERS: json.dumps(orders)} if orders else {}
    told |= {_COMPLEX: json.dumps(pairs)} if pairs else {}
    uses = Counter(tensor.untyped_storage().data_ptr() for tensor in whole.values())
    for name, tensor in whole.items():
        storage = tensor.untyped_storage()
        if uses[storage.data_ptr()] > 1 or storage.nbytes() != tensor.nbytes:
            whole[name] = tensor.clone()  # a part of a larger tensor, which safetensors would refuse
    try:
        save_file(whole, path, metadata=told or None)
    except SafetensorError as error:  # also raised for a full disk
        raise OSError(None, str(error)) from error
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def _as_it_is(tensor: Tensor) -> Tensor:
    """Returns the tensor on the CPU; a conjugate may be one by a mark alone, which is resolved."""
    return tensor.detach().cpu().resolve_conj().resolve_neg()


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Reads what `save_tensors` wrote, in the memory order that it had.

    Raises OSError, SafetensorError, and ValueError for an order that is not one of its tensor's dimensions.
    """
    with safe_open(path, framework="pt") as file:
        orders = json.loads((file.metadata() or {}).get(_ORDERS, "{}"))
        found = {name: tensor_in(file, name) for name in file.keys()}  # noqa: SIM118
    for name in orders.keys() & found.keys():
        order, tensor = tuple(orders[name]), found[name]
        if sorted(order) != list(range(tensor.dim())):
            raise ValueError(f"{name!r} has {counted(tensor.dim(), 'dimension')}, and their order is {order}")
        found[name] = unpacked(packed(tensor, order).contiguous(), order)
    return found


def tensor_in(file: Any, name: str) -> Tensor:
    """Returns a tensor of an open file, contiguous.

    Raises ValueError for complex numbers that are not pairs.
    """
    tensor: Tensor = file.get_tensor(name)
    if not _are_pairs(file, name):
        return tensor
    if tensor.dtype is not torch.float64 or tensor.shape[-1:] != (2,):
        raise ValueError(
            f"{name!r} is told to be pairs of float64, and is {tensor.dtype} {tuple(tensor.shape)}"
        )
    return torch.view_as_complex(tensor)


def shape_in(file: Any, name: str) -> tuple[int, ...]:
    """Returns the shape of a tensor of an open file without reading it."""
    shape = tuple(file.get_slice(name).get_shape())
    return shape[:-1] if _are_pairs(file, name) else shape


def _are_pairs(file: Any, name: str) -> bool:
    return name in json.loads((file.metadata() or {}).get(_COMPLEX, "[]"))
