"""Functions of torch that ask for plain sizes, in forms that keep symbolic sizes symbolic.

Each of these would otherwise fix the batch size or a length, or fail on a symbol.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.fx.experimental._config as symbolic_config
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.overrides import TorchFunctionMode

_TORCH_INFER_SIZE = torch._C._infer_size
_TORCH_MASKED_SELECT = torch.masked_select
_TORCH_FILL_DIAGONAL = Tensor.fill_diagonal_
_CHUNK, _SPLIT = (torch.chunk, Tensor.chunk), (torch.split, Tensor.split)
_MOST_PARTS = 64


@contextmanager
def keep_shapes_symbolic() -> Iterator[None]:
    """Enters those of this file's patches that every trace needs."""
    with infer_symbolic_sizes(), select_by_index(), fill_diagonals_of_any_size():
        yield


@contextmanager
def infer_symbolic_sizes() -> Iterator[None]:
    """Lets torch broadcast two shapes with symbolic sizes, where its own function takes numbers alone.

    kl_divergence(MultivariateNormal(..), MultivariateNormal(..)) calls it for the batch shape.
    """
    with patch.object(torch._C, "_infer_size", _inferred):
        yield


def _inferred(one: Sequence[Any], other: Sequence[Any]) -> Any:
    if all(type(size) is int for size in (*one, *other)):
        return _TORCH_INFER_SIZE(torch.Size(one), torch.Size(other))
    return torch.broadcast_shapes(one, other)  # type: ignore[no-untyped-call]


@contextmanager
def ignore_example_sizes() -> Iterator[None]:
    """Makes torch treat sizes of the example as it treats sizes that it knows nothing of.

    Torch notes how a tensor lies in memory while it traces, and compares sizes to find out:

        mask[:, :T, :T]  of a mask of 32 lies as a whole tensor does where T is 32, and else as a part of
                         one: the answer would leave the length 32 out, or all others

    Inside, whatever torch can do without the answer is done for all sizes. Torch's own exporter to ONNX sets
    the same option.
    """
    with symbolic_config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
        yield


@contextmanager
def select_by_index() -> Iterator[None]:
    """Replaces `masked_select` by indexing with the mask:

        loss(x.masked_select(mask), y.masked_select(mask))    ->    loss(x[mask], y[mask])
        frames.masked_select(mask.unsqueeze(-1))              ->    frames[mask].flatten()

    How much a mask selects is known only when the model runs. A trace identifies such a length by the mask
    that it was counted in, so that two selections by one mask have the same length. It does not see that
    masked_select counts.
    """
    with patch.object(torch, "masked_select", _selected), patch.object(Tensor, "masked_select", _selected):
        yield


def _selected(input: Tensor, mask: Tensor, **options: Any) -> Tensor:  # noqa: A002 - torch's word
    if options or mask.dtype is not torch.bool:
        return _TORCH_MASKED_SELECT(input, mask, **options)
    if input.shape == mask.shape:
        return input[mask]
    of_rows = _of_rows(mask)
    if of_rows is None or input.shape[:-1] != of_rows.shape:
        return _TORCH_MASKED_SELECT(input, mask)
    return input[of_rows].flatten()


def _of_rows(mask: Tensor) -> Tensor | None:
    """Returns the tensor that `mask` is with a last dimension of one, if it is a view of such a tensor."""
    base = mask._base
    if base is None or base.dim() + 1 != mask.dim() or (*base.shape, 1) != mask.shape:
        return None
    is_whole = base.storage_offset() == mask.storage_offset() and base.stride() == mask.stride()[:-1]
    return base if is_whole else None


@contextmanager
def fill_diagonals_of_any_size() -> Iterator[None]:
    """Fills the diagonal of a matrix by a mask, where torch would compare its sizes and fix them:

    same.fill_diagonal_(False)    ->    same.logical_and_(~torch.eye(batch, batch, dtype=torch.bool))
    """
    with patch.object(Tensor, "fill_diagonal_", _filled):
        yield


def _filled(matrix: Tensor, fill_value: Any, wrap: bool = False) -> Tensor:
    if matrix.dim() != 2 or wrap or all(type(size) is int for size in matrix.shape):
        return _TORCH_FILL_DIAGONAL(matrix, fill_value, wrap)
    diagonal = torch.eye(*matrix.shape, dtype=torch.bool, device=matrix.device)
    if matrix.dtype is torch.bool:  # onnxruntime chooses between numbers alone
        return matrix.logical_or_(diagonal) if fill_value else matrix.logical_and_(~diagonal)
    return matrix.masked_fill_(diagonal, fill_value)


class SymbolicSplits(TorchFunctionMode):
    """Passes `split` and `chunk` the sizes of their parts one by one.

    `torch.cat([x, y]).chunk(2)`: torch asks the sizes how many parts there are, which would fix the batch.
    Where a size is a multiple of its parts' for every batch, the number of parts needs no question.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _CHUNK or func in _SPLIT:
            tensor, how, dim = _bound(*args, **kwargs)
            sizes = _sizes(tensor, how, dim, is_number=func in _CHUNK)
            if sizes is not None:
                return tensor.split(sizes, dim)
        return func(*args, **kwargs)


def _bound(tensor: Any, how: Any = None, dim: int = 0, **named: Any) -> tuple[Any, Any, int]:
    """Returns the tensor, the number or size of its parts, and the dimension, whatever their keywords."""
    return tensor, next(iter(named.values()), how), dim


def _sizes(tensor: Any, how: Any, dim: int, *, is_number: bool) -> list[Any] | None:
    """Returns the sizes of the parts, or None where torch finds them by itself or they are not known."""
    if not isinstance(how, int | torch.SymInt) or not isinstance(tensor, Tensor):
        return None
    total: Any = tensor.shape[dim]
    if isinstance(total, int):
        return None
    if is_number:
        how = int(how)  # fixes a symbolic size
        is_multiple = how > 0 and statically_known_true(total % how == 0)
        return [total // how] * how if is_multiple else None
    for number in range(1, _MOST_PARTS):
        if statically_known_true(total == number * how) or _is_quotient(how, total, number):
            return [how] * number
    return None


def _is_quotient(how: Any, total: Any, number: int) -> bool:
    """Whether parts of the size `how` are halves, thirds, ..: `x.split(x.shape[0] // 2)` of an even batch."""
    return statically_known_true(total % number == 0) and statically_known_true(how == total // number)
