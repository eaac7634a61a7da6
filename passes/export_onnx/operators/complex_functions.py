"""Functions of complex numbers, by those of real numbers: powers, roots, logarithms, norms, comparisons.

With z = a + ib = r exp(i angle): z ** p = r ** p exp(i p angle), log z = log r + i angle.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .complex_numbers import joined, parts_of, polar, two_parts

_MOST_FACTORS = 8  # of a whole power that is written as products


def _of_complex(function: Callable[..., Any]) -> Callable[..., Any]:
    """Leaves all but complex tensors, and calls with `out`, to the exporter."""

    @functools.wraps(function)
    def taken(self: Any, *args: Any, **named: Any) -> Any:
        is_ours = isinstance(self, Tensor) and self.is_complex() and "out" not in named
        return function(self, *args, **named) if is_ours else NotImplemented

    return taken


@_of_complex
def _angle(z: Tensor) -> Tensor:
    real, imaginary = two_parts(z)
    return torch.atan2(imaginary + 0.0, real)


@_of_complex
def _power(z: Tensor, exponent: Any) -> Any:
    if not isinstance(exponent, int | float):
        return NotImplemented
    if exponent in range(1, _MOST_FACTORS + 1):
        return functools.reduce(torch.mul, [z] * int(exponent))
    return polar(z.abs() ** exponent, _angle(z) * exponent)


@_of_complex
def _square(z: Tensor) -> Tensor:
    return z * z


@_of_complex
def _root(z: Tensor) -> Tensor:
    return polar(z.abs().sqrt(), _angle(z) / 2)


@_of_complex
def _logarithm(z: Tensor) -> Tensor:
    return joined(z.abs().log(), _angle(z))


@_of_complex
def _sine(z: Tensor) -> Tensor:
    real, imaginary = two_parts(z)
    return joined(real.sin() * imaginary.cosh(), real.cos() * imaginary.sinh())


@_of_complex
def _cosine(z: Tensor) -> Tensor:
    real, imaginary = two_parts(z)
    return joined(real.cos() * imaginary.cosh(), -real.sin() * imaginary.sinh())


@_of_complex
def _tanh(z: Tensor) -> Tensor:
    """(tanh a + i tan b) / (1 + i tanh a tan b), without the poles of tan."""
    real, imaginary = two_parts(z)
    slope, sine, cosine = real.tanh(), imaginary.sin(), imaginary.cos()
    below = cosine.square() + (slope * sine).square()
    return joined(slope / below, sine * cosine * (1 - slope.square()) / below)


@_of_complex
def _sigmoid(z: Tensor) -> Tensor:
    """(1 + tanh(z / 2)) / 2"""
    real, imaginary = two_parts(z)
    real, imaginary = two_parts(_tanh(joined(real / 2, imaginary / 2)))
    return joined(real / 2 + 0.5, imaginary / 2)


@_of_complex
def _direction(z: Tensor) -> Tensor:
    size, (real, imaginary) = z.abs(), two_parts(z)
    divisor = torch.where(size == 0, 1.0, size)
    return joined(real / divisor, imaginary / divisor)


@_of_complex
def _equal(z: Tensor, other: Any) -> Any:
    if not isinstance(other, Tensor | int | float | complex):
        return NotImplemented
    (real, imaginary), (other_real, other_imaginary) = two_parts(z), parts_of(other)
    return (real == other_real) & (imaginary == other_imaginary)


@_of_complex
def _unequal(z: Tensor, other: Any) -> Any:
    is_equal = _equal(z, other)
    return is_equal if is_equal is NotImplemented else ~is_equal


@_of_complex
def _norm(z: Tensor, *args: Any, **named: Any) -> Any:
    return torch.linalg.vector_norm(z.abs(), *args, **named)


@_of_complex
def _variance(z: Tensor, *args: Any, **named: Any) -> Any:
    real, imaginary = two_parts(z)
    return torch.var(real, *args, **named) + torch.var(imaginary, *args, **named)


@_of_complex
def _deviation(z: Tensor, *args: Any, **named: Any) -> Any:
    return _variance(z, *args, **named).sqrt()


@_of_complex
def _linear(z: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if weight.dim() < 2:
        return NotImplemented
    product = z @ weight.mT
    return product if bias is None else product + bias


@_of_complex
def _imaginary(z: Tensor) -> Any:
    """Of a conjugate, whose imaginary part the exporter does not know."""
    return two_parts(z)[1] if z.is_conj() else NotImplemented


BY_FUNCTION: Mapping[Any, Callable[..., Any]] = {
    Tensor.imag.__get__: _imaginary,  # type: ignore[attr-defined]
    torch.linalg.vector_norm: _norm,
    torch.nn.functional.linear: _linear,
}
"""Functions that have no name in torch and of tensors alike."""

BY_NAME: Mapping[str, Callable[..., Any]] = {
    "__eq__": _equal,
    "__ne__": _unequal,
    "__pow__": _power,
    "angle": _angle,
    "cos": _cosine,
    "eq": _equal,
    "imag": _imaginary,
    "log": _logarithm,
    "ne": _unequal,
    "pow": _power,
    "sgn": _direction,
    "sigmoid": _sigmoid,
    "sin": _sine,
    "sqrt": _root,
    "square": _square,
    "std": _deviation,
    "tanh": _tanh,
    "var": _variance,
}
"""Functions of torch and tensors."""
