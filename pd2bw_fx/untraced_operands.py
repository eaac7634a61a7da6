"""Calls of untraced functions: how they are written in a stage's code, and what they were given."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from pd2bw_fx.errors import InputError

if TYPE_CHECKING:
    from pd2bw_fx.untraced_call import UntracedFunction

    Known = Callable[[], UntracedFunction]  # the function that an operator calls may be defined again

NAMESPACE = "untraced"  # of these operators, in torch.ops


def operator_of(name: str, overload: str = "default") -> Any:
    return getattr(getattr(getattr(torch.ops, NAMESPACE), name), overload)


def is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, (Tensor, fx.Proxy))


def has_no_values(tensor: Any) -> bool:
    """Returns whether a tensor is a tracer's, or on the meta device."""
    return isinstance(tensor, (FakeTensor, FunctionalTensor, fx.Proxy)) or tensor.is_meta


def leaves_of(result: Tensor) -> Iterator[Tensor]:
    """Yields the tensors by which the result may be differentiated."""
    waiting, seen = [result.grad_fn], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        waiting += [following for following, _ in node.next_functions]


def written(args: Any, kwargs: Any) -> str:
    """Returns the call with ... for each tensor: "({'boxes': ...}, ...), {'gamma': 2.0}"."""
    return f"{_literal(args)}, {_literal(kwargs)}"


def _literal(value: Any) -> str:
    if is_tensor(value):
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
        f"an untraced function was called with a {type(value).__name__}; expected tensors, numbers and text, "
        "in tuples, lists and dicts: take what it needs of the rest before the call"
    )


def read(tensors: Sequence[Tensor], text: str) -> tuple[Any, Any]:
    """Returns (args, kwargs) of a written call."""
    left = iter(tensors)

    def filled(value: Any) -> Any:
        if value is Ellipsis:
            return next(left)
        if isinstance(value, dict):
            return {key: filled(inner) for key, inner in value.items()}
        return type(value)(map(filled, value)) if isinstance(value, (tuple, list)) else value

    args, kwargs = filled(ast.literal_eval(text))
    return args, kwargs
