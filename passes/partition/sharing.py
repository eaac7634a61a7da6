"""Shares out the sends of a value among stages that have it, where all links are alike.

A stage that has received the value can send it to a later reader instead of the producer. The links take the
same time in all, and the slowest stage gets faster if it was the producer.
"""

from __future__ import annotations

from .instance import Hops, Instance, Integers, Loads, direct_hops, evaluate

_LEAST_RELATIVE_GAIN = 1e-6  # of the slowest stage's load


def share_sends(instance: Instance, stage_of: Integers, straight: Loads) -> tuple[dict[int, Hops], Loads]:
    """Returns the hops of each net that its producer does not send alone, by net, and what all of it costs.

    It hands sends of the slowest stage to other stages, one after another, as long as that helps. `straight`
    has the loads of the assignment with every value sent straight.
    """
    sends = _Sends(instance, stage_of, straight)
    while sends.relieve():
        pass
    if not sends.changed:
        return {}, straight
    routes = {net: sends.hops(net) for net in sorted(sends.changed)}
    return routes, evaluate(instance, stage_of, routes)


class _Sends:
    """The sender of each net to each stage that reads it, for nets that several stages read."""

    def __init__(self, instance: Instance, stage_of: Integers, straight: Loads) -> None:
        self._instance = instance
        self._compute_s = straight.work_s + straight.again_s
        self._links_s = straight.send_s + straight.receive_s
        self._sender_of: dict[int, dict[int, int]] = {}  # by net, then by receiving stage
        self.changed: set[int] = set()
        for number, net in enumerate(instance.nets):
            direct = direct_hops(net, stage_of)
            if len(direct) > 1 and instance.cost_s[number, 0, 1] > 0:
                self._sender_of[number] = {target: source for source, target in direct}

    def hops(self, net: int) -> Hops:
        return tuple((source, target) for target, source in sorted(self._sender_of[net].items()))

    def relieve(self) -> bool:
        """Hands one send of the slowest stage to another one, if both are faster than the slowest then.
        Returns whether it did."""
        load_s = self._instance.load_s(self._compute_s, self._links_s)
        slowest = int(load_s.argmax())
        slower_s, chosen = float(load_s[slowest]) * (1 - _LEAST_RELATIVE_GAIN), None
        for net, sender_of in self._sender_of.items():
            cost_s = self._cost_s(net)
            less_s = self._instance.load_s(self._compute_s, self._links_s - cost_s)[slowest]
            more_s = self._instance.load_s(self._compute_s, self._links_s + cost_s)
            for target, sender in sender_of.items():
                others = [other for other in sender_of if other < target and other != slowest]
                if sender != slowest or not others:
                    continue
                other = min(others, key=lambda stage: (more_s[stage], stage))
                if max(less_s, more_s[other]) < slower_s:
                    slower_s, chosen = max(less_s, more_s[other]), (net, target, other)
        if chosen is None:
            return False
        net, target, other = chosen
        self._sender_of[net][target] = other
        self._links_s[slowest] -= self._cost_s(net)
        self._links_s[other] += self._cost_s(net)
        self.changed.add(net)
        return True

    def _cost_s(self, net: int) -> float:
        return float(self._instance.cost_s[net, 0, 1])
