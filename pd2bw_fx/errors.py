"""Every error that a user can cause, each with a type of its own.

A message says what was found, what was expected and what to try.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_SHOWN = 60  # characters of a value; a longer one is cut to half as many


class Pd2bwError(Exception):
    """The base of all errors that are the user's to correct; anything else is a bug of ours."""


def require_not_interrupted(error: BaseException, outside: BaseException | None) -> None:
    """Raises KeyboardInterrupt for an error that came from one: torch's imports raise their own over it.

    `outside` is the exception that was being handled before.
    """
    cause: BaseException | None = error
    while cause is not None and cause is not outside:
        if isinstance(cause, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        cause = cause.__cause__ or cause.__context__


class InputError(Pd2bwError, ValueError):
    """An argument of the wrong kind, shape or size."""


class UsageError(InputError):
    """Words on the command line that the command does not take."""


class TraceError(Pd2bwError):
    """The model cannot be turned into an operator graph; names the line that stops it."""


class ClusterError(Pd2bwError, ValueError):
    """A cluster description that is missing something or contradicts itself."""


class InfeasibleError(Pd2bwError):
    """No assignment satisfies the limits; names the device, the bytes needed and the bytes there."""


class SolverError(Pd2bwError):
    """The integer program's solver is missing, failed, or ran out of time with no plan at all."""


class UnknownSolverError(SolverError, InputError):
    """The solver that was asked for is none of those that are installed here."""


class PlanMismatchError(Pd2bwError):
    """A plan that was made for another model, or a folder that is not what its manifest says."""


class ScheduleError(Pd2bwError, ValueError):
    """A schedule that would compute something else or never end; names the first offending action."""


class VerificationError(Pd2bwError):
    """The stages do not compute what the model computes; names the first tensor that differs."""


class WorkerError(Pd2bwError):
    """A rank failed while training; names the rank, and carries its own error."""


class ExportError(Pd2bwError):
    """The stages could not be written as ONNX, or the files do not compute what the stages compute."""


def shown(value: Any) -> str:
    """Returns a value for a one-line error: as Python writes it, or its type and its beginning."""
    text = repr(value)
    if len(text) <= _SHOWN and "\n" not in text:
        return text
    begins = " ".join(text[:_SHOWN].split())[: _SHOWN // 2]
    return f"a {type(value).__name__} ({begins} ..)"


@contextmanager
def models_own_backward() -> Iterator[None]:
    """Raises InputError for torch's error in a backward of the model as its author wrote it."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        raise InputError(
            f"the model's own backward raises on the example inputs: {reason}; expected a model that "
            "loss.backward() works with"
        ) from error
