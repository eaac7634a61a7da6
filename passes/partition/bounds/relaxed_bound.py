"""A lower bound for stages that are all alike, by rules so relaxed that few down-sets are left.

The relaxed rules: a tensor costs each stage that has a part of it once, whoever sends it to whom; memory is
unlimited, so nothing is recomputed for it; a stage may be empty. Under these rules nodes can be joined at no
loss (`dominance.py`): an encoder-decoder's operands of cross-attention are joined to the layers that read
them. What is feasible is often as fast by the real rules.

A second rule bounds the sum over all stages. A stage that reads a tensor of another one receives it once,
from the stage that made it or one that hands it on, and that stage sends it once for this. So the total of

    the work of all stages + 2 c (stages that have a part of the tensor - 1), for every tensor of cost c

is at most d times the target for d stages. This holds for joined nodes too. Let a joined set M move to the
stage X of one of its nodes. f(M) <= f(X & M), because M has the least load around that node. So the tensors
that M shares with other nodes and X & M did not, of which X may gain a part, cost no more than those that
X & M shared and M has whole, of which another stage loses its part. What moves whole costs as before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pd2bw_fx.passes.partition.choices import Answer, Deadline
from pd2bw_fx.passes.partition.instance import Instance, Integers, Net
from pd2bw_fx.passes.partition.route import links_are_alike, loads_of
from pd2bw_fx.passes.solver import Status

from .chains import Room, RoomInAll, RoomToHandOn, roomiest_chain
from .dominance import leaders_of
from .downsets import DeviceKind, DownSets, OutOfTime

_MAX_DOWN_SETS = 40_000


class RelaxedBound:
    """All assignments that the relaxed rules allow: a `Question` for one target after another."""

    def __init__(self, instance: Instance, sets: DownSets, number_of: Integers) -> None:
        self._instance = instance
        self._sets = sets
        self._number_of = number_of  # the joined node of each node

    @classmethod
    def of(cls, instance: Instance, deadline: Deadline) -> RelaxedBound | None:
        """Returns None where stages differ, links run beside the work, or too many down-sets are left."""
        alike = links_are_alike(instance) and (instance.work_s == instance.work_s[0]).all()
        if not alike or not instance.per_destination or instance.overlap or instance.num_stages < 2:
            return None
        joined, number_of = _joined_instance(instance, deadline)
        sets = DownSets.of([DeviceKind(joined, 0, instance.num_stages)], max_sets=_MAX_DOWN_SETS)
        return None if sets is None else cls(instance, sets, number_of)

    def __call__(self, target_s: float, deadline: Deadline) -> Answer:
        in_all, to_hand_on = RoomInAll(self._sets, target_s), RoomToHandOn(self._sets, target_s)
        try:
            if roomiest_chain(self._sets, target_s, in_all, deadline) is None:
                return Answer(Status.INFEASIBLE)
            # This one is likely to be as fast by the real rules: it has their number of stages, and time for
            # somebody to hand on each tensor of many readers.
            found = self._assignment(target_s, to_hand_on if to_hand_on.tensors else in_all, deadline)
        except OutOfTime:
            return Answer(Status.UNKNOWN)
        if found is None:
            return Answer(Status.UNKNOWN)
        loads = loads_of(self._instance, found)
        is_real = loads.fits and loads.bottleneck_s <= target_s
        return Answer(Status.FEASIBLE if is_real else Status.UNKNOWN, 0, found)

    def _assignment(self, target_s: float, room: Room, deadline: Deadline) -> Integers | None:
        """Returns an assignment to as many stages as the real rules ask for, by which it may be slower."""
        num_stages = None if self._instance.may_be_empty else self._instance.num_stages
        chain = roomiest_chain(self._sets, target_s, room, deadline, num_stages=num_stages)
        return None if chain is None else chain.stage_of[self._number_of]


def _joined_instance(instance: Instance, deadline: Deadline) -> tuple[Instance, Integers]:
    """Returns the instance of joined nodes under the relaxed rules, and the joined node of each node."""
    work_s = instance.work_s[0] + (instance.again_s[0] if instance.recompute is True else 0.0)
    apart = _tensors(instance, range(instance.num_nodes))
    leader_of = leaders_of(work_s.tolist(), apart, instance.edges, deadline)
    leaders, number_of = np.unique(leader_of, return_inverse=True)
    n, k = len(leaders), instance.num_stages
    numbers, nothing = number_of.tolist(), np.zeros(n)
    tensors = _tensors(instance, numbers)
    joined = replace(
        instance,
        edges=tuple(
            sorted({(numbers[u], numbers[v]) for u, v in instance.edges if numbers[u] != numbers[v]})
        ),
        work_s=np.tile(np.bincount(number_of, work_s, n), (k, 1)),
        again_s=np.zeros((k, n)),
        nets=tuple(Net(ends[0], ends[1:]) for ends in tensors),
        cost_s=np.zeros((len(tensors), k, k)) + np.array(list(tensors.values()))[:, None, None],
        per_destination=False,
        recompute=False,
        may_be_empty=True,
        limit_bytes=np.full(k, np.inf),
        static_bytes=np.zeros((k, n)),
        gradient_bytes=nothing,
        saved_bytes=nothing,
        workspace_bytes=nothing,
        stepped_bytes=nothing,
        shared=(),
        forbidden=None,
        hands_on=False,
    )
    return joined, number_of


def _tensors(instance: Instance, number_of: Sequence[int]) -> dict[tuple[int, ...], float]:
    """Returns what a stage pays for tensors, by their ends; tensors with the same ends are added up."""
    together: dict[tuple[int, ...], float] = {}
    for net, costs in zip(instance.nets, instance.cost_s, strict=True):
        ends = tuple(sorted({number_of[node] for node in net.members}))
        if len(ends) > 1:
            together[ends] = together.get(ends, 0.0) + float(costs[0, 1])
    return together
