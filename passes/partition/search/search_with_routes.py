"""Searches plans that send values straight, and plans whose stages hand them on.

Where all links are alike one search covers both, because its bounds hold whichever stage sends a value. Where
they are not, the first search prices values as sent straight. A second one then looks for an assignment that
is faster with its routes, by a program in which a stage may send any value that it has received.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from pd2bw_fx.errors import SolverError
from pd2bw_fx.passes.partition.choices import Choices, Deadline, NothingFaster, SearchResult
from pd2bw_fx.passes.partition.route import links_are_alike, routed
from pd2bw_fx.plan import Progress

from .search import search, search_faster

_FIRST_SHARE = 0.7  # of the time limit, for the first of two searches
_ROUTES_TIME_S = 15.0  # for the second one at least, if the limit leaves as much


def search_with_routes(
    choices: Choices,
    *,
    solver: str,
    max_gap: float,
    deadline: Deadline,
    report: Callable[[Progress], None] | None = None,
) -> SearchResult | None:
    """Returns the result of `search`, or an assignment that is faster with its routes. The bound is over all
    assignments with their routes."""
    started_s = time.perf_counter()
    handing_on = choices.changed(lambda instance: replace(instance, hands_on=True))
    if links_are_alike(choices[0]):
        return search(handing_on, solver=solver, max_gap=max_gap, deadline=deadline, report=report)
    first = Deadline(deadline.left_s * _FIRST_SHARE, within=deadline)
    try:
        direct = search(choices, solver=solver, max_gap=max_gap, deadline=first, report=report)
    except SolverError:
        if deadline.left_s == 0:
            raise
        return search(handing_on, solver=solver, max_gap=max_gap, deadline=deadline, report=report)
    if direct is None:
        return None
    direct_s = routed(choices[direct.choice], direct.stage_of)[1].bottleneck_s
    left = Deadline(max(time.perf_counter() - started_s, _ROUTES_TIME_S), within=deadline)
    other, bound_s = search_faster(handing_on, direct_s, solver=solver, max_gap=max_gap, deadline=left)
    found = replace(direct, bottleneck_s=direct_s) if other is None else other
    return replace(found, bound_s=min(bound_s, found.bottleneck_s))


def search_faster_with_routes(
    choices: Choices,
    faster_than_s: float,
    *,
    solver: str,
    max_gap: float,
    deadline: Deadline,
    report: Callable[[Progress], None] | None = None,
) -> SearchResult:
    """Returns an assignment that is faster with its routes. Raises NothingFaster where none is found.

    One search covers values sent straight and handed on: it is not asked for a good plan, only for a faster
    one.
    """
    handing_on = choices.changed(lambda instance: replace(instance, hands_on=True))
    found, bound_s = search_faster(
        handing_on, faster_than_s, solver=solver, max_gap=max_gap, deadline=deadline, report=report
    )
    if found is None:
        raise NothingFaster(bound_s)
    return found
