"""Checks of what a user's functions make of a rank's parameters: an optimizer, and a scheduler of it."""

from __future__ import annotations

import difflib
import inspect
import traceback
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils._python_dispatch import TorchDispatchMode

from pd2bw_fx.errors import InputError, Pd2bwError
from pd2bw_fx.units import counted

_EXPECTED = (
    "a function was expected that makes a torch optimizer of the parameters it is given: "
    "lambda parameters: torch.optim.AdamW(parameters, lr=3e-4)"
)
_BY_GRADIENTS = (
    "which a pipeline's update cannot do; use an optimizer that steps by gradients alone, such as AdamW"
)
_GIVEN = {
    "optimizer": "it is given a list of this rank's parameters (with parameter_options, of groups), and "
    "neither a model nor names: parameter_options=lambda name, parameter: {..} gives some other options",
    "lr_scheduler": "it is given this rank's optimizer",
}
_Made = TypeVar("_Made")


def made_by(function: Callable[[Any], _Made], given: Any, *, name: str) -> _Made:
    """Returns what the user's function, which is the option `name`, makes of what it is `given`.

    Raises InputError where it fails, with the line and what such a function is given.
    """
    try:
        return function(given)
    except Pd2bwError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)[1:2]
        where = f" at {Path(frames[0].filename).name}:{frames[0].lineno}" if frames else ""
        raise InputError(
            f"the function given as {name} failed{where} with {_in_one_line(error)}; {_GIVEN[name]}"
        ) from error


def _in_one_line(error: Exception) -> str:
    first, _, _ = str(error).partition("\n")
    return f"{type(error).__name__}: {first}"


