"""The batch sizes that a trace's guards hold for.

bs = x.shape[0] // 2                    torch notes `s // 2 <= s`, which holds for every size, `s // 2 != 1`,
chosen, rejected = x[:bs], x[bs:]       which holds from 4 on, and `s // 2 == s - s // 2`, for even sizes

torch.export does not solve these for a named batch dimension, and would fix the batch size. Nor does it where
the batch shortens something else, which ends the sizes:

queue = torch.cat([queue[len(keys) :], keys])     with 12 rows `s <= 12`, and `12 - s != 1`: up to 10
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import sympy
from torch.export import Dim
from torch.export.dynamic_shapes import refine_dynamic_shapes_from_suggested_fixes
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from pd2bw_fx.size_range import SizeRange

from .torch_messages import SUGGESTED_FIXES

SMALLEST = 2  # torch takes sizes of 0 and 1 for constants
_LONGEST_PERIOD = 32  # the most sizes after which answers may repeat
_SMALL = 64
_FARTHEST = 1024  # sizes that are tried, where a guard does not say by itself for which it ends to hold
_LARGE = tuple(2**power for power in range(7, 33))
_SIDES = {sympy.Eq: (0,), sympy.Le: (-1, 0), sympy.Lt: (-1,), sympy.Ge: (0, 1), sympy.Gt: (1,)}


@contextmanager
def record_guards(guards: list[Any]) -> Iterator[None]:
    """Adds the guards of each trace to `guards`, before torch solves for them."""

    def noted(shape_env: Any) -> None:
        guards.extend(guard.expr for guard in shape_env.guards)

    with _before_guards_are_solved(noted):
        yield


@contextmanager
def drop_guards_that_hold(sizes: SizeRange) -> Iterator[None]:
    """Drops guards that hold for all of these sizes before torch solves for them."""

    def dropped(shape_env: Any) -> None:
        shape_env.guards = [guard for guard in shape_env.guards if not _hold([guard.expr], sizes)]

    with _before_guards_are_solved(dropped):
        yield


@contextmanager
def _before_guards_are_solved(done: Callable[[Any], None]) -> Iterator[None]:
    kind: Any = ShapeEnv
    plain = kind.produce_guards

    def produce_guards(shape_env: Any, *args: Any, **kwargs: Any) -> Any:
        done(shape_env)
        return plain(shape_env, *args, **kwargs)

    kind.produce_guards = produce_guards
    try:
        yield
    finally:
        kind.produce_guards = plain


def sizes_where_all_hold(guards: Sequence[Any], batch_size: int) -> SizeRange | None:
    """Returns all sizes from a smallest one on, or all such multiples of a divisor of the batch size.

    `guards` are on the batch size alone, and say of several inputs that theirs is one. None where no such
    sizes are found.
    """
    guards = [guard for guard in guards if not _is_of_two_inputs(guard)]
    period = _period(guards)
    if not guards or period is None:
        return None
    for multiple in range(1, period + 1):
        if period % multiple or batch_size % multiple:
            continue
        small = range(batch_size, 0, -multiple)
        wrong = next((size for size in small if not _hold_at(guards, size)), 0)
        sizes = SizeRange(wrong + multiple, None, multiple)
        if wrong < batch_size and _hold(guards, sizes):
            return sizes
    return None


def sizes_up_to_an_end(guards: Sequence[Any], batch_size: int) -> SizeRange | None:
    """Returns the sizes around the batch size, without a gap, for which all guards hold, with their end.

    `guards` are on the batch size alone, and say of several inputs that theirs is one. None where nothing is
    known about a guard, or where there is no end.
    """
    guards = [guard for guard in guards if not _is_of_two_inputs(guard)]
    if not all(map(_is_known, guards)) or not _hold_at(guards, batch_size):
        return None
    try:
        ends = [end for guard in guards if (end := _end(guard, batch_size)) is not None]
    except _NoEndFoundError:
        return None
    wrong = next((size for size in range(batch_size, 0, -1) if not _hold_at(guards, size)), 0)
    return SizeRange(wrong + 1, min(ends) - 1, 1) if ends else None


class _NoEndFoundError(Exception):
    """It is not known whether a guard holds for all sizes."""


def _end(guard: Any, start: int) -> int | None:
    """Returns the first size from `start` on for which the guard does not hold, None if it holds for all.

    Raises _NoEndFoundError where that is not known.
    """
    (symbol,) = guard.free_symbols
    difference = sympy.expand(guard.lhs - guard.rhs)
    slope = difference.coeff(symbol, 1)
    rest = sympy.expand(difference - slope * symbol)
    if slope.is_Rational and slope != 0 and rest.is_Rational:  # its sign changes at one place
        middle = math.floor(-rest / slope)
        around = [start, *(size for size in range(middle - 1, middle + 3) if size > start)]
        return next((size for size in around if not _hold_at([guard], size)), None)
    end = next((size for size in range(start, start + _FARTHEST) if not _hold_at([guard], size)), None)
    if end is None and not _hold([guard], SizeRange(start, None, 1)):
        raise _NoEndFoundError
    return end


def is_for_many_sizes(text: str, batch_size: int) -> bool:
    """Whether a guard as torch prints it, `Ne((s77//2), 1)`, holds for many other sizes.

    Such a guard does not fix the batch size by itself.
    """
    try:
        guard = sympy.sympify(text)
        return _is_of_two_inputs(guard) or sizes_where_all_hold([guard], batch_size) is not None
    except Exception:  # a function that sympy has no name for
        return False


def _is_of_two_inputs(guard: Any) -> bool:
    """Whether a guard says that two inputs have one size, as all inputs have one batch size."""
    return isinstance(guard, sympy.Eq) and bool(guard.lhs.is_Symbol and guard.rhs.is_Symbol)


def _hold(guards: Iterable[Any], sizes: SizeRange) -> bool:
    """Whether the guards hold for all of `sizes`.

    Each compares sums, products, quotients and remainders. Without an upper end, its outcome repeats beyond
    the smallest sizes, period by period, or stays. An inequality may fail at a single size, so no side
    of it may be the larger one for some sizes and the smaller one for others.
    """
    guards = list(guards)
    if sizes.most is not None:
        return _hold_up_to(guards, sizes.least, sizes.most)
    period = _period(guards)
    if period is None:
        return False
    step = sizes.multiple_of
    starts = [start + (-start) % step for start in _LARGE if start > sizes.least + _SMALL]
    tried = [
        *range(sizes.least, sizes.least + max(_SMALL, 2 * period), step),
        *(size for start in starts for size in range(start, start + period, step)),
    ]
    return all(_holds_throughout(guard, tried) for guard in guards)


def _hold_up_to(guards: Iterable[Any], least: int, most: int) -> bool:
    for guard in guards:
        if _is_of_two_inputs(guard) or not _is_known(guard):
            return False
        try:
            end = _end(guard, least)
        except _NoEndFoundError:
            return False
        if end is not None and end <= most:
            return False
    return True


def _holds_throughout(guard: Any, sizes: Sequence[int]) -> bool:
    sides = {_side(guard, size) for size in sizes}
    return len(sides - {0}) == len(sides) == 1 if isinstance(guard, sympy.Ne) else sides <= _right(guard)


def _hold_at(guards: Iterable[Any], size: int) -> bool:
    return all(
        _side(guard, size) not in (0, None)
        if isinstance(guard, sympy.Ne)
        else _side(guard, size) in _right(guard)
        for guard in guards
    )


def _right(guard: Any) -> set[int]:
    return set(_SIDES[type(guard)])


def _side(guard: Any, size: int) -> int | None:
    """Returns whether the left side is smaller (-1), equal (0) or larger (1) for this size."""
    found = (guard.lhs - guard.rhs).xreplace(dict.fromkeys(guard.free_symbols, sympy.Integer(size)))
    if not found.is_number or not found.is_real:
        return None
    return int(sympy.sign(found))


def _is_known(guard: Any) -> bool:
    """Whether a guard is a comparison of whole numbers that one size decides."""
    is_comparison = type(guard) in (*_SIDES, sympy.Ne)
    return is_comparison and len(guard.free_symbols) == 1 and not guard.atoms(sympy.Float)


def _period(guards: Iterable[Any]) -> int | None:
    """Returns after how many sizes the remainders in the guards repeat.

    None where that is too many, or where nothing is known about how these guards go on.
    """
    period = 1
    for guard in guards:
        if not _is_known(guard):
            return None
        divisors = [part.args[1] for part in guard.atoms(sympy.Function) if len(part.args) == 2]
        whole = [int(divisor) for divisor in divisors if divisor.is_Integer and divisor != 0]
        whole += [int(number.q) for number in guard.atoms(sympy.Rational)]
        period = math.lcm(period, *whole)
    return period if period <= _LONGEST_PERIOD else None


def bounded_as_suggested(message: str, shapes: Any) -> Any:
    """Returns the shapes with the bounds that torch suggests, or None where it has none or fixes the batch.

    A table of positions bounds a length, for example, and a condition on the batch bounds the batch.
    """
    _, said, fixes = message.partition(SUGGESTED_FIXES)
    if not said or shapes is None:
        return None
    try:
        bounded: Any = refine_dynamic_shapes_from_suggested_fixes(
            said + fixes.strip().partition("\n\n")[0], shapes
        )
    except Exception:  # torch cannot parse every suggestion of its own
        return None
    sizes = [found for found in bounded["tensors"] if found is not None]
    if not all(type(found[0]) is Dim for found in sizes):
        return None
    for found in sizes:
        found.update({place: _of_two_or_more(size) for place, size in found.items()})
    return bounded


def _of_two_or_more(size: Any) -> Any:
    """Returns the dimension with our lower bound: torch keeps only the bound that it has found."""
    return Dim(size.__name__, min=max(size.min, SMALLEST), max=size.max) if type(size) is Dim else size
