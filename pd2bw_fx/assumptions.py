"""The messages of assertions that a trace adds, by which they are known again."""

from __future__ import annotations

from typing import Any

_ASSUMED = "values go another way than in the trace, at "
_LONGEST_LINE = 60


def assumption(place: str, line: str) -> str:
    """Returns the message of an assertion that the trace adds: `line` branches as on the example inputs."""
    shown = (line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}...").replace('"', "'")
    return f"{_ASSUMED}{place}: {shown}"


def is_assumption(message: Any) -> bool:
    return isinstance(message, str) and message.startswith(_ASSUMED)
