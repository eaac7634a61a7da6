"""Special functions that ONNX lacks, or has for some numbers only."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .ordering import at_least, at_most


def _hypot(self: Tensor, other: Tensor) -> Tensor:
    """Scales by the larger side, so that the square neither overflows nor vanishes."""
    dtype = torch.result_type(self, other)
    wide = torch.float32 if dtype.itemsize < 4 else dtype
    a, b = self.to(wide).abs(), other.to(wide).abs()
    large, small = torch.maximum(a, b), torch.minimum(a, b)
    is_whole = (large == 0) | (large == math.inf)
    share = torch.where(is_whole, 0.0, small / torch.where(is_whole, 1.0, large))
    found = large * (1 + share * share).sqrt()
    return torch.where((a == math.inf) | (b == math.inf), math.inf, found).to(dtype)


def _lgamma(self: Tensor) -> Tensor:
    """Computes Stirling's series at x + 7 in double precision, and reflects arguments below a half.

    It is infinite at infinity and at the poles, which are the integers up to 0.
    """
    x = self.double()
    is_small = x < 0.5
    z = torch.where(is_small, 1 - x, x)
    far = z + 7
    square = far.reciprocal().square()
    series = (1 / 12 - square * (1 / 360 - square * (1 / 1260 - square / 1680))) / far
    found = (far - 0.5) * far.log() - far + 0.5 * math.log(2 * math.pi) + series
    for step in range(7):
        found = found - (z + step).log()
    reflected = math.log(math.pi) - (math.pi * (x - x.floor())).sin().abs().log() - found
    is_infinite = x.isinf() | ((x <= 0) & (x == x.floor()))
    return torch.where(is_infinite, math.inf, torch.where(is_small, reflected, found)).to(self.dtype)


def _digamma(self: Tensor, *, out: Any = None) -> Any:
    """Computes the asymptotic series at x + 7 in double precision, and reflects arguments below a half."""
    if out is not None:
        return NotImplemented
    x = self.double()
    is_small = x < 0.5
    z = torch.where(is_small, 1 - x, x)
    far = z + 7
    square = far.reciprocal().square()
    series = square * (1 / 12 - square * (1 / 120 - square * (1 / 252 - square * (1 / 240 - square / 132))))
    found = far.log() - 0.5 / far - series
    for step in range(7):
        found = found - 1 / (z + step)
    turn = math.pi * (x - x.floor())
    reflected = found - math.pi * turn.cos() / turn.sin()
    found = torch.where(is_small, torch.where(x == x.floor(), math.nan, reflected), found)
    return torch.where(x == 0, -math.inf, found).to(self.dtype)


def _polygamma(n: Any, self: Any, *, out: Any = None) -> Any:
    """Of order 0 and 1; a tensor has its order as the argument."""
    order, x = (self, n) if isinstance(n, Tensor) else (n, self)
    if out is not None or order not in (0, 1):
        return NotImplemented
    return _digamma(x) if order == 0 else _trigamma(x)


def _trigamma(self: Tensor) -> Tensor:
    x = self.double()
    is_small = x < 0.5
    z = torch.where(is_small, 1 - x, x)
    far = z + 7
    square = far.reciprocal().square()
    series = 1 / 6 - square * (1 / 30 - square * (1 / 42 - square * (1 / 30 - square * 5 / 66)))
    found = (1 + 0.5 / far + square * series) / far
    for step in range(7):
        found = found + 1 / (z + step).square()
    reflected = (math.pi / (math.pi * (x - x.floor())).sin()).square() - found
    return torch.where(is_small, reflected, found).to(self.dtype)


def _lgamma_of_dimensions(self: Tensor, p: int, *, out: Any = None) -> Any:
    """The logarithm of the multivariate gamma function."""
    if out is not None:
        return NotImplemented
    parts = [_lgamma(self - place / 2) for place in range(p)]
    return sum(parts[1:], parts[0]) + p * (p - 1) / 4 * math.log(math.pi)


def _logit(self: Tensor, eps: float | None = None, *, out: Tensor | None = None) -> Any:
    """Avoids ONNX's Clip, which makes NaN a bound."""
    if eps is None or out is not None:
        return NotImplemented
    share = at_most(at_least(self, eps), 1 - eps)
    return (share / (1 - share)).log()


# Coefficients below and above w = 5, the highest power first.
_ERFINV_NEAR = (
    2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087, -0.00125372503,
    -0.00417768164, 0.246640727, 1.50140941,
)  # fmt: skip
_ERFINV_FAR = (
    -0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613,
    0.00943887047, 1.00167406, 2.83297682,
)  # fmt: skip


def _erfinv(self: Tensor) -> Any:
    """Computes the series of M. Giles, "Approximating the erfinv function" (2010), table 5."""
    if self.dtype is torch.float64:
        return NotImplemented
    x = self.float()
    w = -((1 - x) * (1 + x)).log()
    is_near = w < 5
    z = torch.where(is_near, w - 2.5, w.sqrt() - 3)
    found = torch.zeros_like(x)
    for near, far in zip(_ERFINV_NEAR, _ERFINV_FAR, strict=True):
        found = found * z + torch.where(is_near, near, far)
    return torch.where(x.abs() == 1, x * math.inf, found * x).to(self.dtype)


BY_NAME: Mapping[str, Callable[..., Any]] = {
    "digamma": _digamma,
    "erfinv": _erfinv,
    "hypot": _hypot,
    "lgamma": _lgamma,
    "logit": _logit,
    "mvlgamma": _lgamma_of_dimensions,
    "polygamma": _polygamma,
}
"""Functions of torch and tensors."""

BY_FUNCTION: Mapping[Any, Callable[..., Any]] = {
    torch.special.digamma: _digamma,
    torch.special.erfinv: _erfinv,
    torch.special.gammaln: _lgamma,
    torch.special.logit: _logit,
    torch.special.multigammaln: _lgamma_of_dimensions,
    torch.special.polygamma: _polygamma,
    torch.special.psi: _digamma,
}
