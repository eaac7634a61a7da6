"""`tensor.data`, which torch.export loses: a trace has `tensor.detach()`, its memory without gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from pd2bw_fx.errors import TraceError

from .asked_places import authors_line


class DataIsDetached(TorchFunctionMode):
    """Reads `h.data` as `h.detach()`, and writes the value of `buffer.data = value` into the buffer."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.requires_grad_ or _sets(func, "requires_grad"):
            _require_trained(*args, **(kwargs or {}))
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
    return _attribute(func) == "data"


def _attribute(func: Any) -> str:
    """Returns the name of the tensor attribute that the function reads or sets, or ""."""
    return str(getattr(getattr(func, "__self__", None), "__name__", ""))


def _sets(func: Any, name: str) -> bool:
    return _attribute(func) == name and func.__name__ == "__set__"


def _require_trained(tensor: Tensor, requires_grad: bool = True) -> None:
    """Raises TraceError where a forward freezes a weight for a part of what it computes."""
    if tensor.requires_grad and tensor.is_leaf and not requires_grad:
        raise TraceError(
            f"the forward switches requires_grad of a tensor off ({authors_line()}), and a trace has one "
            "graph, in which it has a gradient or not. For a part without gradients of its weights compute "
            "torch.func.functional_call(part, {name: p.detach() for name, p in part.named_parameters()}, x); "
            "what is frozen for good is frozen before the model is split"
        )


def _is_the_same_memory(one: Tensor, other: Tensor) -> bool:
    if one.stride() != other.stride() or one.storage_offset() != other.storage_offset():
        return False
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)
