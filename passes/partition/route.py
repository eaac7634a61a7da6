"""Chooses how a value travels to the stages that read it: straight from its producer, or handed on.

Two hosts of two devices each, with a slow link between them; stages 2 and 3 read what stage 0 makes:

    straight            0 ===> 2   0 ===> 3        the slow link carries the value twice
    handed on           0 ===> 2 -> 3              once; stage 2 hands it on, and hands the gradient back

Routes are chosen for a given assignment. A value is handed on where its links need less time in all and the
bottleneck does not become slower, or where the slowest stage becomes faster. Where all links are alike only
the second is possible, and any stage that has the value by then can send it to a reader (`sharing.py`). So
the last stage of an encoder does not have to send its result to every stage of the decoder by itself.
`search_with_routes.py` has the search over plans with routes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .instance import Floats, Hops, Instance, Integers, Loads, direct_hops, evaluate
from .sharing import share_sends

_SHUNNED_COST_FACTOR = 1e6  # the cost of links of the stage to relieve is multiplied by this
_LEAST_RELATIVE_GAIN = 1e-6  # a route that gains less than this share of the time is not taken


@dataclass(frozen=True, slots=True)
class RouteOption:
    """The hops of a net, which take its links `saved_s` less time than sending straight."""

    net: int
    hops: Hops
    saved_s: float


def routed(instance: Instance, stage_of: Integers) -> tuple[dict[int, Hops], Loads]:
    """Returns the hops of nets that are not sent straight, by net, and the assignment's costs with them."""
    straight = evaluate(instance, stage_of)
    if instance.num_stages < 3 or not instance.per_destination:
        return {}, straight
    if links_are_alike(instance):
        return share_sends(instance, stage_of, straight)
    crossing = [net for net in range(len(instance.nets)) if direct_hops(instance.nets[net], stage_of)]
    cheap: tuple[dict[int, Hops], Loads] = {}, straight
    for option in sorted(
        _cheaper_options(instance, stage_of, crossing), key=lambda each: (-each.saved_s, each.net)
    ):
        tried = evaluate(instance, stage_of, cheap[0] | {option.net: option.hops})
        if tried.bottleneck_s <= cheap[1].bottleneck_s and (tried.fits or not cheap[1].fits):
            cheap = {**cheap[0], option.net: option.hops}, tried
    first, second = (_relieved(instance, stage_of, crossing, *by) for by in (cheap, ({}, straight)))
    is_better = second[1].bottleneck_s < first[1].bottleneck_s * (1 - _LEAST_RELATIVE_GAIN)
    return second if is_better else first


def _relieved(
    instance: Instance, stage_of: Integers, crossing: Sequence[int], routes: dict[int, Hops], loads: Loads
) -> tuple[dict[int, Hops], Loads]:
    """Reroutes one value after another, as long as that makes the slowest stage faster."""
    while (relief := _relief(instance, stage_of, crossing, routes, loads)) is not None:
        routes, loads = relief
    return routes, loads


def _relief(
    instance: Instance, stage_of: Integers, crossing: Sequence[int], routes: Mapping[int, Hops], loads: Loads
) -> tuple[dict[int, Hops], Loads] | None:
    """Returns the routes with one value rerouted, the one that makes the slowest stage faster by most."""
    slowest = int(loads.load_s.argmax())
    found: tuple[dict[int, Hops], Loads] | None = None
    for net in crossing:
        taken = hops_of(instance, stage_of, routes, net)
        if not any(slowest in hop for hop in taken):
            continue
        for hops in _other_hops(instance, stage_of, net, slowest):
            changed = {**routes, net: hops}
            tried = evaluate(instance, stage_of, changed)
            best_s = (
                loads.bottleneck_s * (1 - _LEAST_RELATIVE_GAIN) if found is None else found[1].bottleneck_s
            )
            if hops != taken and tried.bottleneck_s < best_s and (tried.fits or not loads.fits):
                found = changed, tried
    return found


def _other_hops(instance: Instance, stage_of: Integers, net: int, shunned: int) -> list[Hops]:
    """Returns the straight hops, the cheapest ones, and those with the least time on links of `shunned`."""
    straight = direct_hops(instance.nets[net], stage_of)
    if straight[-1][1] - straight[0][0] < 2:
        return []
    costs, targets = instance.cost_s[net], [target for _, target in straight]
    dear = costs.copy()
    dear[shunned, :] *= _SHUNNED_COST_FACTOR
    dear[:, shunned] *= _SHUNNED_COST_FACTOR
    candidates = (
        straight,
        _handed_on(costs, straight[0][0], targets),
        _handed_on(dear, straight[0][0], targets),
    )
    return list(dict.fromkeys(candidates))


def loads_of(instance: Instance, stage_of: Integers) -> Loads:
    """Returns what an assignment costs each stage, with routes where the instance allows them."""
    return routed(instance, stage_of)[1] if instance.hands_on else evaluate(instance, stage_of)


def links_are_alike(instance: Instance) -> bool:
    """Returns whether every link takes the same time for a value, whichever stages it joins."""
    if instance.num_stages < 3 or not len(instance.nets):
        return True
    apart = ~np.eye(instance.num_stages, dtype=bool)
    return bool(np.ptp(instance.cost_s[:, apart], axis=1).max() == 0)


def hops_of(instance: Instance, stage_of: Integers, routes: Mapping[int, Hops], net: int) -> Hops:
    """Returns the hops of a value, in the order of the stages that receive it; none where it stays."""
    return routes.get(net) or direct_hops(instance.nets[net], stage_of)


def _cheaper_options(instance: Instance, stage_of: Integers, crossing: Sequence[int]) -> list[RouteOption]:
    options = []
    for net in crossing:
        direct = direct_hops(instance.nets[net], stage_of)
        if direct[-1][1] - direct[0][0] < 2:
            continue
        costs = instance.cost_s[net]
        hops = _handed_on(costs, direct[0][0], [target for _, target in direct])
        direct_s, handed_s = _seconds(costs, direct), _seconds(costs, hops)
        if handed_s < (1 - _LEAST_RELATIVE_GAIN) * direct_s:
            options.append(RouteOption(net, hops, direct_s - handed_s))
    return options


def _seconds(costs: Floats, hops: Hops) -> float:
    return sum(float(costs[source, target]) for source, target in hops)


def _handed_on(costs: Floats, source: int, readers: list[int]) -> Hops:
    """Returns hops that reach one reader after another, each by the cheapest path from any stage that has the
    value by then.

    Hops run to later stages only. Of equally cheap paths it takes the one with the fewest hops.
    """
    has = {source}
    hops: list[tuple[int, int]] = []
    for reader in readers:
        best: dict[int, tuple[float, int, Hops]] = dict.fromkeys(has, (0.0, 0, ()))
        for stage in range(source + 1, reader + 1):
            if stage not in has:
                paths = (
                    (best[s][0] + float(costs[s, stage]), best[s][1] + 1, (*best[s][2], (s, stage)))
                    for s in range(source, stage)
                    if s in best
                )
                best[stage] = min(paths)
        path = best[reader][2]
        hops += path
        has |= {target for _, target in path}
    return tuple(sorted(hops, key=lambda hop: (hop[1], hop[0])))
