"""A device that is not the CPU, on any machine: torch's device for backends in Python, on host memory.

Its tensors compute on the CPU what they are told, and refuse, as a GPU's do, to be mixed with tensors of the
CPU other than numbers. Autograd, optimizers and gloo see a device of another type. Importing this registers
it, which has to happen before the process's first backward: autograd counts devices then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_TYPE = "elsewhere"
_setup_privateuseone_for_python_backend(_TYPE)
DEVICE = torch.device(_TYPE, 0)
_HOST = torch.device("cpu")
_aten = torch.ops.aten
_storages: dict[int, torch.UntypedStorage] = {}  # by a storage of the device: where its bytes are


class _OnDevice(Tensor):
    """Has the sizes and storage of a tensor of the device; `on_host` is the same memory to the CPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, host: Tensor) -> _OnDevice:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            host.shape,
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=DEVICE,
        )
        _storages[made.untyped_storage()._cdata] = host.untyped_storage()
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    @property
    def on_host(self) -> Tensor:
        storage = _storages[self.untyped_storage()._cdata]
        with torch._C._DisableTorchDispatch():
            empty = torch.empty(0, dtype=self.dtype, device=_HOST)
            return empty.set_(storage, self.storage_offset(), tuple(self.shape), tuple(self.stride()))

    def tolist(self) -> Any:
        return self.on_host.tolist()


class Accelerator(TorchDispatchMode):
    """Makes tensors on DEVICE where a function asks for them, while the mode is entered."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _names_device(kwargs) or any(isinstance(v, _OnDevice) for v in pytree.tree_leaves((args, kwargs))):
            return _run(func, args, kwargs)
        return func(*args, **kwargs)


def _names_device(kwargs: Mapping[str, Any]) -> bool:
    named = kwargs.get("device")
    return named is not None and torch.device(named).type == _TYPE


def _run(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    if func is _aten._local_scalar_dense.default:
        return args[0].on_host.item()
    given = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
    moves = func in (_aten.copy_.default, _aten._to_copy.default)
    mixed = [value for value in given if not isinstance(value, _OnDevice) and value.dim() > 0]
    is_on_device = any(isinstance(value, _OnDevice) for value in given)
    if is_on_device and mixed and not moves:
        raise RuntimeError(
            f"{func}: expected all tensors on {DEVICE}, found {tuple(mixed[0].shape)} on the CPU"
        )
    host_args, host_kwargs = pytree.tree_map(_to_host, (args, dict(kwargs)))
    result = func(*host_args, **host_kwargs)
    if func is _aten.copy_.default:
        return args[0]
    if kwargs.get("device") is not None:
        is_on_device = _names_device(kwargs)
        return _OnDevice(result.clone()) if is_on_device else result
    made = pytree.tree_map(lambda value: _OnDevice(value) if isinstance(value, Tensor) else value, result)
    return return_and_correct_aliasing(func, args, kwargs, made) if is_on_device else result


def _to_host(value: Any) -> Any:
    if isinstance(value, _OnDevice):
        return value.on_host
    return _HOST if isinstance(value, torch.device) else value


# What torch does with tensors below the level at which modes are asked.
def _empty(size: Any, *, dtype: Any = None, **_: Any) -> Tensor:
    return _OnDevice(torch.empty([int(length) for length in size], dtype=dtype, device=_HOST))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Tensor:
    return _OnDevice(torch.empty_strided(size, stride, dtype=dtype, device=_HOST))


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    _to_host(target).copy_(_to_host(source))
    return target


_library = torch.library.Library("aten", "IMPL")
_library.impl("empty.memory_format", _empty, "PrivateUse1")
_library.impl("empty_strided", _empty_strided, "PrivateUse1")
_library.impl("_copy_from", _copy_from, "PrivateUse1")
