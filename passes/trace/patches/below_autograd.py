"""Derivatives inside `torch.vmap`, for models that compute them in their forward.

torch.export records a mapped function as its author wrote it, which leaves no room for what autograd computes
for all samples at once. Below autograd there are no maps and no levels any more. A call of a map is traced
there, as operators on whole batches, for values and derivatives, as torch runs them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx
from torch._functorch import apis
from torch.fx.experimental import proxy_tensor
from torch.overrides import TorchFunctionMode

from pd2bw_fx.passes.trace.vmap_regions import in_plain_words

from .detached_data import is_of_data

_DETACHING = (Tensor.detach, torch.detach, Tensor.detach_, torch.detach_)
_ops: Any = torch._ops
_apis: Any = apis
_PROXY = torch._C._TorchDispatchModeKey.PROXY


@contextmanager
def trace_maps_below_autograd() -> Iterator[None]:
    """Traces every map below autograd, also those that differentiate nothing."""
    own = _apis.vmap_impl

    def vmap_impl(*args: Any, **kwargs: Any) -> Any:
        with _below_autograd():
            return own(*args, **kwargs)

    with patch.object(apis, "vmap_impl", vmap_impl):
        yield


def is_traced_above() -> bool:
    """Whether operators are traced above autograd, as their author wrote them."""
    return _ops._get_dispatch_mode_pre_dispatch(_PROXY) is not None


@contextmanager
def _below_autograd() -> Iterator[None]:
    """Moves the current trace below autograd while it lasts.

    Operators belong to the module that calls the map, as in `vmap_regions.py`.
    """
    above = _ops._get_dispatch_mode_pre_dispatch(_PROXY)
    if above is None:  # within another map, or in no trace
        yield
        return
    tracer = above.tracer
    place = dict(tracer.module_stack)
    create_node = tracer.create_node
    forward = _WatchForward()

    def create_below(kind: str, target: Any, args: Any, *others: Any, **more: Any) -> fx.Node:
        if target is torch.ops.aten.detach.default and not forward.detaches:
            saved: fx.Node = args[0]
            return saved
        node: fx.Node = create_node(kind, target, args, *others, **more)
        node.meta |= {"nn_module_stack": _described(place), "of_map": True}
        if not torch.is_grad_enabled():
            node.meta["no_grad"] = True
        return in_plain_words(node)

    _ops.unset_mode_pre_dispatch(_PROXY)
    try:
        with (
            patch.object(tracer, "create_node", create_below),
            proxy_tensor._temp_remove_pre_dispatch_torch_function_mode(),
            proxy_tensor.ProxyTorchDispatchMode(tracer, above.tracing_mode),
            forward,
        ):
            yield
    finally:
        _ops._set_mode_pre_dispatch(above)


def _described(stack: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Returns the module stack in the form of a trace: paths, and classes by name."""
    return {
        key: (path, f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else kind)
        for key, (path, kind) in stack.items()
    }


class _WatchForward(TorchFunctionMode):
    """Tells a `detach` that the forward asks for from one of autograd's.

    `detaches` is true during a call by which the forward asks for a value without its history. Autograd also
    detaches the values that it saves, since it knows their history; a trace would lose that history.

    The mode also skips `split` into a single part, by which torch.func takes the Jacobian of a single result.
    """

    def __init__(self) -> None:
        super().__init__()
        self.detaches = False

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        parts = args[1] if func in (torch.split, Tensor.split) and len(args) > 1 else None
        if isinstance(parts, Sequence) and len(parts) == 1:
            return (args[0],)
        if func not in _DETACHING and not is_of_data(func):
            return func(*args, **(kwargs or {}))
        self.detaches = True
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.detaches = False
