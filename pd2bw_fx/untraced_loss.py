"""Losses that no trace can follow: a matching of boxes, a mining of pairs, whatever asks values in Python.

Such a function is one operator of the model. A stage calls it by its name, and it is run as it is written.
"""

from __future__ import annotations

import ast
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from pd2bw_fx.arguments import require_loss_function
from pd2bw_fx.custom_function import registered
from pd2bw_fx.errors import InputError

NAMESPACE = "untraced"

_Loss = Callable[..., Tensor]
_functions: dict[str, _Loss] = {}  # by operator name


def untraced(function: _Loss, *, name: str | None = None) -> _Loss:
    """A loss function that is run instead of traced: in the model's forward, or as the `loss_fn` of `split`.

    `function` returns a scalar tensor, computed however it likes from the tensors that it is given, also
    nested in tuples, lists and dicts; autograd has to know the derivatives. A parameter that it reads must be
    among them. `name` is what the stages call it by: its own name, if that is left out. Local workers are
    sent the function; under torchrun, and where a saved pipeline is loaded, it has to be defined the same
    way. No ONNX file can have it.

    Raises InputError for what is no function, has parameters to train or a name that is none, and when it is
    run where the result is no scalar or depends on a parameter that was not given.
    """
    require_loss_function("function", function)
    known = _name_of(function, name)
    UntracedLoss(known, function).register()
    operator = _operator(known)

    @functools.wraps(function, updated=())
    def call(*args: Any, **kwargs: Any) -> Tensor:
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if _is_tensor(leaf)]
        if not any(map(_has_no_values, tensors)):
            return _checked(known, function(*args, **kwargs), tensors)
        is_plain = not kwargs and all(map(_is_tensor, args))
        loss: Tensor = operator(tensors) if is_plain else operator(tensors, _written(args, kwargs))
        return loss

    return call


def _name_of(function: _Loss, name: str | None) -> str:
    """A function that is defined anew keeps its name; of several objects of a class each has its own."""
    if name is None:
        name = getattr(function, "__name__", type(function).__name__)
        name = "loss" if name == "<lambda>" else name
    if not name.isidentifier():
        raise InputError(f"{name!r} is no name for a function; a word was expected")
    count, known = 1, name
    while known in _functions and not _is_the_same(_functions[known], function):
        count += 1
        known = f"{name}_{count}"
    return known


def _is_the_same(one: _Loss, other: _Loss) -> bool:
    if one is other:
        return True
    if not (isinstance(one, FunctionType) and isinstance(other, FunctionType)):
        return False
    named = one.__name__ != "<lambda>"
    return named and (one.__module__, one.__qualname__) == (other.__module__, other.__qualname__)


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, (Tensor, fx.Proxy))


def _has_no_values(tensor: Any) -> bool:
    """Whether it is a tracer's, or of the meta device."""
    return isinstance(tensor, (FakeTensor, FunctionalTensor, fx.Proxy)) or tensor.is_meta


@dataclass(frozen=True, slots=True)
class UntracedLoss:
    """What another process needs to know it."""

    name: str
    function: _Loss

    @classmethod
    def called(cls, name: str) -> UntracedLoss | None:
        return cls(name, _functions[name]) if name in _functions else None

    def register(self) -> None:
        """Make the operator known, or change what it calls."""
        if self.name not in _functions:
            registered(
                f"{self.name}(Tensor[] tensors, str structure='') -> Tensor",
                run=functools.partial(_run, self.name),
                differentiable=functools.partial(_differentiable, self.name),
                fake=_fake,
                namespace=NAMESPACE,
            )
        _functions[self.name] = self.function


def _operator(name: str) -> Any:
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def _run(name: str, tensors: Sequence[Tensor], structure: str = "") -> Tensor:
    args, kwargs = _read(tensors, structure) if structure else (tensors, {})
    return _checked(name, _functions[name](*args, **kwargs), tensors)


