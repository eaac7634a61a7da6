"""Arguments of public calls, refused in one line each: by the first that sees them, before it works."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from pd2bw_fx.errors import InputError


def require_whole_number(name: str, value: Any, *, least: int = 1) -> None:
    """Raises InputError for all but an int of `least` or more; None is for the caller to allow."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        count = {0: "zero", 1: "one"}.get(least, str(least))
        raise _wrong(name, value, f"a whole number of {count} or more")


def require_positive(name: str, value: Any) -> None:
    """Raises InputError for all but a number above 0, infinity too."""
    if not _is_number(value) or not value > 0:
        raise _wrong(name, value, "a number above 0")


def require_search(max_gap: Any, time_limit_s: Any) -> None:
    """Raises InputError for a gap or a time that no search can stop at."""
    if not _is_number(max_gap) or not 0 <= max_gap < 1:
        raise _wrong("max_gap", max_gap, "a share from 0 to below 1")
    if not _is_number(time_limit_s) or not time_limit_s > 0:
        raise _wrong("time_limit_s", time_limit_s, "a positive number of seconds")


def require_choice(name: str, value: Any, *choices: Any) -> None:
    """Raises InputError for a value that is none of these; True is not 1."""
    if not any(value is choice or (isinstance(value, str) and value == choice) for choice in choices):
        raise _wrong(name, value, " or ".join(map(repr, choices)))


def require_kind(name: str, value: Any, kind: type | tuple[type, ...], expected: str) -> None:
    """Raises InputError with what was `expected` for a value of another kind."""
    if not isinstance(value, kind):
        raise _wrong(name, value, expected)


def require_function(name: str, value: Any, expected: str) -> None:
    if not callable(value):
        raise _wrong(name, value, expected)


def require_loss_function(name: str, value: Any) -> None:
    """Raises InputError for what cannot be called, or has parameters to train."""
    if isinstance(value, type):
        raise InputError(f"{name} is the class {value.__name__}; give one of it: {value.__name__}()")
    require_function(name, value, "a function of output and targets")
    if not isinstance(value, nn.Module):
        return
    trainable = [own for own, parameter in value.named_parameters() if parameter.requires_grad]
    if trainable:
        raise InputError(
            f"{name} has the trainable parameter {trainable[0]!r}, which no stage would own; make it a part "
            "of the model, and let the model return its loss"
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def _wrong(name: str, value: Any, expected: str) -> InputError:
    return InputError(f"{name} is {value!r}; {expected} was expected")
