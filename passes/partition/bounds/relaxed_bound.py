"""A lower bound for stages that are all alike, by rules so relaxed that few down-sets are left.

The relaxed rules: a tensor costs each stage that has a part of it once, whoever sends it to whom; memory is
unlimited, so nothing is recomputed for it. There are two kinds of this bound.

With nodes joined at no loss (`dominance.py`) a stage may be empty. An encoder-decoder's operands of
cross-attention, for example, are joined to the layers that read them. Large models have few down-sets then.
What is feasible is often as fast by the real rules. A second rule bounds the sum over all stages. A stage
that reads a tensor of another one receives it once, from the stage that made it or one that hands it on, and
that stage sends it once for this. So the total of

    the work of all stages + 2 c (stages that have a part of the tensor - 1), for every tensor of cost c

is at most d times the target for d stages. This holds for joined nodes too. Let a joined set M move to the
stage X of one of its nodes. f(M) <= f(X & M), because M has the least load around that node. So the tensors
that M shares with other nodes and X & M did not, of which X may gain a part, cost no more than those that
X & M shared and M has whole, of which another stage loses its part. What moves whole costs as before.

With nodes as they are, which small models allow, there are as many stages as the real rules ask for, and the
stages with a tensor of several readers need the time to hand it on (`chains.py`). Where transfers are dear
beside work this is mostly the optimum itself: all stages have to be paid for, and a send is whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from pd2bw_fx.passes.partition.choices import Answer, Deadline
from pd2bw_fx.passes.partition.instance import Floats, Instance, Integers, Net
from pd2bw_fx.passes.partition.route import links_are_alike, loads_of
from pd2bw_fx.passes.solver import Status

from .accounts import Accounts, TimeInAll, TimeToHandOn
from .chains import (
    Readers,
    Room,
    RoomInAll,
    RoomToHandOn,
    SendsToHandOn,
    fastest_chain,
    readers_of_many,
    roomiest_chain,
)
from .cut_graph import CutGraph
from .dominance import leaders_of
from .downsets import DeviceKind, DownSets, OutOfTime
from .near_cuts import NearCuts
from .stage_table import StageTable
from .whole_sends import TooMany, chain_of_whole_sends
from .windows import Reach

_LISTING_SHARE = 0.4  # of the time left, for listing the stages of joined nodes


class RelaxedBound:
    """All assignments that the relaxed rules allow: a `Question` for one target after another."""

    def __init__(
        self, instance: Instance, number_of: Integers, num_stages: int | None, sets: DownSets | _NearSets
    ) -> None:
        self._instance = instance
        self._number_of = number_of  # the joined node of each node
        self._num_stages = num_stages  # None: stages may be empty
        self._sets = sets
        self._stages: StageTable | None = None
        self._too_many_s = np.inf  # the least target that has more stages than can be listed

    @classmethod
    def of(
        cls, instance: Instance, number_of: Integers, *, max_sets: int, max_size: int | None = None
    ) -> RelaxedBound | None:
        """The bound over joined nodes, by the joined node of each node (`joined_nodes`), or over all nodes.

        Where there are more than `max_sets` down-sets, those near each target are listed, if nodes times
        stages are no more than `max_size`; otherwise it returns None.
        """
        kind = DeviceKind(_relaxed(instance, number_of), 0, instance.num_stages)
        is_joined = kind.instance.num_nodes < instance.num_nodes
        num_stages = None if is_joined or instance.may_be_empty else instance.num_stages
        sets = DownSets.of([kind], max_sets=max_sets)
        if sets is not None:
            return cls(instance, number_of, num_stages, sets)
        if max_size is not None and kind.instance.num_nodes * kind.count > max_size:
            return None
        return cls(instance, number_of, num_stages, _NearSets(kind, max_sets))

    @property
    def has_all_sets(self) -> bool:
        return isinstance(self._sets, DownSets)

    def fastest(self, target_s: float, deadline: Deadline) -> tuple[float, Integers | None]:
        """Returns a time that no assignment beats, `target_s` at most, and one that may be that fast.

        Without any room for sends it is the best bound of these rules, if the stages can be listed. Raises
        OutOfTime.
        """
        is_possible, found = self._without_listing(target_s, deadline)
        if not is_possible:
            return target_s, None
        stages = self._within(target_s, deadline)
        if stages is None:
            return 0.0, None if found is None else found[self._number_of]
        chain = fastest_chain(stages, deadline, num_stages=self._num_stages)
        if chain is None:
            return target_s, None
        if self._num_stages is None and not self._instance.may_be_empty:
            real = fastest_chain(stages, deadline, num_stages=self._instance.num_stages)
            return chain[0], None if real is None else real[1][self._number_of]
        return chain[0], chain[1][self._number_of]

    def __call__(self, target_s: float, deadline: Deadline) -> Answer:
        bound_s = 0.0
        try:
            is_possible, found = self._without_listing(target_s, deadline)
            if is_possible and self._num_stages is None and isinstance(self._sets, DownSets):
                bound_s, found = self._asked_of_all(self._sets, target_s, deadline)
                is_possible = bound_s < target_s
            else:
                stages = self._within(target_s, deadline) if is_possible else None
                if stages is not None:
                    is_possible, found = self._asked(stages, target_s, deadline)
        except OutOfTime:
            return Answer(Status.UNKNOWN)
        if not is_possible:
            return Answer(Status.INFEASIBLE)
        if found is None:
            return Answer(Status.UNKNOWN, bound_s=bound_s)
        stage_of = found[self._number_of]
        loads = loads_of(self._instance, stage_of)
        is_real = loads.fits and loads.bottleneck_s <= target_s
        return Answer(Status.FEASIBLE if is_real else Status.UNKNOWN, 0, stage_of, bound_s)

    def _without_listing(self, target_s: float, deadline: Deadline) -> tuple[bool, Integers | None]:
        """Returns whether a chain is within the target, and the joined nodes' stages if it has as many as are
        asked for. Where stages may be empty, down-sets that others dominate are skipped, so this is fast.

        With nodes as they are, and where the stages have been listed, it returns True. Raises OutOfTime.
        """
        is_listed = self._stages is not None and self._stages.target_s >= target_s
        if self._num_stages is not None or is_listed or not isinstance(self._sets, DownSets):
            return True, None
        chain = self._sets.chain_within(target_s, deadline)
        if chain is None:
            return False, None
        has_all = (
            self._instance.may_be_empty or len(set(chain.stage_of.tolist())) == self._instance.num_stages
        )
        return True, chain.stage_of if has_all else None

    def _asked_of_all(
        self, sets: DownSets, target_s: float, deadline: Deadline
    ) -> tuple[float, Integers | None]:
        """Returns a time that no assignment beats, `target_s` at most, and the joined nodes' stages as
        `_asked` does. Of joined nodes with all their down-sets the stages need not be listed."""
        time_in_all = TimeInAll(sets, target_s)
        in_all = Accounts.of(sets, target_s, time_in_all, deadline)
        if in_all.roomiest_chain() is None:
            return target_s, None
        bound_s = time_in_all.bound_s(in_all)
        num_stages = None if self._instance.may_be_empty else self._instance.num_stages
        found = in_all.roomiest_chain(num_stages)
        to_hand_on = TimeToHandOn(sets, target_s)
        if self._real_s(found) <= target_s or not to_hand_on.nets:
            return bound_s, found
        other = Accounts.of(sets, target_s, to_hand_on, deadline).roomiest_chain(num_stages)
        return bound_s, min(found, other, key=self._real_s)

    def _real_s(self, found: Integers | None) -> float:
        if found is None:
            return np.inf
        loads = loads_of(self._instance, found[self._number_of])
        return loads.bottleneck_s if loads.fits else np.inf

    def _asked(self, stages: StageTable, target_s: float, deadline: Deadline) -> tuple[bool, Integers | None]:
        """Returns whether the relaxed rules allow the target, and the joined nodes' stages by a rule that is
        likely to be as fast by the real ones."""
        if self._num_stages is None:
            in_all = RoomInAll(stages, target_s)
            if roomiest_chain(stages, target_s, in_all, deadline) is None:
                return False, None
            # This one has the real number of stages, and time for somebody to hand on what many read.
            many = readers_of_many(stages)
            room: Room = in_all if many is None else RoomToHandOn(stages, many, target_s)
            num_stages = None if self._instance.may_be_empty else self._instance.num_stages
            return True, roomiest_chain(stages, target_s, room, deadline, num_stages=num_stages)
        readers, found = Readers(stages), None
        for rule in (RoomToHandOn, SendsToHandOn):
            to_hand_on = rule(stages, readers, target_s)
            found = roomiest_chain(stages, target_s, to_hand_on, deadline, num_stages=self._num_stages)
            if found is None:
                return False, None
        if self._num_stages is None or not readers.nets:
            return True, found
        with suppress(TooMany):
            found = chain_of_whole_sends(stages, target_s, deadline, num_stages=self._num_stages)
        return found is not None, found

    def _within(self, target_s: float, deadline: Deadline) -> StageTable | None:
        """Returns the stages within a target, or None where they are too many to list. Raises OutOfTime."""
        if not 0 < target_s < self._too_many_s:
            return None
        if self._stages is None or self._stages.target_s < target_s:
            self._stages = self._listed(target_s, deadline)
            if self._stages is None:
                self._too_many_s = target_s
        return self._stages

    def _listed(self, target_s: float, deadline: Deadline) -> StageTable | None:
        if isinstance(self._sets, _NearSets):
            near = self._sets.within(target_s, deadline)
            return None if near is None else StageTable.of(near, target_s, deadline)
        if self._num_stages is not None:
            return StageTable.of(self._sets, target_s, deadline)
        # Without the stages there is still `_without_listing`, which needs some of the time.
        with suppress(OutOfTime):
            share = Deadline(deadline.left_s * _LISTING_SHARE, within=deadline)
            return StageTable.of(self._sets, target_s, share)
        return None


class _NearSets:
    """The down-sets that chains within a target have, where a graph has too many to list all."""

    def __init__(self, kind: DeviceKind, most: int) -> None:
        self._kind = kind
        self._most = most
        self._graph = CutGraph(kind, Reach(kind.instance.num_nodes, kind.instance.edges))

    def within(self, target_s: float, deadline: Deadline) -> DownSets | None:
        """Returns None where one place has more than `most`. Raises OutOfTime."""
        listed = NearCuts(self._graph, self._kind.count, target_s).listed(self._most, deadline)
        if listed is None:  # there is no chain: only the ends of one are left
            ends = np.stack([np.full(self._kind.instance.num_nodes, flag) for flag in (False, True)])
            return DownSets([self._kind], ends)
        return DownSets([self._kind], listed.member) if listed.are_all else None


def applies_to(instance: Instance) -> bool:
    """Returns whether all stages are alike, and links do not run beside the work."""
    alike = links_are_alike(instance) and bool((instance.work_s == instance.work_s[0]).all())
    return alike and instance.per_destination and not instance.overlap and instance.num_stages > 1


def joined_nodes(instance: Instance, deadline: Deadline) -> Integers:
    """Returns the joined node of each node. What has been joined when the deadline passes is joined at no
    loss."""
    apart = _tensors(instance, range(instance.num_nodes))
    leader_of = leaders_of(_work_s(instance).tolist(), apart, instance.edges, deadline)
    number_of: Integers = np.unique(leader_of, return_inverse=True)[1]
    return number_of


def _work_s(instance: Instance) -> Floats:
    work_s: Floats = instance.work_s[0] + (instance.again_s[0] if instance.recompute is True else 0.0)
    return work_s


def _relaxed(instance: Instance, number_of: Integers) -> Instance:
    """Returns the instance of joined nodes under the relaxed rules."""
    n, k = int(number_of.max()) + 1, instance.num_stages
    numbers, nothing = number_of.tolist(), np.zeros(n)
    tensors = _apart(instance, numbers)
    return replace(
        instance,
        edges=tuple(
            sorted({(numbers[u], numbers[v]) for u, v in instance.edges if numbers[u] != numbers[v]})
        ),
        work_s=np.tile(np.bincount(number_of, _work_s(instance), n), (k, 1)),
        again_s=np.zeros((k, n)),
        nets=tuple(Net(ends[0], ends[1:]) for ends, _ in tensors),
        cost_s=np.zeros((len(tensors), k, k)) + np.array([cost_s for _, cost_s in tensors])[:, None, None],
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


def _tensors(instance: Instance, number_of: Sequence[int]) -> dict[tuple[int, ...], float]:
    """Returns what a stage pays for tensors, by their ends; tensors with the same ends are added up."""
    together: dict[tuple[int, ...], float] = {}
    for ends, cost_s in _each_tensor(instance, number_of):
        together[ends] = together.get(ends, 0.0) + cost_s
    return together


def _apart(instance: Instance, number_of: Sequence[int]) -> list[tuple[tuple[int, ...], float]]:
    """Returns the ends and the cost of tensors. Those of two ends are added up; those of more are not,
    because different stages may hand them on."""
    of_two = {ends: cost_s for ends, cost_s in _tensors(instance, number_of).items() if len(ends) == 2}
    return [*of_two.items(), *(each for each in _each_tensor(instance, number_of) if len(each[0]) > 2)]


def _each_tensor(instance: Instance, number_of: Sequence[int]) -> Iterator[tuple[tuple[int, ...], float]]:
    for net, costs in zip(instance.nets, instance.cost_s, strict=True):
        ends = tuple(sorted({number_of[node] for node in net.members}))
        if len(ends) > 1:
            yield ends, float(costs[0, 1])
