"""The search: an upper bound first, then one feasibility question after another at a shrinking target.

A target is asked of one device order after another. Each order is refuted at it, or gives a better plan,
which lowers the target for all. What is refuted at a target is refuted at every smaller one. For a large
problem the first pass asks for a coarse improvement and the next for a fine one, so that a search which runs
out of time has still proven something.

Where there is one order of the devices, single nodes are asked for a bound first. Where stages are alike and
there are few down-sets, relaxed rules are asked before any integer program.

What integer programs leave open in their first share of the time is then approached from both sides without
them: assignments under relaxed rules are enumerated, other topological orders are cut, and single nodes give
a bound. Programs have the rest of the time. `_problem_steps` and `_workload_steps` are the order of all this;
`search_state.py` has the steps.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from pd2bw_fx.errors import SolverError
from pd2bw_fx.passes.partition.bounds.downsets import DeviceKind
from pd2bw_fx.passes.partition.choices import Answer, Choices, Deadline, NoPlanInTime, SearchResult
from pd2bw_fx.plan import Progress

from .by_cuts import ByCuts
from .by_frontiers import ByFrontiers
from .search_state import SearchState

_FINEST_GAP = 3e-6  # a smaller gap could not be told from a solver's tolerance
_FIRST_SHARE = 0.2  # of the time limit, for the first cuts and the programs after them
_FIRST_TIME_S = 5.0  # seconds that these have at most
_FIRST_SHARE_OF_WORKLOADS = 0.02  # of the time left: short, because their down-sets may be enumerated instead
_FEW_DOWN_SETS = 40_000  # listed for relaxed rules before programs are asked
_MANY_NODES = 500  # joining more takes longer than most programs do, and cutting orders than frontiers do
_SMALL = 2000  # nodes times stages: at most so many where they are listed anew for each target
_CUTS_SHARE = 0.9  # of the time left, for the cuts near a target
_PROGRAMS_SHARE = 0.3  # of the time left, for programs before these branch
_FEW_ORDERS = 25  # fruitless orders in a row, after which down-sets are enumerated where they are few


class _Step(NamedTuple):
    """One step of the search, and how long it may take.

    The step gets `share` of the time that is left when it begins, and `at_most_s` seconds; with None it goes
    on in what the step before it has left of its own time.
    """

    share: float | None
    action: Callable[[float], None]  # takes the gap to prove
    at_most_s: float = math.inf


class Enumeration(Protocol):
    """A `Question` that is answered by going through all assignments."""

    def is_short(self) -> bool:
        """Returns whether that takes about a second."""

    def __call__(self, target_s: float, deadline: Deadline) -> Answer:
        """Answers for one target."""


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
    """Returns the fastest assignment over all choices, proven to `max_gap` unless the time runs out.

    `report` is called at every step, and every second of a long one. Ctrl-C ends the search as the deadline
    does. `kinds` are all devices, for the bound from single nodes; where there is one choice it can be left
    out. `enumerations` are asked one after another: short ones at the beginning, and all of them after
    programs have had a first share of the time and other orders have been cut.

    Returns None where it is proven that no assignment of any choice fits in memory. Raises SolverError where
    the time runs out before the first assignment.
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
    if found is None and bound_s < np.inf and deadline.left_s > 0:
        raise SolverError(
            f"{solver} could not tell whether anything fits: whatever it found is larger than the memory by "
            "less than its tolerance, a few bytes in a gigabyte; try devices with a few kilobytes more or "
            "less, or another solver"
        )
    if found is None and bound_s < np.inf:
        raise NoPlanInTime
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
    """Searches for an assignment faster than `faster_than_s`, with the arguments of `search`.

    Returns it, or None, and a bound on all assignments. Ctrl-C stops the deadline.
    """
    first = Deadline(min(deadline.left_s * _FIRST_SHARE, _FIRST_TIME_S))
    state = SearchState(choices, solver=solver, deadline=first, report=report, kinds=kinds)
    state.bottleneck_s = faster_than_s
    gap = max(max_gap, _FINEST_GAP)
    try:
        by_frontiers = ByFrontiers(state, deadline)
        if not np.isfinite(faster_than_s):
            if choices[0].num_nodes > _MANY_NODES:
                by_frontiers.settle()
            if state.bound_s() < np.inf:
                state.first_assignments()
        by_frontiers(gap)
        steps = (
            _workload_steps(state, enumerations, early_s=first.left_s)
            if enumerations
            else _problem_steps(state)
        )
        for step in steps:
            if step.share is not None:
                state.deadline = Deadline(min(deadline.left_s * step.share, step.at_most_s))
            step.action(gap)
    except KeyboardInterrupt:
        deadline.stop()
        if state.stage_of is None and not np.isfinite(faster_than_s):
            state.deadline = Deadline(0.0)
            state.first_assignments()  # stops after one choice: something to take
    if state.stage_of is None:
        if state.has_left_out and state.bound_s() < faster_than_s == np.inf:
            raise NoPlanInTime
        return None, state.bound_s()
    return SearchResult(state.choice, state.stage_of, state.bottleneck_s, state.bound_s()), state.bound_s()


def _problem_steps(state: SearchState) -> Sequence[_Step]:
    """Returns the steps after the first assignments, for a problem."""
    ask_soon = functools.partial(
        state.ask_relaxed_bound, max_sets=_FEW_DOWN_SETS, max_size=_SMALL, goes_on=False
    )
    is_large = state.choices[0].num_nodes > _MANY_NODES
    return (
        _Step(None, state.ask_least_loads),
        *(() if is_large else (_Step(None, ask_soon),)),
        _Step(None, state.ask_programs),
        _Step(0.5, functools.partial(state.ask_relaxed_bound, max_size=0)),
        _Step(0.15, state.ask_relaxed_bound),
        _Step(0.2, state.ask_programs),
        _Step(0.1, state.shuffle),
        _Step(1.0, state.ask_programs),
    )


def _workload_steps(
    state: SearchState, enumerations: Sequence[Enumeration], *, early_s: float
) -> Sequence[_Step]:
    """Returns the steps after the first assignments, for a workload whose down-sets may be enumerated."""

    def enumerate_short(gap: float) -> None:
        for enumeration in enumerations:
            if enumeration.is_short():
                state.enumerate(enumeration, gap)

    def enumerate_all(gap: float) -> None:
        for enumeration in enumerations:
            state.enumerate(enumeration, gap)

    def shuffle_before_short(gap: float) -> None:
        if any(enumeration.is_short() for enumeration in enumerations):
            state.shuffle(gap, patience=_FEW_ORDERS)

    by_cuts = ByCuts(state)
    return (
        _Step(_FIRST_SHARE_OF_WORKLOADS, enumerate_short, early_s),
        _Step(_FIRST_SHARE_OF_WORKLOADS, state.ask_least_loads, early_s),
        _Step(None, state.ask_programs),
        _Step(0.1, shuffle_before_short),
        _Step(0.7, enumerate_short),
        _Step(0.1, state.shuffle),
        _Step(0.7, state.ask_windows),
        _Step(None, enumerate_all),
        _Step(_CUTS_SHARE, functools.partial(by_cuts, may_branch=False)),
        _Step(_PROGRAMS_SHARE, state.ask_programs),
        _Step(_CUTS_SHARE, by_cuts),
        _Step(1.0, state.ask_programs),
    )
