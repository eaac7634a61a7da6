"""Numbers that report how comparisons with them come out; `item` returns them in a run on the example inputs.

if hidden.max().item() > 100:      a trace has no number there, and goes the way that the example took
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

Report = Callable[[bool, FrameType], None]  # takes the outcome, and the frame that compares


class _Whole(int):
    """An int with an attribute `report`, which is called with each comparison's outcome."""


class _Real(float):
    """A float with an attribute `report`, as `_Whole` has."""


def reporting_number(value: Any, report: Report) -> Any:
    """Returns an int or float as one that reports; anything else as it is."""
    kind = _Whole if type(value) is int else _Real if type(value) is float else None
    if kind is None:
        return value
    number: Any = kind(value)
    number.report = report
    return number


def _with_report(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a comparison: it reports its outcome."""

    def compared(number: Any, *others: Any) -> Any:
        outcome = plain(number, *others)
        if isinstance(outcome, bool):
            number.report(outcome, sys._getframe(1))
        return outcome

    return compared


def _with_reporting_result(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps an arithmetic operation: its result reports as its operand does."""

    def made(number: Any, *others: Any) -> Any:
        return reporting_number(plain(number, *others), number.report)

    return made


_QUESTIONS = ("lt", "le", "gt", "ge", "eq", "ne", "bool")
_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_UNARY = ("neg", "abs")
for _kind, _plain in ((_Whole, int), (_Real, float)):
    for _name in _QUESTIONS:
        setattr(_kind, f"__{_name}__", _with_report(getattr(_plain, f"__{_name}__")))
    for _name in (*_ARITHMETIC, *(f"r{name}" for name in _ARITHMETIC), *_UNARY):
        setattr(_kind, f"__{_name}__", _with_reporting_result(getattr(_plain, f"__{_name}__")))
    _kind.__hash__ = _plain.__hash__  # type: ignore[method-assign]
