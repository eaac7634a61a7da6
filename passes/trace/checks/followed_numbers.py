"""Numbers that remember what a forward asks of them.

self.step += 1                   a number made of the one before: what the next call begins with
if self.step % 4 == 0: ..        a question, which has another answer at step 4

A followed number is the number that it stands for, to Python and to torch; what is computed of it with other
plain numbers is followed as well, and each comparison is kept with how to answer it for other calls.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

_State = Sequence[Any]  # the numbers that a call begins with
_Of = Callable[[_State], Any]
_NUM_CALLS = 4096  # calls that are looked at one after another
_FURTHEST = 48  # the furthest call is below 2**48


@dataclass(slots=True)
class Reads:
    """The questions that traces have asked of followed numbers."""

    questions: dict[str, _Of] = field(default_factory=dict)
    constants: set[Any] = field(default_factory=set)  # that they are combined with
    is_lost: bool = False  # some number became a value that is not followed

    def answers(self, state: _State) -> tuple[bool | None, ...]:
        """Returns the answers in a call that begins with `state`; None for a question that has no answer."""
        return tuple(_answer(of, state) for of in self.questions.values())

    def followed(self, state: _State) -> list[Any]:
        return [_followed(value, self, _entry(at), f"n{at}", True) for at, value in enumerate(state)]


def _entry(at: int) -> _Of:
    return lambda state: state[at]


def next_state(state: _State, left: Sequence[Any], by: Sequence[Any]) -> list[Any]:
    """Returns the numbers that the next call begins with.

    `left` is what a call has left. `by` is added to a number that is not known to be computed from the one
    before.
    """
    return [
        plain(found._of(state)) if isinstance(found, _Followed) else value + step
        for value, found, step in zip(state, left, by, strict=True)
    ]


def _answer(of: _Of, state: _State) -> bool | None:
    try:
        return bool(of(state))
    except (ArithmeticError, ValueError, TypeError):
        return None


def next_states(state: _State, left: Sequence[Any], by: Sequence[Any]) -> Iterator[list[Any]]:
    """Yields the numbers that each of the next calls begins with."""
    current = list(state)
    with suppress(ArithmeticError, ValueError, TypeError):
        for _ in range(_NUM_CALLS):
            current = next_state(current, left, by)
            yield current


def far_states(state: _State, left: Sequence[Any], by: Sequence[Any], reads: Reads) -> Iterator[list[Any]]:
    """Yields later calls in which numbers reach the constants that they meet, if each call adds the same."""
    if not all(not isinstance(found, _Followed) or found._is_sum for found in left):
        return
    calls = {2**power for power in range(12, _FURTHEST)}
    for value, step in zip(state, by, strict=True):
        if step:
            reached = ((constant - value) / step for constant in reads.constants if math.isfinite(constant))
            calls |= {
                int(number) + more for number in reached for more in (-1, 0, 1, 2) if number > _NUM_CALLS
            }
    for number in sorted(calls):
        yield [value + number * step for value, step in zip(state, by, strict=True)]


def plain(value: Any) -> Any:
    kind: Any = _PLAIN.get(type(value))
    return value if kind is None else kind(value)


class _Followed:
    _reads: Reads
    _of: _Of
    _text: str
    _is_sum: bool  # a number that the call began with, plus constants

    def __bool__(self) -> bool:
        return _asked(self._reads, f"bool({self._text})", bool(plain(self)), self._of)

    def __hash__(self) -> int:
        self._reads.is_lost = True
        return hash(plain(self))

    def __int__(self) -> int:
        self._reads.is_lost = True
        return int(plain(self))

    def __float__(self) -> float:
        self._reads.is_lost = True
        return float(plain(self))

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def __reduce__(self) -> Any:
        return type(plain(self)), (plain(self),)

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    def __pow__(self, other: Any, modulo: Any = None) -> Any:
        return _computed("pow", pow, self, other) if modulo is None else pow(int(self), other, modulo)

    def __rpow__(self, other: Any) -> Any:
        return _computed("pow", pow, other, self)

    def __round__(self, digits: int | None = None) -> Any:
        return _made(
            round(plain(self), digits), self._reads, lambda s: round(self._of(s), digits), "round", self
        )

    def __trunc__(self) -> Any:
        return _made(math.trunc(plain(self)), self._reads, lambda s: math.trunc(self._of(s)), "trunc", self)

    def __floor__(self) -> Any:
        return _made(math.floor(plain(self)), self._reads, lambda s: math.floor(self._of(s)), "floor", self)

    def __ceil__(self) -> Any:
        return _made(math.ceil(plain(self)), self._reads, lambda s: math.ceil(self._of(s)), "ceil", self)


class _Int(_Followed, int):  # type: ignore[misc]
    __hash__ = _Followed.__hash__


class _Float(_Followed, float):  # type: ignore[misc]
    __hash__ = _Followed.__hash__


# Functions that return the plain number without counting as a question.
_PLAIN: Mapping[type, Callable[[Any], Any]] = {_Int: int.__int__, _Float: float.__float__}


def _followed(value: Any, reads: Reads, of: _Of, text: str, is_sum: bool = False) -> Any:
    kind: Any = {int: _Int, float: _Float}.get(type(value))
    if kind is None:
        return value
    made = kind(value)
    made._reads, made._of, made._text, made._is_sum = reads, of, text, is_sum
    return made


def _made(value: Any, reads: Reads, of: _Of, name: str, operand: _Followed) -> Any:
    return _followed(value, reads, of, f"{name}({operand._text})")


def _asked(reads: Reads, text: str, answer: bool, of: _Of) -> bool:
    reads.questions.setdefault(text, of)
    return answer


def _operand(value: Any) -> tuple[_Of, str]:
    if isinstance(value, _Followed):
        return value._of, value._text
    return (lambda _: value), repr(value)


def _computed(name: str, function: Callable[[Any, Any], Any], *operands: Any) -> Any:
    """Returns the result on plain numbers, followed too where both operands are numbers."""
    one, other = map(_as_pythons, operands)
    result = function(plain(one), plain(other))
    reads: Reads = next(value._reads for value in (one, other) if isinstance(value, _Followed))
    if not (isinstance(one, int | float) and isinstance(other, int | float)):
        reads.is_lost |= not type(result).__module__.startswith("torch")
        return result
    (of_one, text_one), (of_other, text_other) = _operand(one), _operand(other)
    reads.constants |= {value for value in (one, other) if type(value) not in _PLAIN}
    text = f"({text_one} {name} {text_other})"

    def of(state: _State) -> Any:
        return function(of_one(state), of_other(state))

    if isinstance(result, bool):
        return _asked(reads, text, result, of)
    return _followed(result, reads, of, text, _is_sum(name, one, other))


def _as_pythons(number: Any) -> Any:
    """Converts numpy.float64, which is a float but computes by numpy's rules."""
    if isinstance(number, _Followed) or type(number) in (bool, int, float):
        return number
    return float(number) if isinstance(number, float) else number


