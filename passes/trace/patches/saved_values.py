"""Values that operators save for their backward, for models that differentiate in their forward.

torch.export sees what autograd computes, but not all that it computes from: a saved value comes out of its
operator as a new tensor, which the trace does not know.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.fx.experimental import proxy_tensor


@contextmanager
def find_saved_values(*, all_composite: bool) -> Iterator[None]:
    """Lets a trace recognise saved values.

    A saved value shares its memory with a value of the trace, or with the transpose of one (`linear` saves
    its weight transposed). Composite operators also save results of their parts: so norms, pools and the
    like, or all of them with `all_composite`, are traced as their parts.
    """
    known: dict[int, list[Tensor]] = {}
    track, fetch = proxy_tensor.track_tensor, proxy_tensor.fetch_object_proxy
    handle = proxy_tensor.maybe_handle_decomp

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

    def opened(mode: Any, operator: Any, args: Any, kwargs: Any) -> Any:
        if mode.pre_dispatch and operator is torch.ops.aten.batch_norm.default:
            with mode:
                return _batch_norm(*args, **kwargs)
        if mode.pre_dispatch and _is_opened(operator, all_composite=all_composite):
            with mode:
                return operator.decompose(*args, **kwargs)
        return handle(mode, operator, args, kwargs)

    with (
        patch.object(proxy_tensor, "track_tensor", tracked),
        patch.object(proxy_tensor, "fetch_object_proxy", fetched),
        patch.object(proxy_tensor, "maybe_handle_decomp", opened),
    ):
        yield


def _batch_norm(
    given: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    """Runs batch_norm by one operator.

    Its decomposition chooses between libraries, and crashes the process where there are no running
    statistics.
    """
    rates = training, momentum, eps
    if running_mean is None:
        results = torch.ops.aten._native_batch_norm_legit.no_stats(given, weight, bias, *rates)
    else:
        results = torch.native_batch_norm(given, weight, bias, running_mean, running_var, *rates)
    result: Tensor = results[0]
    return result


def _is_opened(operator: Any, *, all_composite: bool) -> bool:
    name = operator.overloadpacket.__name__
    if name == "scaled_dot_product_attention" and torch._C._get_flash_sdp_enabled():
        return all_composite  # its flash kernel cannot be differentiated twice, and depends on the device
    if name in _KEEPING_NOTHING or (not all_composite and name not in _COMPOSITE):
        return False
    return bool(operator._can_decompose())


_COMPOSITE = frozenset(
    {
        "_scaled_dot_product_attention_math",
        "group_norm",
        "instance_norm",
        "layer_norm",
        "max_pool1d",
        "max_pool2d",
        "max_pool3d",
        "prelu",
        "rms_norm",
        "rrelu",
        "scaled_dot_product_attention",
        "upsample_bicubic2d",
        "upsample_bilinear2d",
        "upsample_linear1d",
        "upsample_nearest1d",
        "upsample_nearest2d",
        "upsample_nearest3d",
        "upsample_trilinear3d",
    }
)
# Composite operators whose parts save nothing but operands and the result.
_KEEPING_NOTHING = frozenset({"contiguous", "flatten", "log_softmax", "reshape", "softmax", "to"})
_KEEPING_NOTHING |= {"size", "stride", "storage_offset"}


def _memory(tensor: Tensor) -> int:
    """Returns the identity of the tensor's storage, or 0 for a value within a map, which has none."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return 0
    return int(tensor.untyped_storage()._cdata)


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype
