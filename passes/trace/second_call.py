"""Whether a second call of the forward is traced to the same program as the first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pd2bw_fx.errors import TraceError

from .chance import calls_by_chance, random_numbers_kept
from .program import Program
from .watch import Change, Watch


def require_the_same_again(program: Program, first: Any, traced_again: Callable[[], Any]) -> None:
    """Traces once more as a second call would run, and refuses a program that is another one then.

    `first` is what was traced, in a form to be compared. Only where the first call set attributes or drew
    Python's or numpy's random numbers can there be a difference.
    """
    watch = program.watch
    if not watch.changes and not watch.drew_python_random:
        return
    try:
        for change in watch.changes:
            setattr(change.module, change.attribute, change.after)
        program.watch = Watch()
        for drawn in calls_by_chance() if watch.drew_python_random else [random_numbers_kept()]:
            with drawn:
                if traced_again() != first:
                    raise TraceError(_message(watch.changes))
    finally:
        for change in watch.changes:
            setattr(change.module, change.attribute, change.before)
        program.watch = watch


def _message(changes: Sequence[Change]) -> str:
    if not changes:
        return (
            "the model draws Python or numpy random numbers in its forward and computes something else from "
            "call to call; a trace would keep one draw for ever. Draw with torch.rand, or set the rate "
            "(layerdrop) to 0"
        )
    return (
        f"the model computes something else from call to call, by its {changes[0]}; a trace would keep the "
        "first call for ever. Make it a buffer that the forward updates, or an argument of the forward"
    )
