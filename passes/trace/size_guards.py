"""The batch sizes that a trace's guards hold for.

bs = x.shape[0] // 2                    torch notes `s // 2 <= s`, which holds for every size, `s // 2 != 1`,
chosen, rejected = x[:bs], x[bs:]       which holds from 4 on, and `s // 2 == s - s // 2`, for even sizes

torch.export does not solve these for a named batch dimension, and would fix the batch size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import sympy
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from pd2bw_fx.size_range import SizeRange

_LONGEST_PERIOD = 32  # the most sizes after which answers may repeat
_SMALL = 64
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
    """Whether the guards hold for all of `sizes`, which have no upper end.

    Each is a comparison of sums, products, quotients and remainders. Beyond the smallest sizes its outcome
    repeats, period by period, or stays. An inequality may fail at a single size, so no side of it may be the
    larger one for some sizes and the smaller one for others.
    """
    guards = list(guards)
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


def _period(guards: Iterable[Any]) -> int | None:
    """Returns after how many sizes the remainders in the guards repeat.

    None where that is too many, or where nothing is known about how these guards go on.
    """
    period = 1
    for guard in guards:
        if type(guard) not in (*_SIDES, sympy.Ne) or len(guard.free_symbols) != 1 or guard.atoms(sympy.Float):
            return None
        divisors = [part.args[1] for part in guard.atoms(sympy.Function) if len(part.args) == 2]
        whole = [int(divisor) for divisor in divisors if divisor.is_Integer and divisor != 0]
        whole += [int(number.q) for number in guard.atoms(sympy.Rational)]
        period = math.lcm(period, *whole)
    return period if period <= _LONGEST_PERIOD else None
