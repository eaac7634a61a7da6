"""The operator of an untraced loss: a number, and the gradients that its forward has computed as well."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pd2bw_fx.custom_function import registered
from pd2bw_fx.errors import InputError
from pd2bw_fx.untraced_operands import (
    NAMESPACE,
    has_no_values,
    is_tensor,
    leaves_of,
    operator_of,
    read,
    written,
)

if TYPE_CHECKING:
    from pd2bw_fx.untraced_call import UntracedFunction
    from pd2bw_fx.untraced_operands import Known


def register(name: str, known: Known) -> None:
    registered(
        f"{name}(Tensor[] tensors, str structure='') -> Tensor",
        run=functools.partial(_run, known),
        differentiable=functools.partial(_differentiable, known),
        fake=_fake,
        namespace=NAMESPACE,
    )


def call(known: UntracedFunction, args: Any, kwargs: Any, tensors: Sequence[Any]) -> Tensor:
    if not any(map(has_no_values, tensors)):
        return _checked(known.name, known.function(*args, **kwargs), tensors)
    operator = operator_of(known.name)
    is_plain = not kwargs and all(map(is_tensor, args))
    loss: Tensor = operator(tensors) if is_plain else operator(tensors, written(args, kwargs))
    return loss


def _run(known: Known, tensors: Sequence[Tensor], structure: str = "") -> Tensor:
    args, kwargs = read(tensors, structure) if structure else (tensors, {})
    return _checked(known().name, known().function(*args, **kwargs), tensors)


def _checked(name: str, loss: Any, tensors: Sequence[Tensor]) -> Tensor:
    """Returns the loss in a precision that is known before: under autocast a function may choose another."""
    if isinstance(loss, Tensor) and not loss.dim() and loss.is_floating_point():
        return loss.to(_precision(tensors))
    is_tensor = isinstance(loss, Tensor)
    found = f"{loss.dtype} of shape {tuple(loss.shape)}" if is_tensor else f"a {type(loss).__name__}"
    raise InputError(f"{name} returns {found}; a loss, one floating-point number in a tensor, was expected")


def _precision(tensors: Sequence[Tensor]) -> torch.dtype:
    is_double = any(tensor.dtype is torch.float64 for tensor in tensors)
    return torch.float64 if is_double else torch.float32


def _differentiable(known: Known, tensors: Sequence[Tensor], structure: str = "") -> Tensor:
    loss: Tensor = _Differentiable.apply(known, structure, *tensors)  # type: ignore[no-untyped-call]
    return loss


class _Differentiable(torch.autograd.Function):
    """A function whose forward computes the gradients too: the backward only scales them."""

    @staticmethod
    def forward(ctx: Any, known: Known, structure: str, *tensors: Tensor) -> Tensor:
        if any(map(has_no_values, tensors)):
            ctx.is_trained = [False] * len(tensors)
            with torch._C._AutoDispatchBelowAutograd():
                loss: Tensor = operator_of(known().name)(list(tensors), structure)
                return loss
        given = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
        trained = [tensor for tensor in given if tensor.requires_grad]
        with torch.enable_grad():
            loss = _run(known, given, structure)
        if any(all(leaf is not tensor for tensor in given) for leaf in leaves_of(loss)):
            raise InputError(
                f"{known().name} reads a parameter that it was not given; pass it as an argument"
            )
        gradients = torch.autograd.grad(loss, trained, allow_unused=True) if loss.requires_grad else ()
        if trained and not gradients:  # which a batch without targets may do, and detach() always does
            warnings.warn(f"no gradient flows from the loss that {known().name} returned", stacklevel=2)
        ctx.is_trained = [tensor.requires_grad for tensor in given]
        ctx.save_for_backward(*gradients)
        return loss.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_loss: Tensor) -> Any:
        gradients = iter(ctx.saved_tensors)
        own = [next(gradients, None) if is_trained else None for is_trained in ctx.is_trained]
        return None, None, *(None if gradient is None else gradient * of_loss for gradient in own)


def _fake(tensors: Sequence[Tensor], structure: str = "") -> Tensor:
    return tensors[0].new_empty((), dtype=_precision(tensors))
