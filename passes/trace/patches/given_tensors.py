"""Tensors of the model that a custom autograd function reads though no argument holds them.

class Integral(torch.autograd.Function):      integrand = self.net, or lambda t: self.net(t * x)
    def forward(ctx, integrand, a, b): ..
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from .asked_places import authors_line


class OnlyGivenTensors(TorchFunctionMode):
    """Raises ValueError where a function reads a tensor of another trace than its own: the model's."""

    def __init__(self, own: FakeTensorMode) -> None:
        super().__init__()
        self.own = own

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for value in pytree.tree_leaves((args, kwargs)):
            if isinstance(value, FakeTensor) and value.fake_mode is not self.own:
                raise ValueError(
                    f"it reads tensors that it is not given ({authors_line()}), as weights of a module among "
                    "its arguments"
                )
        return func(*args, **(kwargs or {}))
