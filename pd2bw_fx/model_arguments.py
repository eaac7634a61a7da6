"""Checks of models and losses among the arguments of public calls, beside those of `arguments.py`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from pd2bw_fx.arguments import require_function
from pd2bw_fx.errors import InputError

WRAPPERS = (DataParallel, DistributedDataParallel)  # the class of compiled modules takes a second to import


def forward_signature(model: nn.Module) -> inspect.Signature:
    """Returns the arguments that a model takes; torch's wrappers pass on whatever they are given."""
    while isinstance(model, WRAPPERS) or "_orig_mod" in model._modules:
        model = getattr(model, "_orig_mod" if "_orig_mod" in model._modules else "module")
    return inspect.signature(model.forward)


def accepts(function: Callable[..., Any], count: int) -> bool | None:
    """Returns whether it can be called with that many tensors in their order; None if nothing tells."""
    called = function.forward if isinstance(function, nn.Module) else function
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):  # a builtin function
        return _operator_accepts(called, count)
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True


def _operator_accepts(builtin: Callable[..., Any], count: int) -> bool | None:
    """The same for a function of torch's that is written in C++ (torch.mean), by its operator's schemas."""
    operator = getattr(torch.ops.aten, getattr(builtin, "__name__", ""), None)
    if operator is None or getattr(torch, operator.__name__, None) is not builtin:
        return None
    taken = [getattr(operator, overload)._schema.arguments for overload in operator.overloads()]
    return any(
        len(arguments) >= count
        and all(str(argument.type) == "Tensor" for argument in arguments[:count])
        and all(argument.has_default_value() for argument in arguments[count:])
        for arguments in taken
    )


def require_loss_function(name: str, value: Any) -> None:
    """Raises InputError for what cannot be called, or has parameters to train."""
    if isinstance(value, type):
        raise InputError(f"{name} is the class {value.__name__}; give one of it: {value.__name__}()")
    require_function(name, value, "a function of output and targets, or of the output alone")
    if not isinstance(value, nn.Module):
        return
    trainable = [own for own, parameter in value.named_parameters() if parameter.requires_grad]
    if trainable:
        raise InputError(
            f"{name} has the trainable parameter {trainable[0]!r}, which no stage would own; make it a part "
            "of the model, and let the model return its loss"
        )
