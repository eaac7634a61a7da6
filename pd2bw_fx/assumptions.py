"""The messages of assertions that a trace adds, by which they are known again."""

from __future__ import annotations

from typing import Any

_ASSUMED = "values go another way than in the trace, at "
_CHECKED = "values fail the check at "
_LONGEST_LINE = 60


def assumption(place: str, line: str, *, check: str | None = None) -> str:
    """Returns the message of an assertion that the trace adds: `line` branches as on the example inputs.

    `check` is where it does so only to raise an error, in a function that the line calls perhaps.
    """
    shown = (line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}...").replace('"', "'")
    if check is None:
        return f"{_ASSUMED}{place}: {shown}"
    return f"{_CHECKED}{place}: {shown}" if check == place else f"{_CHECKED}{check}, from {place}: {shown}"


def is_assumption(message: Any) -> bool:
    return isinstance(message, str) and message.startswith((_ASSUMED, _CHECKED))
