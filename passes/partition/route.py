"""How a value travels to the stages that read it: from its maker to each, or handed on along the pipeline.

Two nodes of two devices, a slow link between them; stages 2 and 3 read what stage 0 makes:

    directly            0 ===> 2   0 ===> 3        the slow link carries it twice
    handed on           0 ===> 2 -> 3              once; stage 2 hands it on, and hands the gradient back

Routes are chosen for an assignment: a value is handed on where that takes its links less time in all and
makes no stage a slower bottleneck. The search itself prices everything as sent directly; where links are not
all alike it is run a second time, with each stage paying once for a value at its cheapest link, which is no
more than any route costs it, and of the two assignments the one that is faster with its routes is taken.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .instance import Floats, Hops, Instance, Integers, Loads, evaluate
from .search import Choices, Deadline, Found, search

_LEAST_GAIN = 1e-6  # of a value's time on its links: equal ways are direct ones


@dataclass(frozen=True, slots=True)
class _Way:
    """A value's hops and the seconds that its links need for them; `saved_s` against sending directly."""

    net: int
    hops: Hops
    saved_s: float


def routed(instance: Instance, stage_of: Integers) -> tuple[dict[int, Hops], Loads]:
    """The hops of each net that is not sent directly, by its number, and what all of it costs each stage."""
    routes: dict[int, Hops] = {}
    loads = evaluate(instance, stage_of)
    if instance.num_stages < 3 or not instance.per_destination:
        return routes, loads
    for way in sorted(_cheaper_ways(instance, stage_of), key=lambda way: (-way.saved_s, way.net)):
        tried = evaluate(instance, stage_of, routes | {way.net: way.hops})
        if tried.bottleneck_s <= loads.bottleneck_s and (tried.fits or not loads.fits):
            routes[way.net], loads = way.hops, tried
    return routes, loads


def search_with_routes(
    choices: Choices, *, solver: str, max_gap: float, deadline: Deadline, **more: Any
) -> Found | None:
    """What `search` finds, or what is faster once values are handed on; as much time again is for that."""
    started_s = time.perf_counter()
    direct = search(choices, solver=solver, max_gap=max_gap, deadline=deadline, **more)
    if direct is None or _links_are_alike(choices[direct.choice]):
        return direct
    left_s = min(deadline.left_s, time.perf_counter() - started_s)
    cheapest = Choices(len(choices), lambda choice: _each_pays_once(choices[choice]))
    direct_s = routed(choices[direct.choice], direct.stage_of)[1].bottleneck_s
    other = search(
        cheapest, solver=solver, max_gap=max_gap, deadline=Deadline(left_s), faster_than_s=direct_s
    )
    if other is None:
        return direct
    loads = routed(choices[other.choice], other.stage_of)[1]
    if not loads.fits or loads.bottleneck_s >= direct_s:
        return direct
    # Its own bound is of the milder prices; the one that is told is for values sent directly.
    bound_s = min(direct.bound_s, loads.bottleneck_s)
    return replace(other, bottleneck_s=loads.bottleneck_s, bound_s=bound_s)


def _links_are_alike(instance: Instance) -> bool:
    """Then whoever sends a value, it takes the same time, and there is nothing to hand on."""
    if instance.num_stages < 3 or not len(instance.nets):
        return True
    apart = ~np.eye(instance.num_stages, dtype=bool)
    return bool(np.ptp(instance.cost_s[:, apart], axis=1).max() == 0)


def _each_pays_once(instance: Instance) -> Instance:
    apart = np.where(np.eye(instance.num_stages, dtype=bool), np.inf, instance.cost_s)
    cheapest = np.broadcast_to(apart.min(axis=2, keepdims=True), instance.cost_s.shape)
    return replace(instance, cost_s=np.ascontiguousarray(cheapest), per_destination=False)


def hops_of(instance: Instance, stage_of: Integers, routes: Mapping[int, Hops], net: int) -> Hops:
    """Who sends a value to whom, in the order of the stages that are sent it; nothing where it stays."""
    return routes.get(net) or _direct(instance, stage_of, net)


def _direct(instance: Instance, stage_of: Integers, net: int) -> Hops:
    source = int(stage_of[instance.nets[net].producer])
    readers = {int(stage_of[node]) for node in instance.nets[net].consumers} - {source}
    return tuple((source, reader) for reader in sorted(readers))


def _cheaper_ways(instance: Instance, stage_of: Integers) -> list[_Way]:
    ways = []
    for net in range(len(instance.nets)):
        direct = _direct(instance, stage_of, net)
        if not direct or direct[-1][1] - direct[0][0] < 2:
            continue
        costs = instance.cost_s[net]
        hops = _handed_on(costs, direct[0][0], [target for _, target in direct])
        direct_s, handed_s = _seconds(costs, direct), _seconds(costs, hops)
        if handed_s < (1 - _LEAST_GAIN) * direct_s:
            ways.append(_Way(net, hops, direct_s - handed_s))
    return ways


def _seconds(costs: Floats, hops: Hops) -> float:
    return sum(float(costs[source, target]) for source, target in hops)


def _handed_on(costs: Floats, source: int, readers: list[int]) -> Hops:
    """Each reader in turn is reached by the cheapest way from any stage that has the value by then.

    Hops run to later stages only; of equally cheap ways the one with the fewest hops.
    """
    has = {source}
    hops: list[tuple[int, int]] = []
    for reader in readers:
        best: dict[int, tuple[float, int, Hops]] = dict.fromkeys(has, (0.0, 0, ()))
        for stage in range(source + 1, reader + 1):
            if stage not in has:
                ways = (
                    (best[s][0] + float(costs[s, stage]), best[s][1] + 1, (*best[s][2], (s, stage)))
                    for s in range(source, stage)
                    if s in best
                )
                best[stage] = min(ways)
        way = best[reader][2]
        hops += way
        has |= {target for _, target in way}
    return tuple(sorted(hops, key=lambda hop: (hop[1], hop[0])))
