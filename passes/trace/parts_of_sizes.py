"""`torch.cat([x, y]).chunk(2)`: how many parts there are is asked of sizes, which would fix the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.overrides import TorchFunctionMode

_CHUNK, _SPLIT = (torch.chunk, Tensor.chunk), (torch.split, Tensor.split)
_MOST_PARTS = 64


class PartsStayOpen(TorchFunctionMode):
    """Where a size is a multiple of the parts' for every batch, their sizes are given one by one."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _CHUNK or func in _SPLIT:
            tensor, how, dim = _asked(*args, **kwargs)
            sizes = _sizes(tensor, how, dim, is_number=func in _CHUNK)
            if sizes is not None:
                return tensor.split(sizes, dim)
        return func(*args, **kwargs)


def _asked(tensor: Any, how: Any = None, dim: int = 0, **named: Any) -> tuple[Any, Any, int]:
    """The tensor, the parts' number or size, and the dimension, whatever they are called."""
    return tensor, next(iter(named.values()), how), dim


def _sizes(tensor: Any, how: Any, dim: int, *, is_number: bool) -> list[Any] | None:
    if not isinstance(how, int | torch.SymInt) or not isinstance(tensor, Tensor):
        return None
    total: Any = tensor.shape[dim]
    if isinstance(total, int):
        return None
    if is_number:
        how = int(how)  # which a size fixes
        is_multiple = how > 0 and statically_known_true(total % how == 0)
        return [total // how] * how if is_multiple else None
    for number in range(1, _MOST_PARTS):
        if statically_known_true(total == number * how) or _is_quotient(how, total, number):
            return [how] * number
    return None


def _is_quotient(how: Any, total: Any, number: int) -> bool:
    """`x.split(x.shape[0] // 2)` of an even batch."""
    return statically_known_true(total % number == 0) and statically_known_true(how == total // number)
