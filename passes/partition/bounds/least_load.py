"""A bound from single nodes: the least load of any stage that holds a given node.

A stage works for its nodes and pays for each tensor that it has a part of. The set around a node for which
the sum of both is least is a minimum cut between the node and a sink. Every node has an arc to the sink with
its work, and the tensors are edges. Nodes that cannot share a stage with the given one are at the sink: those
where all nodes on the paths between the two, which would be on the same stage, exceed the target by
themselves.

Where transfers are expensive this bound is far above that from work alone. A node between two large tensors
either pays for them or brings half the graph with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from pd2bw_fx.passes.partition.instance import Floats, Instance, Integers

from .downsets import DeviceKind
from .load_network import LoadNetwork
from .windows import Reach

_UNITS = 2**40  # in a target: capacities are whole numbers, rounded down
_NEAR = 0.5  # of a target: a larger load may exceed it once some nodes are kept away
_TRIES = 3  # nodes to keep away that are tried before the load is accepted


def kinds_of(instance: Instance) -> tuple[DeviceKind, ...]:
    """Returns the kinds of devices of an instance: stages that cost the same are of one kind."""
    stages: dict[bytes, list[int]] = {}
    for stage in range(instance.num_stages):
        barred = b"" if instance.forbidden is None else instance.forbidden[stage].tobytes()
        key = instance.work_s[stage].tobytes() + _cheapest_s(instance, stage).tobytes() + barred
        stages.setdefault(key, []).append(stage)
    return tuple(DeviceKind(instance, alike[0], len(alike)) for alike in stages.values())


def _cheapest_s(instance: Instance, stage: int) -> Floats:
    """Returns the least that each tensor costs this stage, if it has a part of it."""
    others = [other for other in range(instance.num_stages) if other != stage] or [stage]
    cheapest_s: Floats = instance.cost_s[:, stage, others].min(axis=1, initial=np.inf)
    return cheapest_s


class _Wanted(NamedTuple):
    """Which bounds are looked for, in units: the search ends at the first that is `enough`."""

    more_than: float
    enough: float


class LeastLoads:
    """The bound for one target after another. Loads have to be sums, so `overlap` has to be False."""

    def __init__(self, kinds: Sequence[DeviceKind], reach: Reach) -> None:
        self._kinds = [_KindLoads(kind, reach) for kind in kinds]

    def floor_s(self, target_s: float, deadline: Any, *, known_s: float = 0.0) -> float:
        """Returns a bound, at most the target, that no assignment is faster than. Larger ones than `known_s`
        are looked for, which is a bound that is known."""
        units = _UNITS / target_s
        # On devices of one kind, a node whose load is the target refutes it, and no other needs to be asked.
        wanted = _Wanted(max(_NEAR * _UNITS, known_s * units), _UNITS if len(self._kinds) == 1 else np.inf)
        by_kind = [kind.least(units, deadline, wanted) for kind in self._kinds]
        return min(target_s, float(np.min(by_kind, axis=0).max()) / units)


class _KindLoads:
    """Bounds for each node on devices of one kind."""

    def __init__(self, kind: DeviceKind, reach: Reach) -> None:
        instance, stage = kind.instance, kind.stage
        self._reach = reach
        self._work_s = instance.work_s[stage]
        self._cost_s = _cheapest_s(instance, stage)
        self._members = [tuple(sorted(set(net.members))) for net in instance.nets]
        forbidden = np.zeros(instance.num_nodes, dtype=bool)
        self._forbidden = forbidden if instance.forbidden is None else instance.forbidden[stage]

    def least(self, units: float, deadline: Any, wanted: _Wanted) -> Any:
        """Returns a bound for each node on the load of its stage, in units, with `units` of them a second. It
        is infinite where the node is forbidden on this kind of device."""
        # Amounts over twice the target are out of reach anyway, and are cut off there.
        work, cost = (
            np.floor(np.minimum(amount, 2 * _UNITS / units) * units).astype(np.int64)
            for amount in (self._work_s, self._cost_s)
        )
        bound = work.astype(np.float64)
        alone = work.copy()
        for members, price in zip(self._members, cost.tolist(), strict=True):
            alone[list(members)] += price
        if cost.any() and alone.max() > wanted.more_than:
            tensors = zip(self._members, cost.tolist(), strict=True)
            network = LoadNetwork(dict(enumerate(work.tolist())), tensors)
            self._raise(bound, network, alone, work, deadline, wanted)
        bound[self._forbidden] = np.inf
        return bound

    def _raise(
        self,
        bound: Any,
        network: LoadNetwork,
        alone: Integers,
        work: Integers,
        deadline: Any,
        wanted: _Wanted,
    ) -> None:
        """Raises bounds of nodes that may exceed the target to their least cuts, most expensive first."""
        most = alone.copy()  # an upper bound on the least load around each node
        while deadline.left_s > 0:
            node = int(most.argmax())
            if most[node] <= wanted.more_than:
                return
            value, held = network.least({node})
            if value > _NEAR * _UNITS:
                value = self._cut_apart(network, node, work, deadline)
            bound[node] = value
            if value >= wanted.enough:
                return
            # The least load around any node held with this one is at most `value`. A cut of its own, with
            # other nodes kept away, could be higher, and is not looked for.
            most[[node, *held]] = 0

    def _cut_apart(self, network: LoadNetwork, node: int, work: Integers, deadline: Any) -> float:
        """Returns the least cut without the nodes that cannot share a stage with this one at the target."""
        reach = self._reach
        together = reach.between_sums(node, work) + work + work[node]
        related = reach.related(node)
        away = related & (together > _UNITS)
        while True:
            value, held = network.least({node}, np.flatnonzero(away).tolist())
            if value > _UNITS or deadline.left_s == 0:
                return value
            farther = None
            tries = 0
            for other in sorted((v for v in held if related[v]), key=lambda v: (together[v], v)):
                ways = reach.between(node, other)
                if tries == _TRIES:
                    break
                if set(ways) <= held:
                    continue
                tries += 1
                if network.least({node, other, *ways}, np.flatnonzero(away).tolist())[0] > _UNITS:
                    farther = other
                    break
            if farther is None:
                return value
            away |= reach.beyond(node, farther)
