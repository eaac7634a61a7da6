"""The search over plans that send values straight, and over those whose stages hand them on.

Where links are alike the two are one: the bounds that step in for programs hold whoever sends a value. Where
they are not, values are priced as sent straight first; then the search is run once more for an assignment
that is faster with its routes, with a program in which any stage sends a value that has come to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from pd2bw_fx.passes.partition.choices import Choices, Deadline, SearchResult
from pd2bw_fx.passes.partition.route import links_are_alike, routed
from pd2bw_fx.plan import Progress

from .search import search, search_faster

_FIRST_SHARE = 0.7  # of the time, where there is a second search
_ROUTES_TIME_S = 15.0  # that this one has at least, if the limit leaves it


def search_with_routes(
    choices: Choices,
    *,
    solver: str,
    max_gap: float,
    deadline: Deadline,
    report: Callable[[Progress], None] | None = None,
) -> SearchResult | None:
    """What `search` finds, or what is faster with its routes. The bound is of assignments with theirs."""
    started_s = time.perf_counter()
    handing_on = choices.changed(lambda instance: replace(instance, hands_on=True))
    if links_are_alike(choices[0]):
        return search(handing_on, solver=solver, max_gap=max_gap, deadline=deadline, report=report)
    first = Deadline(deadline.left_s * _FIRST_SHARE)
    direct = search(choices, solver=solver, max_gap=max_gap, deadline=first, report=report)
    if direct is None:
        return None
    direct_s = routed(choices[direct.choice], direct.stage_of)[1].bottleneck_s
    left = Deadline(min(deadline.left_s, max(time.perf_counter() - started_s, _ROUTES_TIME_S)))
    if first.is_stopped:
        left.stop()  # what is known without a search
    other, bound_s = search_faster(handing_on, direct_s, solver=solver, max_gap=max_gap, deadline=left)
    found = replace(direct, bottleneck_s=direct_s) if other is None else other
    return replace(found, bound_s=min(bound_s, found.bottleneck_s))
