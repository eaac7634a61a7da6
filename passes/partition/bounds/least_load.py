"""A bound from single nodes: what the stage that holds a node has to do whatever else it holds.

The stage works for its nodes and pays for each tensor that it has a part of. The set around a node for which
both together are least is a minimum cut: between the node and a sink that each other node is tied to by its
work, with the tensors as edges. What cannot share a stage with the node lies at the sink: where the nodes on
the ways between the two, which are on that stage too, are more than the target by themselves.

Where transfers are dear this tells what work alone does not: a node between two large tensors drags half the
graph along, or pays for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pd2bw_fx.passes.partition.instance import Floats, Instance, Integers

from .downsets import DeviceKind
from .load_network import LoadNetwork
from .windows import Reach

_UNITS = 2**40  # that a target is counted in: cuts are of whole numbers, each rounded down
_NEAR = 0.5  # of a target: what may come over it once some nodes are kept away
_TRIES = 3


def kinds_of(instance: Instance) -> tuple[DeviceKind, ...]:
    """The stages of an instance that differ in what they cost."""
    stages: dict[bytes, list[int]] = {}
    for stage in range(instance.num_stages):
        barred = b"" if instance.forbidden is None else instance.forbidden[stage].tobytes()
        key = instance.work_s[stage].tobytes() + _cheapest_s(instance, stage).tobytes() + barred
        stages.setdefault(key, []).append(stage)
    return tuple(DeviceKind(instance, alike[0], len(alike)) for alike in stages.values())


def _cheapest_s(instance: Instance, stage: int) -> Floats:
    """What each tensor that the stage has a part of costs it at least."""
    others = [other for other in range(instance.num_stages) if other != stage] or [stage]
    cheapest_s: Floats = instance.cost_s[:, stage, others].min(axis=1, initial=np.inf)
    return cheapest_s


class LeastLoads:
    """To be asked about one target after another. Loads are sums: not for links that run beside the work."""

    def __init__(self, kinds: Sequence[DeviceKind], reach: Reach) -> None:
        self._kinds = [_KindLoads(kind, reach) for kind in kinds]

    def floor_s(self, target_s: float, deadline: Any) -> float:
        """No assignment is faster than this, which is the target at most."""
        units = _UNITS / target_s
        by_kind = [kind.least(units, deadline) for kind in self._kinds]
        return min(target_s, float(np.min(by_kind, axis=0).max()) / units)


class _KindLoads:
    """The nodes as devices of one kind see them."""

    def __init__(self, kind: DeviceKind, reach: Reach) -> None:
        instance, stage = kind.instance, kind.stage
        self._reach = reach
        self._work_s = instance.work_s[stage]
        self._cost_s = _cheapest_s(instance, stage)
        self._members = [tuple(sorted(set(net.members))) for net in instance.nets]
        forbidden = np.zeros(instance.num_nodes, dtype=bool)
        self._forbidden = forbidden if instance.forbidden is None else instance.forbidden[stage]

    def least(self, units: float, deadline: Any) -> Any:
        """For each node a bound on the load of its stage, in so many units a second; infinite where it may
        not be on this kind of device."""
        # Twice the target is out of reach however much more it is.
        work, cost = (
            np.floor(np.minimum(amount, 2 * _UNITS / units) * units).astype(np.int64)
            for amount in (self._work_s, self._cost_s)
        )
        bound = work.astype(np.float64)
        if cost.any():
            alone = work.copy()
            for members, price in zip(self._members, cost.tolist(), strict=True):
                alone[list(members)] += price
            tensors = zip(self._members, cost.tolist(), strict=True)
            network = LoadNetwork(dict(enumerate(work.tolist())), tensors)
            self._raise(bound, network, alone, work, deadline)
        bound[self._forbidden] = np.inf
        return bound

    def _raise(
        self, bound: Any, network: LoadNetwork, alone: Integers, work: Integers, deadline: Any
    ) -> None:
        """To the value of the least cut where it may come over the target, dearest nodes first."""
        most = alone.copy()  # no more than this is what the stage of a node has to do
        while deadline.left_s > 0:
            node = int(most.argmax())
            if most[node] <= _NEAR * _UNITS:
                return
            value, held = network.least({node})
            if value > _NEAR * _UNITS:
                value = self._with_company(network, node, work, deadline)
            bound[node] = value
            # What is held with it has no more to do; that company of its own may raise it is let go.
            most[[node, *held]] = 0

    def _with_company(self, network: LoadNetwork, node: int, work: Integers, deadline: Any) -> float:
        """The least cut where nodes that the target keeps away from this one are not held with it."""
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
