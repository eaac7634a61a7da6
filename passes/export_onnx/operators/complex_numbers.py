"""Sums, products (also of matrices), exp, constants and writes of complex tensors, part by part.

The exporter has complex tensors as pairs of numbers in a last dimension, and looks for one in the number too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def _times(self: Any, other: Any, *, out: Tensor | None = None) -> Any:
    if not isinstance(self, Tensor):
        self, other = other, self
    if out is None and _are_real_and_complex(self, other):
        return _of_parts(self * other.real, self * other.imag, other)
    if out is not None or not _are_complex_and_real(self, other):
        return NotImplemented
    return torch.view_as_complex(pairs_of(self) * other)


def divided_by_number(self: Any, other: Any, *, out: Tensor | None = None) -> Any:
    if out is not None or not _are_complex_and_real(self, other):
        return NotImplemented
    return torch.view_as_complex(pairs_of(self) / other)


def _plus(self: Any, other: Any, *, alpha: float = 1, out: Tensor | None = None) -> Any:
    if not isinstance(self, Tensor):
        self, other = other, self
    if out is None and _are_real_and_complex(self, other) and alpha == 1:
        return _of_parts(self + other.real, torch.full_like(self, other.imag), other)
    if out is not None or not _are_complex_and_real(self, other):
        return NotImplemented
    parts = pairs_of(self)
    return torch.view_as_complex(parts + torch.tensor([other * alpha, 0], dtype=parts.dtype))


def _minus(self: Any, other: Any, *, alpha: float = 1, out: Tensor | None = None) -> Any:
    return _plus(self, -other * alpha, out=out) if _are_complex_and_real(self, other) else NotImplemented


def subtracted_from_number(self: Any, other: Any, *, alpha: float = 1) -> Any:
    if not _are_complex_and_real(self, other) or not isinstance(alpha, int | float):
        return NotImplemented
    return _plus(_times(self, -alpha), other)


def _put_into_places(self: Tensor, places: Any, value: Any) -> Any:
    """Writes pairs of numbers: the exporter would look for the derivative of a complex write."""
    are_complex = all(isinstance(tensor, Tensor) and tensor.is_complex() for tensor in (self, value))
    if not are_complex or self.is_conj():
        return NotImplemented
    torch.view_as_real(self)[places] = pairs_of(value)
    return None


def _contracted(equation: Any = None, *operands: Any, **named: Any) -> Any:
    factors = operands[0] if len(operands) == 1 and isinstance(operands[0], list | tuple) else operands
    if named or not isinstance(equation, str) or len(factors) not in (1, 2):
        return NotImplemented
    if len(factors) == 1:
        parts = two_parts(factors[0]) if factors[0].is_complex() else ()
        return joined(*(torch.einsum(equation, part) for part in parts)) if parts else NotImplemented
    return _by_parts(functools.partial(torch.einsum, equation), *factors)


def _matrix_product(*factors: Any, **named: Any) -> Any:
    return NotImplemented if named or len(factors) != 2 else _by_parts(torch.matmul, *factors)


def _by_parts(product: Callable[[Tensor, Tensor], Tensor], first: Any, second: Any) -> Any:
    if not all(isinstance(factor, Tensor) and factor.is_complex() for factor in (first, second)):
        return NotImplemented
    (real, imaginary), (other_real, other_imaginary) = two_parts(first), two_parts(second)
    parts = (
        product(real, other_real) - product(imaginary, other_imaginary),
        product(real, other_imaginary) + product(imaginary, other_real),
    )
    return joined(*parts)


def two_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Returns the real and the imaginary part."""
    return pairs_of(tensor).unbind(-1)


def parts_of(operand: Any) -> tuple[Any, Any]:
    """Returns the real and the imaginary part of a tensor or number."""
    if not isinstance(operand, Tensor):
        return complex(operand).real, complex(operand).imag
    if operand.is_complex():
        real, imaginary = two_parts(operand)
        return real, imaginary
    return operand, 0.0


def joined(real: Tensor, imaginary: Tensor) -> Tensor:
    dtype = torch.promote_types(real.dtype, imaginary.dtype)
    return torch.view_as_complex(torch.stack([real.to(dtype), imaginary.to(dtype)], -1))


def polar(size: Tensor, angle: Tensor) -> Tensor:
    return joined(size * angle.cos(), size * angle.sin())


def _exponential(self: Any = None, **named: Any) -> Any:
    if named or not isinstance(self, Tensor) or not self.is_complex():
        return NotImplemented
    real, angle = two_parts(self)
    return polar(real.exp(), angle)


def _padded(
    input: Any,  # noqa: A002 - as torch calls it
    pad: Sequence[int],
    mode: str = "constant",
    value: Any = None,
) -> Any:
    if not isinstance(input, Tensor) or not input.is_complex() or mode != "constant" or value:
        return NotImplemented
    return torch.view_as_complex(functional.pad(pairs_of(input), (0, 0, *pad)))


