"""Operators that take tensors apart or join them, of complex tensors: of the real and of the imaginary part.

z[:, 1]             complex(real[:, 1], imag[:, 1])
where(c, z, 0)      complex(where(c, real, 0), where(c, imag, 0))
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from .complex_numbers import joined, parts_of, two_parts


def _of_each_part(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Computes a function that gives entries of its operands, of either part of them.

    A real tensor of numbers has zeros for its imaginary part; places, masks and sizes are given to both.
    """
    given = [each for each in tree_leaves((args, named)) if isinstance(each, Tensor) and each.is_complex()]
    if not given or "out" in named:
        return NotImplemented
    parts = {id(tensor): two_parts(tensor) for tensor in given}

    def part(place: int, operand: Any) -> Any:
        if isinstance(operand, Tensor) and operand.is_complex():
            return parts[id(operand)][place]
        return torch.zeros_like(operand) if place and _is_a_value(operand) else operand

    real, imaginary = (
        function(
            *tree_map(functools.partial(part, place), args), **tree_map(functools.partial(part, place), named)
        )
        for place in (0, 1)
    )
    if isinstance(real, Tensor):
        return joined(real, imaginary)
    return tuple(map(joined, real, imaginary))


def _is_a_value(operand: Any) -> bool:
    return isinstance(operand, Tensor) and operand.is_floating_point()


def _subscript(self: Tensor, index: Any) -> Any:
    """The exporter knows slices of complex tensors."""
    places = index if isinstance(index, tuple) else (index,)
    are_slices = all(isinstance(place, slice) or place is Ellipsis for place in places)
    return NotImplemented if are_slices else _of_each_part(Tensor.__getitem__, self, index)


def _chosen(condition: Tensor, input: Any = None, other: Any = None) -> Any:  # noqa: A002 - as torch calls it
    """`torch.where`, which gives the places of what is true where it has a condition alone."""
    if not any(isinstance(each, Tensor) and each.is_complex() for each in (input, other)):
        return NotImplemented
    (real, imaginary), (other_real, other_imaginary) = parts_of(input), parts_of(other)
    return joined(
        torch.where(condition, real, other_real), torch.where(condition, imaginary, other_imaginary)
    )


def _chosen_of(self: Tensor, condition: Tensor, other: Any) -> Any:
    """`Tensor.where`, whose condition is its first argument."""
    return _chosen(condition, self, other)


def _filled_where(self: Tensor, mask: Tensor, value: Any) -> Any:
    return _chosen(mask, value, self) if self.is_complex() else NotImplemented


_NAMES = (
    "broadcast_to", "chunk", "cumsum", "diag_embed", "diagonal", "expand_as", "gather",
    "hstack", "index_select", "masked_select", "narrow", "repeat", "repeat_interleave", "select", "split",
    "split_with_sizes", "take_along_dim", "tensor_split", "tile", "tril", "triu", "unbind", "unfold",
    "vstack",
)  # fmt: skip

BY_FUNCTION: Mapping[Any, Callable[..., Any]] = {
    getattr(holder, name): functools.partial(_of_each_part, getattr(holder, name))
    for name in _NAMES
    for holder in (torch, Tensor)
    if hasattr(holder, name)
} | {
    Tensor.__getitem__: _subscript,
    torch.where: _chosen,
    Tensor.where: _chosen_of,
    torch.masked_fill: _filled_where,
    Tensor.masked_fill: _filled_where,
}
"""Functions of torch and tensors."""
