"""Messages with tensors as bytes: of each tensor its own elements and no more.

Plain pickle writes the whole memory that a tensor is a view of, once for each view: a batch would take its
dataset along, and a stage's weights, which share one block, that block as often as there are weights.
"""

from __future__ import annotations

import importlib
import io
import pickle
import sys
from types import ModuleType
from typing import Any

import cloudpickle
import torch
from torch import Tensor


def encoded(message: Any) -> bytes:
    """Plain pickle otherwise: the receiver has the module of every class and function."""
    return _written(_Pickler, message)


def encoded_with_code(message: Any) -> bytes:
    """With functions and classes of the script or the notebook by value."""
    return _written(_PicklerWithCode, message)


def decoded(data: bytes) -> Any:
    return pickle.loads(data)


def _written(kind: type[pickle.Pickler], message: Any) -> bytes:
    file = io.BytesIO()
    kind(file, protocol=pickle.HIGHEST_PROTOCOL).dump(message)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        return _reduced(value) if _is_plain(value) else NotImplemented


class _PicklerWithCode(cloudpickle.Pickler):  # type: ignore[misc]
    def reducer_override(self, value: Any) -> Any:
        if _is_special_module(value):
            return importlib.import_module, (value.__name__,)
        return _reduced(value) if _is_plain(value) else super().reducer_override(value)


def _is_special_module(value: Any) -> bool:
    """Of a class of its own, which pickle refuses: torch.backends.cudnn or torch.ops, which code may name."""
    if not isinstance(value, ModuleType) or type(value) is ModuleType:
        return False
    return sys.modules.get(value.__name__) is value


def _is_plain(value: Any) -> bool:
    return (
        type(value) is Tensor
        and value.layout is torch.strided
        and value.device.type in ("cpu", "cuda")
        and not value.is_quantized
    )


def _reduced(tensor: Tensor) -> tuple[Any, tuple[Any, ...]]:
    own = tensor.detach().resolve_conj().resolve_neg().cpu()  # where it goes, its GPU may not be
    is_dense = torch.ops.aten.is_non_overlapping_and_dense(own)
    if not is_dense or own.untyped_storage().nbytes() != own.nbytes:
        own = own.clone()  # as densely as it was laid out: channels_last stays so
    data = torch.empty(0, dtype=torch.uint8, device="cpu").set_(own.untyped_storage())
    buffer = pickle.PickleBuffer(data.numpy())  # type: ignore[arg-type]  # an array is a buffer
    return _rebuilt, (buffer, own.dtype, tuple(own.shape), own.stride(), tensor.requires_grad)


def _rebuilt(
    buffer: bytearray,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
) -> Tensor:
    if not len(buffer):
        return torch.empty_strided(shape, stride, dtype=dtype, device="cpu").requires_grad_(requires_grad)
    data = torch.frombuffer(buffer, dtype=torch.uint8)
    whole = torch.empty(0, dtype=dtype, device="cpu").set_(data.untyped_storage(), 0, shape, stride)
    return whole.requires_grad_(requires_grad)