def _filled_at(self: Tensor, dim: int, index: Tensor, value: Any) -> Any:
    if not self.is_complex() or not isinstance(value, int | float):
        return NotImplemented
    real, imaginary = two_parts(self)
    return joined(real.index_fill(dim, index, value), imaginary.index_fill(dim, index, 0))


def _unsqueezed(self: Tensor, dim: int) -> Any:
    if not self.is_complex():
        return NotImplemented
    return torch.view_as_complex(pairs_of(self).unsqueeze(dim if dim >= 0 else dim - 1))


def _expanded(self: Tensor, *size: Any) -> Any:
    if not self.is_complex():
        return NotImplemented
    sizes = size[0] if len(size) == 1 and isinstance(size[0], list | tuple) else size
    return torch.view_as_complex(pairs_of(self).expand(*sizes, 2))


def _zeros(*size: Any, dtype: torch.dtype | None = None, device: Any = None, **others: Any) -> Any:
    """The exporter makes real zeros of them."""
    if dtype is None or not dtype.is_complex or others:
        return NotImplemented
    sizes = size[0] if len(size) == 1 and isinstance(size[0], list | tuple) else size
    return torch.view_as_complex(torch.zeros(*sizes, 2, dtype=dtype.to_real(), device=device))


def _full(size: Any, fill_value: Any, *, dtype: torch.dtype | None = None, **others: Any) -> Any:
    if not isinstance(fill_value, int | float | complex):
        return NotImplemented
    if dtype is None and isinstance(fill_value, complex):
        dtype = torch.get_default_dtype().to_complex()
    zeros = _zeros(*size, dtype=dtype, **others)
    if zeros is NotImplemented:
        return NotImplemented
    real, imaginary = parts_of(fill_value)
    pair = torch.tensor([real, imaginary], dtype=zeros.dtype.to_real(), device=zeros.device)
    return torch.view_as_complex(pairs_of(zeros) + pair)


def _ones(*size: Any, **options: Any) -> Any:
    sizes = size[0] if len(size) == 1 and isinstance(size[0], list | tuple) else size
    return _full(sizes, 1.0, **options)


def _new(made: Callable[..., Any], self: Tensor, *args: Any, **options: Any) -> Any:
    """`self.new_zeros(size)` and its like."""
    return made(*args, **{"dtype": self.dtype, "device": self.device} | options)


def _like(made: Callable[..., Any], self: Tensor, *args: Any, **options: Any) -> Any:
    """`torch.zeros_like(self)` and its like."""
    return made(self.shape, *args, **{"dtype": self.dtype, "device": self.device} | options)


def _are_real_and_complex(tensor: Any, number: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.is_floating_point() and isinstance(number, complex)


def _of_parts(real: Tensor, imaginary: Tensor, number: complex) -> Tensor:
    """Returns a complex tensor of the type that the parts have beside a complex number."""
    dtype = torch.result_type(real, number).to_real()
    return joined(real.to(dtype), imaginary.to(dtype))


def _are_complex_and_real(tensor: Any, number: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.dtype.is_complex and isinstance(number, int | float)


def pairs_of(tensor: Tensor) -> Tensor:
    """Returns the real and the imaginary part in a last dimension."""
    if not tensor.is_conj():
        return torch.view_as_real(tensor)
    parts = torch.view_as_real(tensor.conj())
    return parts * torch.tensor([1, -1], dtype=parts.dtype)


BY_NAME: Mapping[str, Callable[..., Any]] = {
    "__add__": _plus,
    "__matmul__": _matrix_product,
    "__mul__": _times,
    "__radd__": _plus,
    "__rmul__": _times,
    "__setitem__": _put_into_places,
    "__sub__": _minus,
    "__truediv__": divided_by_number,
    "add": _plus,
    "bmm": _matrix_product,
    "einsum": _contracted,
    "exp": _exponential,
    "full": _full,
    "full_like": functools.partial(_like, _full),
    "expand": _expanded,
    "index_fill": _filled_at,
    "matmul": _matrix_product,
    "mm": _matrix_product,
    "new_full": functools.partial(_new, _full),
    "new_ones": functools.partial(_new, _ones),
    "new_zeros": functools.partial(_new, _zeros),
    "ones": _ones,
    "ones_like": functools.partial(_like, _ones),
    "pad": _padded,
    "mul": _times,
    "multiply": _times,
    "sub": _minus,
    "subtract": _minus,
    "true_divide": divided_by_number,
    "unsqueeze": _unsqueezed,
    "zeros": _zeros,
    "zeros_like": functools.partial(_like, _zeros),
}
"""Functions of torch and tensors."""
