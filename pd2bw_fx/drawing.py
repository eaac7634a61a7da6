"""Which calls of torch take numbers from a generator: of a traced graph's nodes and of running stages alike.

A stage's generators are seeded by the number of the operator that draws (`runtime/draws.py`), so both sides
have to count the same calls: dropout that drops nothing is not one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

Operator = torch._ops.OpOverload | torch._ops.OpOverloadPacket

SEED_OF_CHECKS = 8_589_934_583  # not one that a forward sets itself, as some do with 0 and 42
RECURRENT = frozenset(("gru", "lstm", "rnn_relu", "rnn_tanh"))
# Names without the "_" of operators that write in place.
_ALWAYS = {"bernoulli", "binomial", "cauchy", "exponential", "geometric", "log_normal", "multinomial"}
_ALWAYS |= {"poisson", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "random"}
_ALWAYS |= {"normal", "randperm", "uniform", "gumbel_softmax", "_sample_dirichlet", "_standard_gamma"}
# Functions of nn.functional; their operators are given what is drawn.
_POOLS = tuple(f"fractional_max_pool{d}d{indices}" for d in (2, 3) for indices in ("", "_with_indices"))


def gpus() -> list[int]:
    """Returns the numbers of the GPUs, which have generators of their own."""
    return list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []


def use_seed_of_checks() -> None:
    """Seeds the generators of all devices for a run that is compared with another one.

    Without an accelerator only the CPU has one: `torch.manual_seed` would format its caller's stack for each
    kind of device that is not there, which takes milliseconds.
    """
    if torch.accelerator.is_available():
        torch.manual_seed(SEED_OF_CHECKS)
    else:
        torch.default_generator.manual_seed(SEED_OF_CHECKS)


def operator_draws(operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Returns whether a call of torch.ops draws."""
    overload = _tagged(operator)
    if overload is None or overload.namespace != "aten":
        return overload is not None
    given: dict[str, Any] = {}
    for place, entry in enumerate(overload._schema.arguments):
        default = entry.default_value if entry.has_default_value() else None
        given[entry.name] = args[place] if place < len(args) else kwargs.get(entry.name, default)
    if given.get("train") is False or given.get("training") is False:
        return False
    rates = ("dropout", "dropout_p", *(("p",) if "dropout" in overload._opname else ()))
    return all(bool(given[rate]) for rate in rates if rate in given)


def function_draws(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Returns whether a call of the torch function or tensor method of this name draws."""
    if name in RECURRENT:
        if "dropout" in kwargs:
            return bool(kwargs["dropout"]) and bool(kwargs.get("train", True))
        # (..., dropout, train, bidirectional, batch_first); packed sequences have no batch_first.
        dropout, training = args[-3:-1] if isinstance(args[3], (list, tuple)) else args[-4:-2]
        return bool(dropout) and bool(training)

    def given(place: int, name: str, default: Any) -> Any:
        return args[place] if place < len(args) else kwargs.get(name, default)

    if name == "scaled_dot_product_attention":
        return bool(given(4, "dropout_p", 0.0))
    if name == "multi_head_attention_forward":
        return bool(given(10, "dropout_p", 0.0)) and given(13, "training", True) is not False
    if name in _POOLS:
        return given(5, "_random_samples", None) is None
    if name.startswith("rrelu"):
        return given(3, "training", False) is not False
    if "dropout" in name:
        training = kwargs["train"] if "train" in kwargs else given(2, "training", True)
        return bool(given(1, "p", 0.5)) and training is not False
    return name.removesuffix("_") in _ALWAYS


def layer_draws(layer: nn.Module) -> bool:
    """Returns whether a call of a layer of torch.nn draws, with its mode and options as they are."""
    if isinstance(layer, (nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)):
        return layer._random_samples is None
    rate: Any = 0
    if isinstance(layer, nn.modules.dropout._DropoutNd):
        rate = layer.p
    elif isinstance(layer, (nn.RNNBase, nn.MultiheadAttention)):
        rate = layer.dropout
    return layer.training and (bool(rate) or isinstance(layer, nn.RReLU))


def call_draws(call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Returns whether a call of a function of torch, of a tensor's method or of torch.ops draws."""
    if isinstance(call, Operator):
        return operator_draws(call, args, kwargs)
    return function_draws(getattr(call, "__name__", ""), args, kwargs)


def _tagged(operator: Operator) -> torch._ops.OpOverload | None:
    if isinstance(operator, torch._ops.OpOverload):
        overloads = [operator]
    else:
        overloads = [getattr(operator, name) for name in operator.overloads()]  # type: ignore[no-untyped-call]
    return next((o for o in overloads if torch.Tag.nondeterministic_seeded in o.tags), None)
