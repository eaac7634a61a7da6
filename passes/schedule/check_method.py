"""Refuses a method whose lists do not go together, however an engine asks for them."""

from __future__ import annotations

from pd2bw_fx.actions import Schedule, Shape
from pd2bw_fx.errors import ScheduleError

from .build import schedule_of
from .check import check_schedule
from .methods import method_of, registered_method

_UPDATES = 3  # the pipeline fills, is in its steady state, and drains
_UPDATES_OF_A_USERS = 12  # whose rule may depend on the update in other ways


def check_method(name: str, shape: Shape) -> None:
    """Checks the method's first updates on this shape, with the microbatches in flight that it says.

    A method of the user's is checked for more updates, and also asked as an engine asks: for one update after
    another, with a flush at the end, or after the first of them, as an evaluation makes. (Tests hold ours to
    their rules.)

    Raises ScheduleError naming the first offending action.
    """
    rules = method_of(name)
    held = [rules.in_flight(shape, stage) for stage in range(shape.num_stages)]
    is_ours = registered_method(name) is None
    updates = range(_UPDATES if is_ours else _UPDATES_OF_A_USERS)
    check_schedule(schedule_of(name, shape, updates=updates, drain=True), in_flight=held)
    if is_ours:
        return
    first = schedule_of(name, shape, updates=range(1), drain=False)
    if rules.is_synchronous:
        _check(first, "is_synchronous says that no update leaves anything in flight", held)
    asked = "when it is asked for one update after another"
    _check(_one_after_another(name, shape, updates, empty_before=0), asked, held)
    flushed = first.then(_flush(name, shape, 1, empty_before=0))
    later = _one_after_another(name, shape, updates[1:], empty_before=1)
    _check(flushed.then(later), f"{asked}, and flushed after the first", held)


def _one_after_another(name: str, shape: Shape, updates: range, *, empty_before: int) -> Schedule:
    """Returns the updates' lists, and what finishes them, as an engine asks for them."""
    joined, *others = [
        schedule_of(name, shape, updates=range(u, u + 1), drain=False, empty_before=empty_before)
        for u in updates
    ]
    for other in (*others, _flush(name, shape, updates.stop, empty_before=empty_before)):
        joined = joined.then(other)
    return joined


def _flush(name: str, shape: Shape, update: int, *, empty_before: int) -> Schedule:
    return schedule_of(name, shape, updates=range(update, update), drain=True, empty_before=empty_before)


def _check(schedule: Schedule, when: str, in_flight: list[int]) -> None:
    try:
        check_schedule(schedule, in_flight=in_flight)
    except ScheduleError as error:
        raise ScheduleError(f"the method {schedule.method!r}, {when}: {error}") from None
