"""Finds the smallest changes with which there is a plan, where there is none, and makes each of these
plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pd2bw_fx.errors import InputError, SolverError
from pd2bw_fx.passes.partition.choices import Choices, Deadline, SearchResult
from pd2bw_fx.passes.partition.instance import evaluate
from pd2bw_fx.passes.partition.request import SearchRequest
from pd2bw_fx.passes.partition.search.search import search
from pd2bw_fx.units import format_bytes, format_seconds

_TIME_S, _STAGES_TIME_S = 4.0, 4.0  # for memory and recomputation, and for more stages
_PLENTY_BYTES = 10**18  # stands for no limit
_ANY, _FINE = 0.999, 0.01  # gaps: any plan will do; its time is printed
_DEVICES_TRIED = 3
_STAGES_TRIED = 8
MORE_STAGES, RECOMPUTE, MORE_MEMORY = "more stages", 'recompute="auto"', "more memory"


@dataclass(frozen=True)
class NearestChanges:
    """`lines` are changes that are enough, each by itself; there was no time to find out whether the
    `unsettled` ones are."""

    lines: tuple[str, ...]
    unsettled: tuple[str, ...]


def nearest_changes(
    request: SearchRequest,
    choices: Choices,
    devices: Sequence[int],
    *,
    solver: str,
    within: Deadline,
) -> NearestChanges:
    """Tries recomputation where it was off, more memory on each of `devices`, and the fewest additional
    stages."""
    deadline = Deadline(_TIME_S, within=within)

    def more_memory() -> list[str]:
        found = []
        for device in request.one_of_each(devices)[:_DEVICES_TRIED]:
            more = _least_more(request, device, solver=solver, deadline=deadline)
            if more is not None:
                name = request.cluster.devices[device].name
                found.append(f"{_rounded_up(more[0])} more on {name} ({_time(more[1])})")
        return found

    # Recomputation is tried first: it needs nothing, and one search tells whether it is enough.
    looks: list[tuple[str, Callable[[], list[str]]]] = [
        (RECOMPUTE, lambda: _recomputed(choices, solver=solver, deadline=deadline)),
        (MORE_MEMORY, more_memory),
        (MORE_STAGES, lambda: _fewest_stages_more(request, solver=solver, within=within)),
    ]
    lines, unsettled = [], []
    for change, look in looks:
        try:
            lines += look()
        except SolverError:
            unsettled.append(change)
    return NearestChanges(tuple(lines), tuple(unsettled))


def _recomputed(choices: Choices, *, solver: str, deadline: Deadline) -> list[str]:
    if choices[0].recompute is not False:
        return []
    again = choices.changed(lambda instance: replace(instance, recompute="auto"))
    found = _searched(again, solver=solver, deadline=deadline)
    return [] if found is None else [f"{RECOMPUTE} ({_time(found)})"]


def _fewest_stages_more(request: SearchRequest, *, solver: str, within: Deadline) -> list[str]:
    """Returns the fewest additional stages, on free devices first and then on further ones like the last.

    It tries one number after another, because what fits on some stages need not fit on more of them: they
    have more microbatches in flight.

    Raises:
        SolverError: the time ran out before any number was found to be enough.
    """
    if request.order is not None:
        return []  # The method has device slots for this many stages only.
    deadline = Deadline(_STAGES_TIME_S, within=within)
    ran_out = None
    for more in range(1, min(_STAGES_TRIED, len(request.problem.blocks) - request.num_stages) + 1):
        larger = request.with_stages(request.num_stages + more)
        try:
            orders = larger.orders()
            found = _searched(larger.choices(orders), solver=solver, deadline=deadline)
        except InputError:
            continue  # The method cannot have so many stages.
        except SolverError as error:
            ran_out = error
            continue
        if found is not None:
            return [f"{_stages_more(request, more)} ({_time(found)})"]
    if ran_out is not None:
        raise ran_out
    return []


def _stages_more(request: SearchRequest, more: int) -> str:
    stages = f"{more} stage{'s' * (more > 1)} more"
    devices = request.num_stages + more - len(request.cluster)
    if devices <= 0:
        return f"{stages} on devices that are free (num_stages={request.num_stages + more})"
    return f"{stages} on {devices} more device{'s' * (devices > 1)} like {request.cluster.devices[-1].name}"


def _least_more(
    request: SearchRequest, device: int, *, solver: str, deadline: Deadline
) -> tuple[int, SearchResult] | None:
    """Returns the fewest additional bytes for this device, to about a hundredth, and their plan."""
    own_bytes = request.cluster.devices[device].memory_bytes

    def planned(more_bytes: int, gap: float) -> tuple[int, SearchResult] | None:
        """Returns the part of these bytes that a plan needs, and the plan."""
        larger = request.with_memory({device: own_bytes + more_bytes})
        orders = larger.orders()
        choices = larger.choices(orders)
        try:
            found = _searched(choices, gap, solver=solver, deadline=deadline)
        except SolverError:
            return None  # A change is only named if there is a plan for it.
        if found is None or device not in orders[found.choice]:
            return None
        need = evaluate(choices[found.choice], found.stage_of).memory_bytes
        return int(np.ceil(need[orders[found.choice].index(device)])) - own_bytes, found

    some = planned(_PLENTY_BYTES, _ANY)
    if some is None:
        return None
    too_few, enough = 0, some[0]
    while too_few < (1 - _FINE) * enough - 1:
        middle = (too_few + enough) // 2
        fewer = planned(middle, _ANY)
        too_few, enough = (middle, enough) if fewer is None else (too_few, min(middle, fewer[0]))
    some = planned(enough, _FINE)
    return None if some is None else (enough, some[1])


def _searched(
    choices: Choices, gap: float = _FINE, *, solver: str, deadline: Deadline
) -> SearchResult | None:
    """Searches with half of the time left.

    Raises:
        SolverError: no plan was found in this time, and there may be one.
    """
    if deadline.left_s <= 0:
        raise SolverError("there was no time to look for a plan")
    return search(
        choices, solver=solver, max_gap=gap, deadline=Deadline(deadline.left_s / 2, within=deadline)
    )


def _time(found: SearchResult) -> str:
    return f"bottleneck {format_seconds(found.bottleneck_s)}"


def _rounded_up(num_bytes: float) -> str:
    """Returns bytes with their exact number, because three digits may have been rounded down."""
    return f"{format_bytes(num_bytes)} ({int(np.ceil(num_bytes))} bytes)"