def _is_sum(name: str, one: Any, other: Any) -> bool:
    if isinstance(one, _Followed) and not isinstance(other, _Followed):
        return name in ("add", "sub") and one._is_sum
    return name == "add" and not isinstance(one, _Followed) and bool(other._is_sum)


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "and_", "or_", "xor", "lshift", "rshift")
_COMPARED = ("eq", "ne", "lt", "le", "gt", "ge")


def _method(name: str, function: Callable[[Any, Any], Any], *, is_reflected: bool = False) -> Any:
    if is_reflected:
        return lambda self, other: _computed(name, function, other, self)
    return lambda self, other: _computed(name, function, self, other)


def _unary(name: str, function: Callable[[Any], Any]) -> Any:
    return lambda self: _made(
        function(plain(self)), self._reads, lambda state: function(self._of(state)), name, self
    )


for _name in (*_BINARY, *_COMPARED):
    _function = getattr(operator, _name)
    _dunder = _name.rstrip("_")
    for _kind in (_Int, _Float):
        setattr(_kind, f"__{_dunder}__", _method(_name, _function))
        if _name in _BINARY:
            setattr(_kind, f"__r{_dunder}__", _method(_name, _function, is_reflected=True))
for _name in ("neg", "pos", "abs", "invert"):
    setattr(_Int, f"__{_name}__", _unary(_name, getattr(operator, _name)))
    if _name != "invert":
        setattr(_Float, f"__{_name}__", _unary(_name, getattr(operator, _name)))
