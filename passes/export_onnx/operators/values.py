"""Numbers that a stage computes from values, where the exporter asks for one that it knows.

k = scale.item(); x ** k
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def known_or_tensor(operand: Any) -> Any:
    """Returns a computed number as a tensor without dimensions, and any other operand as it is."""
    types: dict[type, torch.dtype] = {torch.SymFloat: torch.float64, torch.SymInt: torch.int64}
    dtype = types.get(type(operand))
    return operand if dtype is None else torch.scalar_tensor(operand, dtype=dtype)


def _power(self: Any, exponent: Any, *, out: Tensor | None = None) -> Any:
    if out is not None or not isinstance(exponent, torch.SymFloat | torch.SymInt):
        return NotImplemented
    return torch.pow(self, known_or_tensor(exponent))


BY_NAME: Mapping[str, Callable[..., Any]] = {"__pow__": _power, "pow": _power}
"""Functions of torch and tensors."""
