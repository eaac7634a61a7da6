"""Traces `torch.einsum` of three operands or more with open sizes.

Where opt_einsum is installed, torch asks it for the order that takes the fewest operations. It looks at all
sizes, and a trace would be right for the example's sizes only.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@contextmanager
def keep_contractions_symbolic() -> Iterator[None]:
    """While torch traces, the order is the one for the example's sizes, and sizes stay open."""
    holders = [sys.modules[name] for name in ("opt_einsum", "opt_einsum.contract") if name in sys.modules]
    before = [holder.contract_path for holder in holders]
    try:
        for holder, contract_path in zip(holders, before, strict=True):
            holder.contract_path = _for_the_example(contract_path)  # type: ignore[attr-defined]
        yield
    finally:
        for holder, contract_path in zip(holders, before, strict=True):
            holder.contract_path = contract_path  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class _Sizes:
    """The shape of a tensor, or of what stands for one: all that an order depends on."""

    of: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(s.node.hint if isinstance(s, torch.SymInt) else s for s in self.of.shape)


def _for_the_example(contract_path: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(contract_path)
    def found(*operands: Any, **options: Any) -> Any:
        sizes = [_Sizes(given) if hasattr(given, "shape") else given for given in operands]
        first, rest = contract_path(*sizes, **options)
        # What opt_einsum.contract calls returns the operands too, in their order, before the steps.
        if any(isinstance(given, _Sizes) for given in first):
            first = [given.of if isinstance(given, _Sizes) else given for given in first]
        return first, rest

    return found
