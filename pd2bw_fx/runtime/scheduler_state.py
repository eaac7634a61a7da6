"""A learning rate scheduler's state as JSON can hold it, and back for another run's option groups."""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from pd2bw_fx.errors import InputError

_ATTRIBUTES = "attributes"  # the key of a callable object's attributes
_LAMBDAS = "lr_lambdas"  # a key of LambdaLR's and MultiplicativeLR's: None, or an object's attributes
_PAIRS = "pairs"  # the key of a dict whose keys are not strings, such as MultiStepLR's milestones
_PLAIN = (int, float, str, bool, list, tuple, dict, type(None))


def as_number(option: Any) -> Any:
    """Returns a learning rate, which may be a tensor, as a number."""
    return option.item() if isinstance(option, Tensor) and option.dim() == 0 else option


def plain_state(scheduler: LRScheduler) -> dict[str, Any]:
    """Returns a scheduler's state without the functions in it, which the next run brings itself.

    For an object that is called like a function, it has the object's attributes. Raises InputError for what
    JSON cannot hold.
    """
    state, kind = scheduler.state_dict(), type(scheduler).__name__
    found: dict[str, Any] = {}
    objects = [(_LAMBDAS, attributes) for attributes in state.get(_LAMBDAS, ()) if attributes]
    for key, value in state.items():
        if isinstance(value, _PLAIN):
            found[key] = _written(value)
        elif not callable(value):
            raise _not_plain(kind, key, value)
        elif attributes := _attributes(value):
            objects.append((key, attributes))
            found[key] = {_ATTRIBUTES: _written(attributes)}
    for name, attributes in objects:
        for key, value in attributes.items():
            if not isinstance(value, _PLAIN):
                raise _not_plain(kind, f"{name}.{key}", value)
    return found


def _not_plain(kind: str, key: str, value: Any) -> InputError:
    return InputError(
        f"{kind} keeps a {type(value).__name__} as {key!r}; a checkpoint has numbers, texts, lists and dicts "
        "of a scheduler: keep it so, or train without save_checkpoint"
    )


def _attributes(called: Any) -> dict[str, Any]:
    """Returns the attributes of a user's object; functions, methods and classes have none that change."""
    of_python = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type, functools.partial)
    return {} if isinstance(called, of_python) else dict(getattr(called, "__dict__", {}))


def _written(value: Any) -> Any:
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: _written(entry) for key, entry in value.items()}
        return {_PAIRS: [[key, _written(entry)] for key, entry in value.items()]}
    return [_written(entry) for entry in value] if isinstance(value, list | tuple) else as_number(value)


def _read(saved: Any, own: Any) -> Any:
    """Returns saved values in the types that this run's scheduler has: a Counter, a tuple."""
    if isinstance(saved, dict) and saved.keys() == {_ATTRIBUTES} and hasattr(own, "__dict__"):
        vars(own).update(_read(saved[_ATTRIBUTES], dict(vars(own))))
        return own
    if isinstance(saved, dict):
        pairs = saved[_PAIRS] if saved.keys() == {_PAIRS} else saved.items()
        known = own if isinstance(own, dict) else {}
        found = {key: _read(entry, known.get(key)) for key, entry in pairs}
        return type(own)(found) if isinstance(own, dict) else found
    return tuple(saved) if isinstance(own, tuple) and isinstance(saved, list) else saved


def state_for_groups(
    saved: Mapping[str, Any],
    own: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    *,
    num_saved: int,
) -> dict[str, Any]:
    """Returns a scheduler's saved state for an optimizer with these groups, whose options have been loaded.

    With another number of ranks there may be another number of groups (it was `num_saved`), if the
    optimizer's factory made them from the parameters that it was given. Raises InputError for a list of which
    the part of each group cannot be told.
    """
    state = {key: _read(value, own.get(key)) for key, value in saved.items() if key != _LAMBDAS}
    if _LAMBDAS in own:
        state[_LAMBDAS] = _of_functions(saved.get(_LAMBDAS) or [], own[_LAMBDAS])
    for key, option in (("base_lrs", "initial_lr"), ("_last_lr", "lr")):
        if key in state and all(option in group for group in groups):
            state[key] = [group[option] for group in groups]
    for key, before in state.items():
        now = own.get(key)
        if not isinstance(before, list) or not isinstance(now, list) or not before or key == _LAMBDAS:
            continue
        if isinstance(before[0], dict):  # the states of chained schedulers
            each = zip(before, now, strict=False)
            state[key] = [state_for_groups(*pair, groups, num_saved=num_saved) for pair in each]
            continue
        if (len(before), len(now)) != (num_saved, len(groups)) or len(before) == len(now):
            continue  # not a list with one entry for each group
        state[key] = _one_each(key, before, now)
    return state


def _of_functions(saved: Sequence[Any], own: Sequence[Any]) -> list[Any]:
    """Returns the attributes of the objects among a scheduler's functions; None for a plain function."""
    if not any(saved):
        return [None] * len(own)
    kept = saved if len(saved) == len(own) else _one_each(_LAMBDAS, saved, own)
    return [now and _read(before or {}, now) for before, now in zip(kept, own, strict=True)]


def _one_each(key: str, before: Sequence[Any], now: Sequence[Any]) -> list[Any]:
    """Returns one value for each of another number of groups, if all saved groups had the same."""
    if any(value != before[0] for value in before):
        raise InputError(
            f"the checkpoint's scheduler has {len(before)} values of {key!r} where this run's has "
            f"{len(now)}: its option groups differ from rank to rank; go on with as many ranks as then, "
            "or make the groups by parameter_options"
        )
    return [before[0]] * len(now)
