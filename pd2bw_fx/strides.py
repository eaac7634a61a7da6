"""The order in which the elements of a tensor lie in memory, for another tensor that is to have the same.

x = torch.empty(8, 3, 32, 32).to(memory_format=torch.channels_last)

    order_of(x)                   (0, 2, 3, 1): the channels of a pixel stand together
    packed(x, (0, 2, 3, 1))       (8, 32, 32, 3), contiguous: what is written or sent
    unpacked(.., (0, 2, 3, 1))    (8, 3, 32, 32), channels_last again
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Order = tuple[int, ...]


def order_of(tensor: Tensor) -> Order:
    """Returns the dimensions from the outermost in memory to the innermost.

    It is empty where the dimensions stand in that order, and for a tensor that does not fill its memory
    (expanded, or every second element), which becomes contiguous.
    """
    stride = tensor.stride()
    order = tuple(sorted(range(len(stride)), key=lambda dimension: -stride[dimension]))
    if order == tuple(range(len(stride))) or not torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return ()
    return order


def packed(tensor: Tensor, order: Order) -> Tensor:
    """Returns a view that is contiguous if the tensor lies in this order."""
    return tensor.permute(order) if order else tensor


def packed_shape(shape: Sequence[int], order: Order) -> tuple[int, ...]:
    return tuple(shape[dimension] for dimension in order) if order else tuple(shape)


def unpacked(tensor: Tensor, order: Order) -> Tensor:
    """Returns the view from which `packed` was made."""
    return tensor.permute(sorted(range(len(order)), key=order.__getitem__)) if order else tensor


def laid_as(tensor: Tensor, like: Tensor) -> Tensor:
    """Returns the tensor in the memory order of another one of its shape; itself, if it has that."""
    order = order_of(like)
    return unpacked(packed(tensor, order).contiguous(), order)
