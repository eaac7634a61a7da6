"""Messages as bytes, with each tensor's own elements and no more.

Plain pickle writes the whole memory that a tensor is a view of, once for each view: a batch would carry its
dataset along, and a stage's weights, which share one block, that block as often as there are weights.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import pickle
import sys
from collections.abc import Callable
from types import CodeType, FunctionType, ModuleType
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from pd2bw_fx.runtime.inference import ordinary_tensors


def encoded(message: Any) -> bytes:
    """Pickles a message for a receiver that has the module of every class and function."""
    return _written(_Pickler, message)


def encoded_with_code(message: Any) -> bytes:
    """Pickles a message with the code of functions and classes that the receiver cannot import.

    Those are of the script or the notebook, and of modules that were loaded by their path.
    """
    before = cloudpickle.list_registry_pickle_by_value()
    try:
        return _written(_PicklerWithCode, message)
    finally:
        for name in cloudpickle.list_registry_pickle_by_value() - before:
            with contextlib.suppress(KeyError, ValueError):  # another thread was quicker
                cloudpickle.unregister_pickle_by_value(sys.modules[name])


def decoded(data: bytes) -> Any:
    with ordinary_tensors():
        return pickle.loads(data)


def is_importable(name: str) -> bool:
    """Returns whether another process with the same path finds this module, and not another one of its name.

    For a package's submodules the package counts: it may make them when it is imported.
    """
    top = name.partition(".")[0]
    if top in sys.stdlib_module_names or top in ("torch", "pd2bw_fx"):
        return True
    finders = [finder for finder in sys.meta_path if hasattr(finder, "find_spec")]
    found = next((spec for finder in finders if (spec := finder.find_spec(top, None)) is not None), None)
    if found is None:
        return False
    file = getattr(sys.modules.get(top), "__file__", None)
    return (
        file is None
        or not found.has_location
        or os.path.realpath(file) == os.path.realpath(found.origin or file)
    )


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
        if isinstance(value, CodeType):
            return _in_its_file, (*self.dispatch_table[CodeType](value), value.co_filename)
        if isinstance(value, (FunctionType, type, ModuleType)):
            _send_by_value_if_needed(value)
        return _reduced(value) if _is_plain(value) else super().reducer_override(value)


def _in_its_file(make: Callable[..., CodeType], arguments: tuple[Any, ...], file: str) -> CodeType:
    """Makes code whose errors name the file that it is from, which cloudpickle leaves out."""
    return make(*arguments).replace(co_filename=file)


def _send_by_value_if_needed(value: Any) -> None:
    name = value.__name__ if isinstance(value, ModuleType) else value.__module__
    module = sys.modules.get(name) if isinstance(name, str) and name != "__main__" else None
    if type(module) is ModuleType and module.__name__ == name and not is_importable(name):
        cloudpickle.register_pickle_by_value(module)


def _is_special_module(value: Any) -> bool:
    """Returns whether a module is one of a class that pickle refuses, as torch.backends.cudnn is."""
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
    own = tensor.detach().resolve_conj().resolve_neg().cpu()  # the receiver may not have its GPU
    is_dense = torch.ops.aten.is_non_overlapping_and_dense(own)
    if not is_dense or own.untyped_storage().nbytes() != own.nbytes:
        own = own.clone()  # only its own elements, in their memory order (channels_last stays)
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
