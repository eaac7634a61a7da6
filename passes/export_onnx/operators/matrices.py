"""Linear algebra of small matrices, step by step: ONNX has products and determinants alone.

Gauss and Jordan's elimination, with the largest entry of a column as its pivot; Cholesky's decomposition and
substitution column by column. Each step is some ten nodes in the file, so that larger matrices are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

_LARGEST = 16  # rows of a matrix that is written step by step
_MOST_REFLECTIONS = 64
_TERMS, _HALVINGS = 10, 10


def _is_small(matrix: Any) -> bool:
    rows = matrix.shape[-1] if isinstance(matrix, Tensor) and matrix.dim() > 1 else None
    return type(rows) is int and rows <= _LARGEST and matrix.is_floating_point()


def _eliminated(matrix: Tensor, other: Tensor) -> Tensor:
    """Returns X of matrix @ X = other. matrix: (.., n, n), other: (.., n, k)"""
    size = matrix.shape[-1]
    leading = torch.broadcast_shapes(matrix.shape[:-2], other.shape[:-2])  # type: ignore[no-untyped-call]
    both = torch.cat([matrix.expand(*leading, -1, -1), other.expand(*leading, -1, -1)], -1)
    rows = torch.arange(size, device=matrix.device)
    for step in range(size):
        pivot = both[..., step:, step].abs().argmax(-1, keepdim=True) + step
        order = torch.where(rows == step, pivot, torch.where(rows == pivot, step, rows))
        both = both.gather(-2, order.unsqueeze(-1).expand(both.shape))
        row = both[..., step : step + 1, :] / both[..., step : step + 1, step : step + 1]
        both = torch.where((rows == step).unsqueeze(-1), row, both - both[..., step : step + 1] * row)
    return both[..., size:]


def _solution(A: Tensor, B: Tensor, *, left: bool = True, out: Any = None) -> Any:
    if out is not None or not _is_small(A):
        return NotImplemented
    if not left:
        return _eliminated(A.mT, B.mT).mT
    is_vector = B.dim() == 1 or (B.dim() == A.dim() - 1 and B.shape == A.shape[:-1])
    return _eliminated(A, B.unsqueeze(-1)).squeeze(-1) if is_vector else _eliminated(A, B)


def _inverse(A: Tensor, *, out: Any = None) -> Any:
    if out is not None or not _is_small(A):
        return NotImplemented
    return _eliminated(A, torch.eye(A.shape[-1], dtype=A.dtype, device=A.device))


def _sign_and_logarithm(A: Tensor, *, out: Any = None) -> Any:
    if out is not None or not _is_small(A):
        return NotImplemented
    determinant = torch.linalg.det(A)
    return determinant.sign(), determinant.abs().log()


def _decomposed(A: Tensor, *, upper: bool = False, out: Any = None) -> Any:
    """Cholesky's: column j of L is (A[:, j] - L[:, :j] L[j, :j]) over the root of its entry j."""
    if out is not None or not _is_small(A):
        return NotImplemented
    rows = torch.arange(A.shape[-1], device=A.device)
    columns: list[Tensor] = []
    for place in range(A.shape[-1]):
        column = A[..., place]
        for before in columns:
            column = column - before * before[..., place : place + 1]
        column = torch.where(rows >= place, column, 0.0)
        columns.append(column / column[..., place : place + 1].sqrt())
    return torch.stack(columns, -2 if upper else -1)


def _substituted(
    A: Tensor,
    B: Tensor,
    *,
    upper: bool,
    left: bool = True,
    unitriangular: bool = False,
    out: Any = None,
) -> Any:
    if out is not None or not _is_small(A):
        return NotImplemented
    if not left:
        return _substituted(A.mT, B.mT, upper=not upper, unitriangular=unitriangular).mT
    size = A.shape[-1]
    found: dict[int, Tensor] = {}
    for place in reversed(range(size)) if upper else range(size):
        row = B[..., place, :]
        for known, value in found.items():
            row = row - A[..., place, known].unsqueeze(-1) * value
        found[place] = row if unitriangular else row / A[..., place, place].unsqueeze(-1)
    return torch.stack([found[place] for place in range(size)], -2)


def _solved_by_factor(self: Tensor, input2: Tensor, upper: bool = False, *, out: Any = None) -> Any:
    """`torch.cholesky_solve`: self is the right side, input2 the factor L of L L^T (or the U of U^T U)."""
    if out is not None or not _is_small(input2):
        return NotImplemented
    factor = input2.mT if upper else input2
    return _substituted(factor.mT, _substituted(factor, self, upper=False), upper=True)


def _inverse_by_factor(self: Tensor, upper: bool = False, *, out: Any = None) -> Any:
    eye = torch.eye(self.shape[-1], dtype=self.dtype, device=self.device)
    return _solved_by_factor(eye, self, upper, out=out)


def _decomposed_of_tensor(self: Tensor, upper: bool = False, *, out: Any = None) -> Any:
    return _decomposed(self, upper=upper, out=out)


def _power(self: Tensor, n: int, *, out: Any = None) -> Any:
    if out is not None or n >= 0 or not _is_small(self):
        return NotImplemented
    return torch.linalg.matrix_power(_inverse(self), -n)


def _exponential(self: Tensor) -> Any:
    """Sums ten terms of the series at a 1024th of the matrix, and squares ten times, in double precision."""
    if not self.is_floating_point():
        return NotImplemented
    share = self.double() / 2**_HALVINGS
    eye = torch.eye(self.shape[-1], dtype=share.dtype, device=self.device)
    found = eye
    for term in range(_TERMS, 0, -1):
        found = eye + share @ found / term
    for _ in range(_HALVINGS):
        found = found @ found
    return found.to(self.dtype)


def _of_reflections(A: Tensor, tau: Tensor, *, out: Any = None) -> Any:
    """The product of Householder's reflections 1 - tau v v^T, whose v are below the diagonal of A."""
    count = tau.shape[-1]
    if out is not None or type(count) is not int or count > _MOST_REFLECTIONS or not A.is_floating_point():
        return NotImplemented
    rows = torch.arange(A.shape[-2], device=A.device)
    found = torch.eye(A.shape[-2], dtype=A.dtype, device=A.device).expand(*A.shape[:-2], -1, -1)
    for place in range(count):
        v = torch.where(rows > place, A[..., place], 0.0) + (rows == place)
        turned = (found @ v.unsqueeze(-1)) * v.unsqueeze(-2)
        found = found - tau[..., place, None, None] * turned
    return found[..., : A.shape[-1]]


BY_NAME: Mapping[str, Callable[..., Any]] = {
    "cholesky": _decomposed_of_tensor,
    "cholesky_inverse": _inverse_by_factor,
    "cholesky_solve": _solved_by_factor,
    "inverse": _inverse,
    "matrix_exp": _exponential,
    "matrix_power": _power,
    "slogdet": _sign_and_logarithm,
}
"""Functions of torch and tensors."""

BY_FUNCTION: Mapping[Any, Callable[..., Any]] = {
    torch.linalg.cholesky: _decomposed,
    torch.linalg.householder_product: _of_reflections,
    torch.linalg.inv: _inverse,
    torch.linalg.matrix_exp: _exponential,
    torch.linalg.matrix_power: _power,
    torch.linalg.slogdet: _sign_and_logarithm,
    torch.linalg.solve: _solution,
    torch.linalg.solve_triangular: _substituted,
}
"""Functions of torch.linalg."""
