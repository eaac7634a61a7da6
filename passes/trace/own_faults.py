"""A front end that fails by a mistake of this package's own: the next one is tried, and the user is told."""

from __future__ import annotations

import functools
import traceback
import warnings
from pathlib import Path

from pd2bw_fx import errors

_FOLDER = Path(__file__).resolve().parent
_PACKAGE = Path(errors.__file__).resolve().parent
# Types that no code here raises on purpose. Those of a refusal, and of torch's own functions, are others.
_MISTAKES = (AssertionError, AttributeError, KeyError, NameError, UnboundLocalError, ZeroDivisionError)


def warn_of_own_fault(front_end: str, error: Exception) -> None:
    """Warns of an error that began in this package's own code and is no refusal.

    Another front end may trace the model, with a fixed batch size or without data types, say. Nobody would
    look for the reason.
    """
    began = traceback.extract_tb(error.__traceback__)[-1]
    if isinstance(error, _MISTAKES) and _is_ours(began.filename):
        warnings.warn(
            f"the front end {front_end!r} ended with {type(error).__name__}: {error} "
            f"({Path(began.filename).name}:{began.lineno}), a mistake in pd2bw_fx, not in the model; please "
            "report it. The next front end is tried: trace_report says which one answered",
            stacklevel=2,
        )


@functools.cache
def _is_ours(file: str) -> bool:
    path = Path(file).resolve()
    return _FOLDER in path.parents or path.parent == _PACKAGE
