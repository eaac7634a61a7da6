"""Refuses a model whose program depends on how often it was called, by tracing it at other counts.

if self.step % 4 == 0: ..            asked in the second call, and answered otherwise in the fourth
self.step = (self.step + 1) % 100    a count that begins again

A trace with followed numbers (`followed_numbers.py`) tells what the forward asks, and what a call leaves for
the next one. Each other set of answers among later calls is traced once. A counter that the forward asks
nothing of is traced once more, at a count far away.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pd2bw_fx.errors import Pd2bwError, TraceError

from .followed_numbers import Reads, far_states, next_states
from .watch import Change

_MANY = 1000  # calls after which a counter is traced once more
_COMMON_MULTIPLE = 504_000  # a multiple of the usual periods
_MOST = 12  # traces of one model


def require_no_count(
    counters: Sequence[Change], trace_again: Callable[..., None], left_in: Mapping[int, Any]
) -> None:
    """Traces the model again, as in a second call and in later ones.

    `trace_again` raises TraceError if the program differs. `left_in` has what the last call left in the
    counters. Raises TraceError where the counters are asked more than can be tried.
    """
    second = [change.after for change in counters]
    by = [change.after - change.before for change in counters]
    asked, tried = Reads(), list[Sequence[Any]]()

    def follow(state: Sequence[Any]) -> list[Any]:
        reads = Reads(asked.questions, asked.constants)
        tried.append(state)
        _put(counters, reads.followed(state))
        try:
            trace_again(is_second=state is second)
            return [left_in[at] for at in range(len(counters))]
        except Pd2bwError:  # perhaps because a followed number is not taken for a number
            reads.is_lost = True
            _put(counters, state)
            trace_again(is_second=state is second)
            return [value + step for value, step in zip(state, by, strict=True)]
        finally:
            asked.is_lost |= reads.is_lost

    left = follow(second)
    later = list(next_states(second, left, by))
    if len(later) >= _MANY:
        follow(later[_MANY - 1])
    while (
        state := _answered_otherwise(asked, tried, [*later, *far_states(second, left, by, asked)])
    ) is not None:
        if len(tried) == _MOST:
            raise TraceError(
                f"the model asks for its {counters[0]} in more ways than can be tried, and may compute "
                "something else from call to call; make it a buffer that the forward updates, or an argument "
                "of the forward"
            )
        follow(state)
    if asked.is_lost:
        for state in _at_common_periods(later, second, by):
            follow(state)


def _answered_otherwise(
    asked: Reads, tried: Sequence[Sequence[Any]], later: Sequence[list[Any]]
) -> list[Any] | None:
    """Returns the first call whose answers no call that was tried has, or None."""
    known = set(map(asked.answers, tried))
    return next((state for state in later if asked.answers(state) not in known), None)


def _put(counters: Sequence[Change], values: Sequence[Any]) -> None:
    for change, value in zip(counters, values, strict=True):
        change.place.put(value)


def _at_common_periods(
    later: Sequence[list[Any]], second: Sequence[Any], by: Sequence[Any]
) -> list[list[Any]]:
    """Returns states to try where numbers were lost track of.

    They are a common multiple of the usual periods and the call before it, or the least and largest value of
    a count that begins again.
    """
    found: list[list[Any]] = []
    for at, (start, step) in enumerate(zip(second, by, strict=True)):
        if not later or not step:
            continue
        if later[-1][at] == start + step * len(later):
            num_calls = int((_COMMON_MULTIPLE - start) // step) if step > 0 else len(later)
            found += [
                [value + n * more for value, more in zip(second, by, strict=True)]
                for n in (num_calls - 1, num_calls)
            ]
        else:
            found += [choose(later, key=operator.itemgetter(at)) for choose in (min, max)]
    return found
