"""The search: an upper bound first, then one feasibility program after another at a shrinking target.

Over the device orders: each is either refuted at the target or gives a better plan, which lowers the target
for all. What is refuted at a larger target stays refuted at a smaller one. For a large problem the first pass
asks for a coarse improvement and the next for a fine one, so that a search which runs out of time has still
proven something.

What programs leave open in their first share of the time is then approached from both sides without them:
all that milder rules allow is enumerated, other topological orders are cut, and a bound is asked for of
single nodes. Programs have the rest. What each step does is in `search_state.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from pd2bw_fx.errors import SolverError
from pd2bw_fx.passes.partition.bounds.downsets import DeviceKind
from pd2bw_fx.passes.partition.choices import Choices, Deadline, SearchResult
from pd2bw_fx.plan import Progress

from .search_state import Answer, SearchState

_FINEST_GAP = 3e-6  # what could not be told from a solver's tolerance is not asked for
_FIRST_SHARE = 0.2  # of the time, for first cuts, and programs before anything else is tried
_FIRST_TIME_S = 5.0  # and no more than this
_FIRST_SHARE_OF_WORKLOADS = 0.02  # for programs: their down-sets may be enumerated instead
_RELAXED_SHARE = 0.5  # of what is left then, for a bound by milder rules
_SECOND_SHARE = 0.2  # of what is left then, for programs once more
_ORDERS_SHARE = 0.1  # of what is left then
_FEW_ORDERS = 25  # that brought nothing, where down-sets are soon enumerated
_DOWN_SETS_SHARE = 0.7  # of what is left then


class Enumeration(Protocol):
    """All that there is, looked through for one target after another."""

    def is_short(self) -> bool:
        """Whether that takes a second or so."""

    def __call__(self, target_s: float, deadline: Deadline) -> Answer:
        """As a `Question` is answered."""


def search(
    choices: Choices,
    *,
    solver: str,
    max_gap: float,
    deadline: Deadline,
    report: Callable[[Progress], None] | None = None,
    enumerations: Sequence[Enumeration] = (),
    kinds: Sequence[DeviceKind] = (),
) -> SearchResult | None:
    """The fastest assignment over all choices, proven to `max_gap` unless the time runs out.

    `report` hears of every step, and every second of a long one. Ctrl-C ends the search as the deadline does.
    `kinds` are all devices that there are, for the bound from single nodes; one choice has its own stages.
    `enumerations` are asked, one after another, where neither programs, in a first share of the time, nor
    other orders settle it; short ones before all that.

    None where it is proven that no assignment of any choice fits in memory. Raises SolverError where the time
    ran out before the first assignment was found.
    """
    found, bound_s = search_faster(
        choices,
        np.inf,
        solver=solver,
        max_gap=max_gap,
        deadline=deadline,
        report=report,
        enumerations=enumerations,
        kinds=kinds,
    )
    if found is None and bound_s < np.inf:
        raise SolverError("the time limit passed before any plan was found; raise time_limit_s")
    return found


def search_faster(
    choices: Choices,
    faster_than_s: float,
    *,
    solver: str,
    max_gap: float,
    deadline: Deadline,
    report: Callable[[Progress], None] | None = None,
    enumerations: Sequence[Enumeration] = (),
    kinds: Sequence[DeviceKind] = (),
) -> tuple[SearchResult | None, float]:
    """As `search`, for one that is faster than something that is known; and the bound on all there are.
    Ctrl-C stops the deadline."""
    first = Deadline(min(deadline.left_s * _FIRST_SHARE, _FIRST_TIME_S))
    state = SearchState(choices, solver=solver, deadline=first, report=report, kinds=kinds)
    state.bottleneck_s = faster_than_s
    finest = max(max_gap, _FINEST_GAP)
    try:
        if not np.isfinite(faster_than_s):
            state.first_assignments()
        if enumerations:
            share_s = min(first.left_s, deadline.left_s * _FIRST_SHARE_OF_WORKLOADS)
            state.deadline = Deadline(share_s)
            for enumeration in enumerations:
                if enumeration.is_short():
                    state.enumerate(enumeration, finest)
            state.deadline = Deadline(share_s)
            state.ask_least_loads(finest)
        state.ask_programs(finest)
        if not enumerations:
            state.deadline = Deadline(deadline.left_s * _RELAXED_SHARE)
            state.ask_relaxed_bound(finest)
            state.deadline = Deadline(deadline.left_s * _SECOND_SHARE)
            state.ask_programs(finest)
        state.deadline = Deadline(deadline.left_s * _ORDERS_SHARE)
        short = [] if state.is_proven(finest) else [each for each in enumerations if each.is_short()]
        if short:
            state.shuffle(finest, patience=_FEW_ORDERS)
            state.deadline = Deadline(deadline.left_s * _DOWN_SETS_SHARE)
            for enumeration in short:
                state.enumerate(enumeration, finest)
            state.deadline = Deadline(deadline.left_s * _ORDERS_SHARE)
        state.shuffle(finest)
        if enumerations:
            state.deadline = Deadline(deadline.left_s * _DOWN_SETS_SHARE)
            state.ask_windows(finest)
        for enumeration in enumerations:
            state.enumerate(enumeration, finest)
        state.deadline = deadline
        state.ask_programs(finest)
    except KeyboardInterrupt:
        deadline.stop()
        if state.stage_of is None and not np.isfinite(faster_than_s):
            state.deadline = Deadline(0.0)
            state.first_assignments()  # one of them: something to take
    if state.stage_of is None:
        return None, state.bound_s()
    return SearchResult(state.choice, state.stage_of, state.bottleneck_s, state.bound_s()), state.bound_s()
