"""Checks arguments of public calls: the first function that sees a wrong one refuses it, in one line."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import numbers
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from pd2bw_fx.errors import InputError, shown


def plain(value: Any) -> Any:
    """Returns a number of numpy's, say, as Python's own, which JSON can hold; other values as they are."""
    if isinstance(value, bool) or type(value) in (int, float):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else value


def make_plain(frozen: Any, *names: str) -> None:
    """Applies `plain` to fields of a frozen dataclass that is being made, and to a sequence's numbers."""
    for name in names:
        value = getattr(frozen, name)
        several = isinstance(value, Sequence) and not isinstance(value, str)
        own = tuple(map(plain, value)) if several else plain(value)
        object.__setattr__(frozen, name, own)


def require_whole_number(name: str, value: Any, *, least: int = 1) -> None:
    """Raises InputError for anything but an int of `least` or more; None is for the caller to allow."""
    if not _is_whole(value) or value < least:
        count = {0: "zero", 1: "one"}.get(least, str(least))
        raise _wrong(name, value, f"a whole number of {count} or more")


def require_replicas(value: Any, *, or_else: str = "") -> None:
    """Raises InputError for anything but a number of ranks, one for each stage, or None.

    `or_else` says what else the caller takes.
    """
    if isinstance(value, Sequence) and not isinstance(value, str):
        for stage, count in enumerate(value):
            require_whole_number(f"replicas[{stage}]", count)
    elif value is not None and (not _is_whole(value) or value < 1):
        raise _wrong("replicas", value, f"a whole number of one or more, or one for each stage{or_else},")


def require_positive(name: str, value: Any) -> None:
    """Raises InputError for anything but a number above 0, which may be infinite."""
    if not _is_number(value) or not value > 0:
        raise _wrong(name, value, "a number above 0")


def require_not_negative(name: str, value: Any, expected: str = "a number of zero or more") -> None:
    """Raises InputError for anything but a finite number of 0 or more."""
    if not _is_number(value) or not 0 <= value < math.inf:
        raise _wrong(name, value, expected)


def require_share(name: str, value: Any, expected: str = "a share from 0 to below 1") -> None:
    if not _is_number(value) or not 0 <= value < 1:
        raise _wrong(name, value, expected)


def require_search(max_gap: Any, time_limit_s: Any) -> None:
    """Raises InputError for a gap or a time limit at which no search can stop."""
    require_share("max_gap", max_gap)
    if not _is_number(time_limit_s) or not time_limit_s > 0:
        raise _wrong("time_limit_s", time_limit_s, "a positive number of seconds")


def require_choice(name: str, value: Any, *choices: Any) -> None:
    """Raises InputError for a value that is none of these; True is not 1."""
    if not any(value is choice or (isinstance(value, str) and value == choice) for choice in choices):
        raise _wrong(name, value, " or ".join(map(repr, choices)))


def require_known_options(
    what: str, given: Iterable[str], known: Sequence[str], elsewhere: Mapping[str, str] | None = None
) -> None:
    """Raises InputError for a name that is no option of `what`, with the one that is nearest to it.
    `elsewhere`: what to do instead, of names that others are known to take."""
    for name in given:
        if name not in known:
            near = [own for own in known if f"_{name}_" in f"_{own}_"]  # `updates` is of num_updates
            near = near or difflib.get_close_matches(name, known, n=1)
            listed = (
                f"known {'is' if len(known) == 1 else 'are'} {', '.join(known)}" if known else "it takes none"
            )
            advice = f"did you mean {near[0]}?" if near else listed
            raise InputError(f"{name} is no option of {what}; {(elsewhere or {}).get(name, advice)}")


def options_of(function: Callable[..., Any]) -> list[str]:
    """What a function takes by name alone."""
    parameters = inspect.signature(function).parameters.values()
    return [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]


P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)


def with_known_options(function: Callable[P, R]) -> Callable[P, R]:
    """Makes a public function refuse names that it does not take, by `require_known_options`, and a call
    without what it needs.

    One that hands on further options checks those itself; of it only a name is refused that was meant for
    one that is required.
    """
    signature = inspect.signature(function)
    parameters = signature.parameters.values()
    kinds = inspect.Parameter
    known = [
        each.name for each in parameters if each.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
    ]
    known = [name for name in known if name not in ("self", "cls")]
    hands_on = any(each.kind is kinds.VAR_KEYWORD for each in parameters)
    required = [
        each.name for each in parameters if each.kind is kinds.KEYWORD_ONLY and each.default is kinds.empty
    ]

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        given = [name for name in kwargs if name not in known]
        if given and hands_on:
            missing = [name for name in required if name not in kwargs]
            given = [name for name in given if difflib.get_close_matches(name, missing)]
        if given:
            require_known_options(_called(function, args), given, known)
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise InputError(f"{_called(function, args)}: {error}; it takes {', '.join(known)}") from None
        return function(*args, **kwargs)

    return checked


def made_with_known_options(made: C) -> C:
    """Makes a dataclass refuse names of fields that it does not have, as `with_known_options` does."""
    made.__init__ = with_known_options(made.__init__)  # type: ignore[misc]
    return made


def _called(function: Callable[..., Any], args: Sequence[Any]) -> str:
    """Returns what callers know a function by: a method that a class inherits is that class's own to them."""
    name = function.__qualname__.removesuffix(".__init__")
    owner, _, method = name.rpartition(".")
    inherits = bool(args) and owner in (kind.__name__ for kind in type(args[0]).__mro__)
    return f"{type(args[0]).__name__}.{method}" if inherits else name


def require_kind(name: str, value: Any, kind: type | tuple[type, ...], expected: str) -> None:
    """Raises InputError, with what was `expected`, for a value of another type."""
    if not isinstance(value, kind):
        raise _wrong(name, value, expected)


def require_path(name: str, value: Any) -> None:
    require_kind(name, value, (str, os.PathLike), "a path, as a text or a Path,")


def require_function(name: str, value: Any, expected: str, *, num_arguments: int | None = None) -> None:
    """Raises InputError for what cannot be called with so many arguments, as far as its signature tells."""
    if not callable(value):
        raise _wrong(name, value, expected)
    if num_arguments is None:
        return
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):  # some that are built in have none
        return
    try:
        signature.bind(*range(num_arguments))
    except TypeError:
        takes = ", ".join(signature.parameters) or "nothing"
        raise InputError(f"{name} takes {takes}; {expected} was expected") from None


def _is_whole(value: Any) -> bool:
    return type(value) is not bool and isinstance(value, numbers.Integral)


def _is_number(value: Any) -> bool:
    return type(value) is not bool and isinstance(value, numbers.Real) and not math.isnan(value)


def _wrong(name: str, value: Any, expected: str) -> InputError:
    return InputError(f"{name} is {shown(value)}; {expected} was expected")
