"""How a value travels to the stages that read it: from its maker to each, or handed on along the pipeline.

Two nodes of two devices, a slow link between them; stages 2 and 3 read what stage 0 makes:

    directly            0 ===> 2   0 ===> 3        the slow link carries it twice
    handed on           0 ===> 2 -> 3              once; stage 2 hands it on, and hands the gradient back

Routes are chosen for an assignment: a value is handed on where that takes its links less time in all and
makes no stage a slower bottleneck, or where it makes the slowest stage faster. Where links are all alike only
the second can be, and whoever has a value by then sends it to a reader (`sharing.py`): what an encoder gives
to every stage of a decoder is no longer its last stage's to send. How the search goes about routes:
`search_with_routes.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from .instance import Floats, Hops, Instance, Integers, Loads, direct_hops, evaluate
from .sharing import shared_out

_SHUNNED = 1e6  # a second of a stage that is shunned counts as much as these of others
_LEAST_GAIN = 1e-6  # of a value's time on its links: equal ways are direct ones


@dataclass(frozen=True, slots=True)
class RouteOption:
    """A value's hops and the seconds that its links need for them; `saved_s` against sending directly."""

    net: int
    hops: Hops
    saved_s: float


def routed(instance: Instance, stage_of: Integers) -> tuple[dict[int, Hops], Loads]:
    """The hops of each net that is not sent directly, by its number, and what all of it costs each stage."""
    straight = evaluate(instance, stage_of)
    if instance.num_stages < 3 or not instance.per_destination:
        return {}, straight
    if links_are_alike(instance):
        return shared_out(instance, stage_of, straight)
    cheap: tuple[dict[int, Hops], Loads] = {}, straight
    for option in sorted(_cheaper_options(instance, stage_of), key=lambda each: (-each.saved_s, each.net)):
        tried = evaluate(instance, stage_of, cheap[0] | {option.net: option.hops})
        if tried.bottleneck_s <= cheap[1].bottleneck_s and (tried.fits or not cheap[1].fits):
            cheap = {**cheap[0], option.net: option.hops}, tried
    first, second = _relieved(instance, stage_of, *cheap), _relieved(instance, stage_of, {}, straight)
    is_better = second[1].bottleneck_s < first[1].bottleneck_s * (1 - _LEAST_GAIN)
    return second if is_better else first


def _relieved(
    instance: Instance, stage_of: Integers, routes: dict[int, Hops], loads: Loads
) -> tuple[dict[int, Hops], Loads]:
    """One value after another sent otherwise, as long as that makes the slowest stage faster."""
    while (relief := _relief(instance, stage_of, routes, loads)) is not None:
        routes, loads = relief
    return routes, loads


def _relief(
    instance: Instance, stage_of: Integers, routes: Mapping[int, Hops], loads: Loads
) -> tuple[dict[int, Hops], Loads] | None:
    """The routes with the one value sent otherwise that makes the slowest stage faster by most."""
    slowest = int(loads.load_s.argmax())
    found: tuple[dict[int, Hops], Loads] | None = None
    for net in range(len(instance.nets)):
        taken = hops_of(instance, stage_of, routes, net)
        if not any(slowest in hop for hop in taken):
            continue
        for hops in _other_hops(instance, stage_of, net, slowest):
            changed = {**routes, net: hops}
            tried = evaluate(instance, stage_of, changed)
            best_s = loads.bottleneck_s * (1 - _LEAST_GAIN) if found is None else found[1].bottleneck_s
            if hops != taken and tried.bottleneck_s < best_s and (tried.fits or not loads.fits):
                found = changed, tried
    return found


def _other_hops(instance: Instance, stage_of: Integers, net: int, shunned: int) -> list[Hops]:
    """Straight, the cheapest way, and the one that keeps the links of a stage busy for the least time."""
    straight = direct_hops(instance.nets[net], stage_of)
    if straight[-1][1] - straight[0][0] < 2:
        return []
    costs, targets = instance.cost_s[net], [target for _, target in straight]
    dear = costs.copy()
    dear[shunned, :] *= _SHUNNED
    dear[:, shunned] *= _SHUNNED
    ways = (straight, _handed_on(costs, straight[0][0], targets), _handed_on(dear, straight[0][0], targets))
    return list(dict.fromkeys(ways))


def loads_of(instance: Instance, stage_of: Integers) -> Loads:
    """What an assignment costs each stage, with the routes that it is given where it may have some."""
    return routed(instance, stage_of)[1] if instance.hands_on else evaluate(instance, stage_of)


def links_are_alike(instance: Instance) -> bool:
    """Then whoever sends a value, it takes the same time."""
    if instance.num_stages < 3 or not len(instance.nets):
        return True
    apart = ~np.eye(instance.num_stages, dtype=bool)
    return bool(np.ptp(instance.cost_s[:, apart], axis=1).max() == 0)


def hops_of(instance: Instance, stage_of: Integers, routes: Mapping[int, Hops], net: int) -> Hops:
    """Who sends a value to whom, in the order of the stages that are sent it; nothing where it stays."""
    return routes.get(net) or direct_hops(instance.nets[net], stage_of)


def _cheaper_options(instance: Instance, stage_of: Integers) -> list[RouteOption]:
    options = []
    for net in range(len(instance.nets)):
        direct = direct_hops(instance.nets[net], stage_of)
        if not direct or direct[-1][1] - direct[0][0] < 2:
            continue
        costs = instance.cost_s[net]
        hops = _handed_on(costs, direct[0][0], [target for _, target in direct])
        direct_s, handed_s = _seconds(costs, direct), _seconds(costs, hops)
        if handed_s < (1 - _LEAST_GAIN) * direct_s:
            options.append(RouteOption(net, hops, direct_s - handed_s))
    return options


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