def warn_of_left_out(made: Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
    """Warns of parameters that are trainable and that the optimizer does not step."""
    stepped = {id(parameter) for group in made.param_groups for parameter in group["params"]}
    left_out = [name for name, parameter in parameters.items() if id(parameter) not in stepped]
    if left_out:
        shown = ", ".join(left_out[:3]) + (f" and {len(left_out) - 3} more" if len(left_out) > 3 else "")
        warnings.warn(
            f"the optimizer leaves out {counted(len(left_out), 'parameter')} of the {len(parameters)} that "
            f"it was given, which stay as they are: {shown}; freeze them before the split if that is meant "
            "(requires_grad_(False)), so that no gradients are computed for them",
            stacklevel=2,
        )


def require_options_of(made: Optimizer, asked: Iterable[str]) -> None:
    """Raises InputError for a misspelt option in the groups of `parameter_options`, which torch would not.

    Warns of other names that an optimizer of torch's does not have: a scheduler of the user's own may read
    them.
    """
    kind, known = type(made).__name__, list(made.defaults)
    for name in asked:
        if name in ("params", "initial_lr", *known) or not known:
            continue
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
        if near:
            raise InputError(
                f"parameter_options gives {name!r}, and {kind} has no such option; did you mean {near[0]!r}?"
            )
        if type(made).__module__.startswith("torch.optim."):  # what another one reads is not known
            warnings.warn(
                f"parameter_options gives {name!r}, and {kind} has no such option, so it changes no step; "
                f"its options are {', '.join(known)}",
                stacklevel=2,
            )


@contextmanager
def telling_of_closures(optimizer: Optimizer) -> Iterator[None]:
    """Raises InputError where a step fails for want of a closure, as SAM's does."""
    try:
        yield
    except Exception as error:
        wants = "closure" in str(error) or str(error) == "'NoneType' object is not callable"
        if not wants or "closure" not in inspect.signature(type(optimizer).step).parameters:
            raise
        raise InputError(
            f"{type(optimizer).__name__} wants a closure that computes the loss again within a step "
            f"({_in_one_line(error)}), {_BY_GRADIENTS}"
        ) from error


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether this thread draws from torch's own generator. What other threads draw is not seen."""

    is_drawn = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and given.get("generator") is None:
            self.is_drawn = True
        return func(*args, **given)


@contextmanager
def telling_of_draws(optimizer: Optimizer, held_elsewhere: Collection[str]) -> Iterator[None]:
    """Raises InputError where a step draws random numbers for parameters that other ranks hold too.

    `held_elsewhere` are their names. Every rank draws others, so the parameter would have other values on
    each of its ranks, a little more with each step.
    """
    if not held_elsewhere:
        yield
        return
    with _Draws() as draws:  # type: ignore[no-untyped-call]
        yield
    if draws.is_drawn:
        raise InputError(
            f"{type(optimizer).__name__} draws random numbers in its step, others on each rank, and "
            f"{min(held_elsewhere)!r} is held by several ranks, which would no longer agree; draw from a "
            "torch.Generator that is seeded alike on all ranks, anew for each step and parameter, or train "
            "without copies of stages and tied parameters"
        )


@contextmanager
def telling_of_the_last_step(scheduler: LRScheduler) -> Iterator[None]:
    """Raises InputError where a scheduler of a number of steps (OneCycleLR) is stepped past its end."""
    try:
        yield
    except ValueError as error:
        if "total steps" not in str(error):
            raise
        raise InputError(
            f"{type(scheduler).__name__} is at its end ({error}); it steps once an update, which is once for "
            "each batch: make it for as many steps as there are batches in all epochs"
        ) from error


def expected_instead_of(optimizer: object) -> str:
    if not isinstance(optimizer, list | tuple | dict):
        return _EXPECTED
    return f"{_EXPECTED}; one optimizer steps all parameters, and parameter_options gives some other options"


def require_optimizer(made: Any, parameters: Iterable[nn.Parameter]) -> None:
    if not isinstance(made, Optimizer):
        raise InputError(f"optimizer gave a {type(made).__name__}; {expected_instead_of(made)}")
    own = {id(parameter) for parameter in parameters}
    if any(id(p) not in own for group in made.param_groups for p in group["params"]):
        raise InputError(
            "optimizer steps parameters that it was not given, such as those of the model itself; "
            + _EXPECTED
        )
    if isinstance(made, torch.optim.SparseAdam):
        raise InputError(
            "SparseAdam takes sparse gradients, and those of microbatches are added up in dense ones; use an "
            "optimizer that takes those, such as AdamW"
        )
    takes = list(inspect.signature(type(made).step).parameters.values())[1:]
    if any(taken.default is taken.empty and taken.kind is taken.POSITIONAL_OR_KEYWORD for taken in takes):
        raise InputError(
            f"{type(made).__name__} computes the loss several times in one step, {_BY_GRADIENTS}"
        )


def require_no_hooks(parameters: Mapping[str, nn.Parameter]) -> None:
    for name, parameter in parameters.items():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise InputError(
                f"the optimizer's function has registered a hook on {name}, and gradients come to it added "
                "up over a whole update, by no backward that would call one; change them in "
                "optimizer.register_step_pre_hook, before each step"
            )


def require_scheduler(made: Any, optimizer: Optimizer) -> None:
    if not hasattr(made, "step"):
        raise InputError(
            f"lr_scheduler gave a {type(made).__name__}; a function was expected that makes a "
            "scheduler of the optimizer it is given: lambda optimizer: CosineAnnealingLR(optimizer, 1000)"
        )
    if isinstance(made, ReduceLROnPlateau):
        raise InputError(
            "ReduceLROnPlateau wants a metric at every step, which a pipeline's update does not have; "
            "use a scheduler that steps by itself, such as CosineAnnealingLR"
        )
    of_groups = getattr(getattr(made, "optimizer", optimizer), "param_groups", optimizer.param_groups)
    if of_groups is not optimizer.param_groups:
        raise InputError(
            f"lr_scheduler gave a {type(made).__name__} of another optimizer than the one it was given, and "
            "would change no learning rate; make it of that one: "
            "lambda optimizer: CosineAnnealingLR(optimizer, 1000)"
        )
