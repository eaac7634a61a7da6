"""A learning rate scheduler's state as JSON can hold it, and back for the option groups of another run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from pd2bw_fx.errors import InputError

_PAIRS = "pairs"  # of a dict whose keys are no texts, as MultiStepLR's milestones
_PLAIN = (int, float, str, bool, list, tuple, dict, type(None))


def as_number(option: Any) -> Any:
    """A learning rate may be a tensor."""
    return option.item() if isinstance(option, Tensor) and option.dim() == 0 else option


def plain_state(scheduler: LRScheduler) -> dict[str, Any]:
    """Its state without the functions in it, which the next run brings itself.

    Raises InputError for what JSON cannot hold.
    """
    state = {key: value for key, value in scheduler.state_dict().items() if key != "lr_lambdas"}
    for key, value in state.items():
        if not isinstance(value, _PLAIN) and not callable(value):
            raise InputError(
                f"{type(scheduler).__name__} keeps a {type(value).__name__} as {key!r}; a checkpoint has "
                "numbers, texts, lists and dicts of a scheduler: keep it so, or train without save_checkpoint"
            )
    return {key: _written(value) for key, value in state.items() if isinstance(value, _PLAIN)}


def _written(value: Any) -> Any:
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: _written(entry) for key, entry in value.items()}
        return {_PAIRS: [[key, _written(entry)] for key, entry in value.items()]}
    return [_written(entry) for entry in value] if isinstance(value, list | tuple) else as_number(value)


def _read(saved: Any, own: Any) -> Any:
    """In the kinds that this run's scheduler has: a Counter, a tuple."""
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
    """A scheduler's saved state for an optimizer with these groups, whose options have been loaded.

    Another number of ranks may have another number of groups (`num_saved` then), where the optimizer's
    factory made them of the parameters that it was given. Raises InputError for a list whose part of each
    group cannot be told.
    """
    state = {key: _read(value, own.get(key)) for key, value in saved.items()}
    if "lr_lambdas" in own:
        state["lr_lambdas"] = [None] * len(groups)  # the functions stay its own
    for key, option in (("base_lrs", "initial_lr"), ("_last_lr", "lr")):
        if key in state and all(option in group for group in groups):
            state[key] = [group[option] for group in groups]
    for key, before in state.items():
        now = own.get(key)
        if not isinstance(before, list) or not isinstance(now, list) or not before:
            continue
        if isinstance(before[0], dict):  # of schedulers one after another
            each = zip(before, now, strict=False)
            state[key] = [state_for_groups(*pair, groups, num_saved=num_saved) for pair in each]
            continue
        if (len(before), len(now)) != (num_saved, len(groups)) or len(before) == len(now):
            continue  # something else than one for each group
        if any(value != before[0] for value in before):
            raise InputError(
                f"the checkpoint's scheduler has {len(before)} values of {key!r} where this run's has "
                f"{len(now)}: its option groups differ from rank to rank; go on with as many ranks as then, "
                "or make the groups by parameter_options"
            )
        state[key] = before[:1] * len(now)
    return state
