"""What operators have saved for their backward, in the trace of a model that differentiates in its forward.

torch.export sees what autograd computes, but not all that it computes from: a saved value comes out of its
operator as a new tensor, which the trace does not know.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.fx.experimental import proxy_tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode


@contextmanager
def saved_values_found() -> Iterator[None]:
    """A saved value is known by the memory that it is in, as a value of the trace or its transpose (`linear`
    saves its weight so). What a norm saves besides is given out by the operator that it is made of.
    """
    known: dict[int, list[Tensor]] = {}
    track, fetch = proxy_tensor.track_tensor, proxy_tensor.fetch_object_proxy

    def tracked(tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        track(tensor, *args, **kwargs)
        known.setdefault(_memory(tensor), []).append(tensor)

    def fetched(tracer: Any, value: Any) -> Any:
        found = fetch(tracer, value)
        if found is not value or not isinstance(value, Tensor):
            return found
        for original in reversed(known.get(_memory(value), [])):
            if _layout(original) == _layout(value):
                return fetch(tracer, original)
            if original.dim() == value.dim() == 2 and _layout(original.t()) == _layout(value):
                operand: Any = fetch(tracer, original)
                transposed = tracer.create_proxy(
                    "call_function", torch.ops.aten.t.default, (operand.proxy,), {}
                )
                proxy_tensor.track_tensor_tree(value, transposed, constant=None, tracer=tracer)
                return fetch(tracer, value)
        return found

    with (
        patch.object(proxy_tensor, "track_tensor", tracked),
        patch.object(proxy_tensor, "fetch_object_proxy", fetched),
        _OpenNorms(),
    ):
        yield


class _OpenNorms(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _OPEN.get(func, func)(*args, **(kwargs or {}))


def _layer_norm(
    input: Tensor,  # noqa: A002 - as torch calls it
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    return torch.native_layer_norm(input, normalized_shape, weight, bias, eps)[0]


def _group_norm(
    input: Tensor,  # noqa: A002 - as torch calls it
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """input: (batch, channels, ...)"""
    batch, channels = input.shape[:2]
    each = math.prod(input.shape[2:])
    given = input.contiguous()
    return torch.native_group_norm(given, weight, bias, batch, channels, each, num_groups, eps)[0]


_OPEN: Mapping[Any, Callable[..., Any]] = {
    functional.layer_norm: _layer_norm,
    functional.group_norm: _group_norm,
}


def _memory(tensor: Tensor) -> int:
    """0 for what has none of its own: a value of one sample within a map."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return 0
    return int(tensor.untyped_storage()._cdata)


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype
