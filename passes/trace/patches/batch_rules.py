"""Batching rules for `torch.vmap` over batches of an open size, where torch's own rules fix the size."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch

from pd2bw_fx.passes.trace.torch_messages import RULE_REPLACED

_Library: Any = torch.library.Library
_MAPPED = torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchBatched)


@contextmanager
def use_batch_rules_for_any_size() -> Iterator[None]:
    """Registers the rules of this file while it lasts."""
    library: Any = _Library("aten", "IMPL", "FuncTorchBatched")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=RULE_REPLACED)
            for name, rule in _RULES.items():
                library.impl(name, _below_this_map(rule))
        yield
    finally:
        library._destroy()


def _below_this_map(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the rule as torch calls it: with the current level, and below the map."""

    def mapped(*args: Any, **kwargs: Any) -> Any:
        level = _functorch.maybe_current_level()
        with torch._C._ExcludeDispatchKeyGuard(_MAPPED):
            return rule(level, *args, **kwargs)

    return mapped


class _Samples:
    """The operands of an operator in a map, and which of them have samples at the map's level."""

    def __init__(self, level: int, operands: Sequence[Tensor | None]) -> None:
        self.level = level
        self.operands = operands
        self.mapped = {
            place: _functorch.get_unwrapped(tensor).movedim(_functorch.maybe_get_bdim(tensor), 0)
            for place, tensor in enumerate(operands)
            if tensor is not None and _is_mapped(tensor, level)
        }
        self.number: Any = next((value.shape[0] for value in self.mapped.values()), None)

    def of_each(self, place: int) -> Tensor:
        if place in self.mapped:
            return self.mapped[place]
        shared = self.operands[place]
        assert shared is not None
        return shared.expand(self.number, *shared.shape)

    def result(self, value: Tensor) -> Tensor:
        return value if self.number is None else _functorch._add_batch_dim(value, 0, self.level)


def _is_mapped(tensor: Tensor, level: int) -> bool:
    return _functorch.is_batchedtensor(tensor) and _functorch.maybe_get_level(tensor) == level


def _cat(level: int, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    samples = _Samples(level, tensors)
    if samples.number is None:
        return torch.cat(list(tensors), dim)
    # `torch.cat` ignores a tensor of one dimension and no elements, whatever the other shapes are.
    parts = [samples.of_each(place) for place, tensor in enumerate(tensors) if list(tensor.shape) != [0]]
    parts = parts or [samples.of_each(0)]
    return samples.result(torch.cat(parts, dim if dim < 0 else dim + 1))


def _gelu_backward(level: int, gradient: Tensor, given: Tensor, *, approximate: str = "none") -> Tensor:
    samples = _Samples(level, (gradient, given))
    backward: Callable[..., Tensor] = torch.ops.aten.gelu_backward
    if samples.number is None:
        return backward(gradient, given, approximate=approximate)
    return samples.result(backward(samples.of_each(0), samples.of_each(1), approximate=approximate))


def _glu_backward(level: int, gradient: Tensor, given: Tensor, dim: int) -> Tensor:
    samples = _Samples(level, (gradient, given))
    backward: Callable[..., Tensor] = torch.ops.aten.glu_backward
    if samples.number is None:
        return backward(gradient, given, dim)
    return samples.result(backward(samples.of_each(0), samples.of_each(1), dim if dim < 0 else dim + 1))


def _slice_backward(level: int, gradient: Tensor, sizes: Sequence[int], dim: int, *which: int) -> Tensor:
    samples = _Samples(level, (gradient,))
    backward: Callable[..., Tensor] = torch.ops.aten.slice_backward
    if samples.number is None:
        return backward(gradient, sizes, dim, *which)
    dim = dim if dim < 0 else dim + 1
    return samples.result(backward(samples.of_each(0), [samples.number, *sizes], dim, *which))


def _layer_norm(
    level: int,
    given: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, ...]:
    samples = _Samples(level, (given, weight, bias))
    if samples.number is None:
        return torch.native_layer_norm(given, normalized_shape, weight, bias, eps)
    each = samples.of_each(0)
    if samples.mapped.keys() <= {0}:
        results = torch.native_layer_norm(each, normalized_shape, weight, bias, eps)
        return tuple(samples.result(value) for value in results)
    normed, mean, rstd = torch.native_layer_norm(each, normalized_shape, None, None, eps)
    if weight is not None:
        normed = normed * _beside(samples.of_each(1), normed)
    if bias is not None:
        normed = normed + _beside(samples.of_each(2), normed)
    return tuple(samples.result(value) for value in (normed, mean, rstd))


def _layer_norm_backward(
    level: int,
    gradient: Tensor,
    given: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    asked: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    samples = _Samples(level, (gradient, given, mean, rstd, weight, bias))
    backward = torch.ops.aten.native_layer_norm_backward
    if samples.number is None:
        found: tuple[Tensor | None, ...] = backward(
            gradient, given, normalized_shape, mean, rstd, weight, bias, asked
        )
        return found
    of_result, each, mean, rstd = (samples.of_each(place) for place in range(4))
    of_given = of_weight = of_bias = None
    if asked[0]:
        of_normed, shared = of_result, weight
        if 4 in samples.mapped:
            of_normed, shared = of_result * _beside(samples.of_each(4), of_result), None
        (of_given, _, _) = backward(
            of_normed, each, normalized_shape, mean, rstd, shared, None, [True, False, False]
        )
    summed = tuple(range(1, each.ndim - len(normalized_shape)))
    if asked[1]:
        of_weight = _summed(((each - mean) * rstd * of_result).to(of_result.dtype), summed)
    if asked[2]:
        of_bias = _summed(of_result, summed)
    return tuple(None if value is None else samples.result(value) for value in (of_given, of_weight, of_bias))


def _beside(parameter: Tensor, value: Tensor) -> Tensor:
    """(samples, *normalized_shape) -> (samples, 1, .., *normalized_shape), to broadcast with `value`."""
    between = value.ndim - parameter.ndim
    return parameter.reshape(parameter.shape[0], *(1,) * between, *parameter.shape[1:])


def _summed(value: Tensor, dims: tuple[int, ...]) -> Tensor:
    return value.sum(dims) if dims else value


def _mv(level: int, matrix: Tensor, vector: Tensor) -> Tensor:
    samples = _Samples(level, (matrix, vector))
    if samples.number is None:
        return torch.mv(matrix, vector)
    if 0 not in samples.mapped:
        return samples.result(samples.of_each(1) @ matrix.t())
    if 1 not in samples.mapped:
        return samples.result(samples.of_each(0) @ vector)
    return samples.result((samples.of_each(0) @ samples.of_each(1).unsqueeze(-1)).squeeze(-1))


_RULES: dict[str, Callable[..., Any]] = {
    "cat": _cat,
    "gelu_backward": _gelu_backward,
    "glu_backward": _glu_backward,
    "mv": _mv,
    "slice_backward": _slice_backward,
    "native_layer_norm": _layer_norm,
    "native_layer_norm_backward": _layer_norm_backward,
}
