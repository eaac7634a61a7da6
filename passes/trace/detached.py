"""`tensor.data`, which torch.export loses: a trace has `tensor.detach()`, the memory without gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode


class DataIsDetached(TorchFunctionMode):
    """`h.data` is `h.detach()`, and `buffer.data = value` writes the value into the buffer's memory."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not is_of_data(func):
            return func(*args, **(kwargs or {}))
        if func.__name__ == "__get__":
            return args[0].detach()
        tensor, value = args
        if (tensor.shape, tensor.dtype, tensor.device) != (value.shape, value.dtype, value.device):
            raise ValueError(
                f".data of a {tensor.dtype} of shape {tuple(tensor.shape)} is given another of shape "
                f"{tuple(value.shape)}, {value.dtype}; expected values for what is there"
            )
        if not _is_the_same_memory(tensor, value):  # as after `buffer.data *= 0.9`
            tensor.detach().copy_(value)
        return None


def is_of_data(func: Any) -> bool:
    return getattr(getattr(func, "__self__", None), "__name__", "") == "data"


def _is_the_same_memory(one: Tensor, other: Tensor) -> bool:
    if one.stride() != other.stride() or one.storage_offset() != other.storage_offset():
        return False
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)