def _checked(name: str, loss: Any, tensors: Sequence[Tensor]) -> Tensor:
    """The loss in a precision that is known before: under autocast a function may choose another."""
    if isinstance(loss, Tensor) and not loss.dim() and loss.is_floating_point():
        return loss.to(_precision(tensors))
    is_tensor = isinstance(loss, Tensor)
    found = f"{loss.dtype} of shape {tuple(loss.shape)}" if is_tensor else f"a {type(loss).__name__}"
    raise InputError(f"{name} returns {found}; a loss, one floating-point number in a tensor, was expected")


def _precision(tensors: Sequence[Tensor]) -> torch.dtype:
    is_double = any(tensor.dtype is torch.float64 for tensor in tensors)
    return torch.float64 if is_double else torch.float32


def _differentiable(name: str, tensors: Sequence[Tensor], structure: str = "") -> Tensor:
    loss: Tensor = _Differentiable.apply(name, structure, *tensors)  # type: ignore[no-untyped-call]
    return loss


class _Differentiable(torch.autograd.Function):
    """The forward has the gradients too: the backward only scales them."""

    @staticmethod
    def forward(ctx: Any, name: str, structure: str, *tensors: Tensor) -> Tensor:
        if any(map(_has_no_values, tensors)):
            ctx.is_trained = [False] * len(tensors)
            with torch._C._AutoDispatchBelowAutograd():
                loss: Tensor = _operator(name)(list(tensors), structure)
                return loss
        given = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
        trained = [tensor for tensor in given if tensor.requires_grad]
        with torch.enable_grad():
            loss = _run(name, given, structure)
        if any(all(leaf is not tensor for tensor in given) for leaf in _leaves(loss)):
            raise InputError(f"{name} reads a parameter that it was not given; pass it as an argument")
        gradients = torch.autograd.grad(loss, trained, allow_unused=True) if loss.requires_grad else ()
        if trained and not gradients:  # which a batch without targets may do, and detach() always does
            warnings.warn(f"no gradient flows from the loss that {name} returned", stacklevel=2)
        ctx.is_trained = [tensor.requires_grad for tensor in given]
        ctx.save_for_backward(*gradients)
        return loss.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_loss: Tensor) -> Any:
        gradients = iter(ctx.saved_tensors)
        own = [next(gradients, None) if is_trained else None for is_trained in ctx.is_trained]
        return None, None, *(None if gradient is None else gradient * of_loss for gradient in own)


def _leaves(loss: Tensor) -> Iterator[Tensor]:
    """What the loss may be differentiated by."""
    waiting, seen = [loss.grad_fn], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        waiting += [following for following, _ in node.next_functions]


def _fake(tensors: Sequence[Tensor], structure: str = "") -> Tensor:
    return tensors[0].new_empty((), dtype=_precision(tensors))


def _written(args: Any, kwargs: Any) -> str:
    """The call with ... for each tensor: "({'boxes': ...}, ...), {'gamma': 2.0}"."""
    return f"{_literal(args)}, {_literal(kwargs)}"


def _literal(value: Any) -> str:
    if _is_tensor(value):
        return "..."
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return "{" + ", ".join(f"{key!r}: {_literal(inner)}" for key, inner in value.items()) + "}"
    if type(value) is list:
        return "[" + ", ".join(map(_literal, value)) + "]"
    if type(value) is tuple:
        return "(" + ", ".join(map(_literal, value)) + ("," if len(value) == 1 else "") + ")"
    if isinstance(value, (bool, int, str, type(None))) or (isinstance(value, float) and math.isfinite(value)):
        return repr(value)
    raise InputError(
        f"an untraced loss was called with a {type(value).__name__}; expected tensors, numbers and text, in "
        "tuples, lists and dicts: take what it needs of the rest before the call"
    )


def _read(tensors: Sequence[Tensor], structure: str) -> tuple[Any, Any]:
    left = iter(tensors)

    def filled(value: Any) -> Any:
        if value is Ellipsis:
            return next(left)
        if isinstance(value, dict):
            return {key: filled(inner) for key, inner in value.items()}
        return type(value)(map(filled, value)) if isinstance(value, (tuple, list)) else value

    args, kwargs = filled(ast.literal_eval(structure))
    return args, kwargs
