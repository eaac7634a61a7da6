"""Sizes that depend on values: seen in a run on the example inputs, and known by their places in a trace.

kept = x[x[:, 0] > 0]
if len(kept) > 1:      a trace has a symbol for the size, and goes the way that the example took
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import sympy
import torch
from torch import Tensor
from torch.fx.experimental import proxy_tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .asked_places import authors_place

# A trace has these whole; in a run they are made of `nonzero`.
_OF_NONZERO = tuple(getattr(torch.ops.aten, name).default for name in ("where", "nonzero_numpy", "argwhere"))
_ON_TENSORS = [{"FloorDiv": operator.floordiv, "Mod": operator.mod, "PythonMod": operator.mod}, "math"]


@dataclass(frozen=True, slots=True)
class _Size:
    """A symbol's size on the example, and a tensor in the trace that has it."""

    on_the_example: int
    tensor: Tensor
    dimension: int

    def as_tensor(self) -> Tensor:
        return torch.full((), self.tensor.shape[self.dimension], device=self.tensor.device)


_Sizes = dict[sympy.Symbol, _Size]


@dataclass(slots=True)
class SelectedSizes:
    """Shapes of what operators select by values in a run, by the author's line, in their order."""

    shapes: dict[tuple[str, str], list[tuple[int, ...]]] = field(default_factory=dict)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        with _Recording(self.shapes):
            yield

    @contextmanager
    def known(self, tensors: Sequence[Tensor], examples: Sequence[Tensor]) -> Iterator[_Sizes]:
        """Yields the sizes of symbols, which grow with the trace; `tensors` are its inputs."""
        sizes: _Sizes = {}
        for tensor, example in zip(tensors, examples, strict=False):
            _note(sizes, tensor, tuple(example.shape))
        left = {place: list(shapes) for place, shapes in self.shapes.items()}
        plain: Any = proxy_tensor.proxy_call

        def call(mode: Any, func: Any, pre_dispatch: bool, args: Any, kwargs: Any) -> Any:
            results = plain(mode, func, pre_dispatch, args, kwargs)
            if _selects(func, args) and (shapes := left.get(authors_place())):
                shape = shapes.pop(0)
                for result in pytree.tree_leaves(results):
                    _note(sizes, result, shape)
            return results

        with patch.object(proxy_tensor, "proxy_call", call) if left else nullcontext():
            yield sizes


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, shapes: dict[tuple[str, str], list[tuple[int, ...]]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes = shapes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        if _selects(func, args):
            shape = tuple(pytree.tree_leaves(results)[0].shape)
            self.shapes.setdefault(authors_place(), []).append(shape)
        return results


def _selects(func: Any, args: Sequence[Any]) -> bool:
    """Whether the sizes of the operator's results depend on values."""
    if func is torch.ops.aten.index.Tensor:
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return torch.Tag.dynamic_output_shape in func.tags or func in _OF_NONZERO


def _note(sizes: _Sizes, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.dim() > len(shape):
        return
    extents: list[Any] = list(tensor.shape)
    for dimension, (extent, size) in enumerate(zip(extents, shape, strict=False)):
        symbol = extent.node.expr if isinstance(extent, torch.SymInt) else None
        if isinstance(symbol, sympy.Symbol):
            sizes.setdefault(symbol, _Size(size, tensor, dimension))


def outcome_of_sizes(condition: torch.SymBool, sizes: _Sizes) -> tuple[bool, Tensor] | None:
    """Returns how a comparison of sizes comes out on the example, and as a tensor in the trace."""
    expression = condition.node.expr
    symbols = sorted(expression.free_symbols, key=str)
    if not isinstance(expression, sympy.core.relational.Relational) or not sizes.keys() >= set(symbols):
        return None
    outcome = expression.subs({symbol: sizes[symbol].on_the_example for symbol in symbols})
    numbers = [sizes[symbol].as_tensor() for symbol in symbols]
    return bool(outcome), sympy.lambdify(symbols, expression, _ON_TENSORS)(*numbers)
