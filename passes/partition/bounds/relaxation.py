"""Refutes a target without an integer program: no chain of down-sets is within it, even by relaxed rules.

The relaxed rules: a tensor costs each stage that has a part of it once, over its fastest link, however many
stages read it; of the memory only saved activations count, and weights that a single block uses. Where the
graph is almost a row, as a transformer's is, this decides in a fraction of a second what takes an integer
program minutes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pd2bw_fx.passes.partition.instance import Flags, Floats, Instance, Integers

from .downsets import DownSets, OutOfTime

_SLACK = 1 + 1e-9


def is_refuted(instance: Instance, sets: DownSets, target_s: float, deadline: Any) -> bool:
    """Returns whether no assignment to the stages, in this order, is within the target. Raises OutOfTime."""
    k = instance.num_stages
    unit = sets.up_to_s  # the sets are in this order, by the work of kind 0, whatever device stage 0 has
    rates = [_rate(instance, stage, sets) for stage in range(k)]
    reached = np.zeros(len(sets), dtype=bool)
    reached[0] = True
    for stage in range(k):
        table = _Stage(instance, sets, stage)
        # A set is useful if the stages after this one can do the rest.
        room = sum(rates[stage + 1 :]) * target_s * _SLACK
        useful = unit >= unit[-1] - room
        grown = reached & useful if instance.may_be_empty else np.zeros(len(sets), dtype=bool)
        wanted = useful & ~grown
        # The largest sets reach the farthest ones, and leave the fewest to ask about to those before them.
        for count, at in enumerate(np.flatnonzero(reached)[::-1].tolist()):
            if count % 64 == 0 and deadline.left_s == 0:
                raise OutOfTime
            near = _near(sets, at, wanted, unit, target_s * rates[stage] * _SLACK)
            if len(near):
                found = table.within(at, near, target_s)
                grown[found], wanted[found] = True, False
        reached = grown
    return not bool(reached[-1])


def _near(sets: DownSets, at: int, wanted: Flags, unit: Floats, room: float) -> Integers:
    """Returns the wanted larger sets that are near enough for one stage; sets are in the order of `unit`."""
    end = int(np.searchsorted(unit, unit[at] + room, side="right"))
    near = at + 1 + np.flatnonzero(wanted[at + 1 : end])
    for word, own in zip(sets.words, sets.words[:, at], strict=True):
        if own:
            near = near[(word[near] & own) == own]
    return near


def _rate(instance: Instance, stage: int, sets: DownSets) -> float:
    """Returns how many seconds of `unit` this stage does in one second, at most."""
    kind = sets.kinds[0]
    unit, work_s = kind.instance.work_s[kind.stage], instance.work_s[stage]
    some = unit > 0
    if (work_s[some] == 0).any():
        return float("inf")
    return float((unit[some] / work_s[some]).max(initial=0.0))


class _Stage:
    """The sums over each down-set, by what one stage costs."""

    def __init__(self, instance: Instance, sets: DownSets, stage: int) -> None:
        self.instance = instance
        self.sets = sets
        self.stage = stage
        self.work_s = sets.of_nodes(instance.work_s[stage])
        self.again_s = sets.of_nodes(instance.again_s[stage])
        # Where gradients wait, they are left out: less than the stage holds, which a relaxed rule may say.
        waiting = instance.gradient_bytes if instance.gradients_wait[stage] else 0.0
        self.static = sets.of_nodes(instance.static_bytes[stage] - waiting)
        self.saved = sets.of_nodes(instance.saved_bytes)
        closed = np.zeros(instance.num_nodes) if instance.forbidden is None else instance.forbidden[stage]
        self.barred = sets.of_nodes(closed.astype(np.float64))
        costs = instance.cost_s[:, stage]
        nothing = np.zeros(len(instance.nets))
        self.receive_s = costs[:, :stage].min(axis=1) if stage else nothing
        self.send_s = costs[:, stage + 1 :].min(axis=1) if stage + 1 < instance.num_stages else nothing
        self.cut_s = sets.of_crossing(self.send_s)

    def within(self, at: int, sets: Integers, target_s: float) -> Integers:
        """Returns those of the sets that this stage can reach from set `at` within the target."""
        instance = self.instance
        sets = sets[self.barred[sets] == self.barred[at]]
        work_s = self.work_s[sets] - self.work_s[at] + instance.besides_s[self.stage]
        static, saved = self.static[sets] - self.static[at], self.saved[sets] - self.saved[at]
        limit = instance.limit_bytes[self.stage] * _SLACK
        kept = static + saved * instance.in_flight[self.stage] <= limit
        again = ~kept if instance.recompute == "auto" else np.full(len(sets), instance.recompute is True)
        work_s = work_s + again * (self.again_s[sets] - self.again_s[at])
        fits = np.where(again, static + saved <= limit, kept)
        links_s = self.cut_s[sets]
        for net in self.sets.crossing[at]:
            counts = self.sets.counts[net, sets]
            links_s = links_s + self.receive_s[net] * (counts > self.sets.counts[net, at])
            links_s = links_s - self.send_s[net] * (counts < self.sets.sizes[net])
        load_s = np.maximum(work_s, links_s) if instance.overlap else work_s + links_s
        within: Integers = sets[fits & (load_s <= target_s * _SLACK)]
        return within
