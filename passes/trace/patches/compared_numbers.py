"""Numbers that `item` gives in a run on the example inputs, which tell how comparisons of them come out.

if hidden.max().item() > 100:      a trace has no number there, and goes the way that the example took
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

Told = Callable[[bool, FrameType], None]  # how it came out, and who asked


class _Whole(int):
    """With `told`."""


class _Real(float):
    """With `told`."""


def asked_number(value: Any, told: Told) -> Any:
    """The number as one that tells; what is neither whole nor real as it is."""
    kind = _Whole if type(value) is int else _Real if type(value) is float else None
    if kind is None:
        return value
    number: Any = kind(value)
    number.told = told
    return number


def _telling(plain: Callable[..., Any]) -> Callable[..., Any]:
    def asked(number: Any, *others: Any) -> Any:
        outcome = plain(number, *others)
        if isinstance(outcome, bool):
            number.told(outcome, sys._getframe(1))
        return outcome

    return asked


def _going_on(plain: Callable[..., Any]) -> Callable[..., Any]:
    def made(number: Any, *others: Any) -> Any:
        return asked_number(plain(number, *others), number.told)

    return made


_QUESTIONS = ("lt", "le", "gt", "ge", "eq", "ne", "bool")
_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_OF_ONE = ("neg", "abs")
for _kind, _plain in ((_Whole, int), (_Real, float)):
    for _name in _QUESTIONS:
        setattr(_kind, f"__{_name}__", _telling(getattr(_plain, f"__{_name}__")))
    for _name in (*_ARITHMETIC, *(f"r{name}" for name in _ARITHMETIC), *_OF_ONE):
        setattr(_kind, f"__{_name}__", _going_on(getattr(_plain, f"__{_name}__")))
    _kind.__hash__ = _plain.__hash__  # type: ignore[method-assign]
