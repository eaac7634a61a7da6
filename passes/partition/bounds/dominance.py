"""Joins groups of a workload by dominance: those that may share a device with another one at no loss.

    device a    k   v           k and v make what x alone reads. Where they take less time than their tensors,
                 `. |           {k, v, x} is the set around x with the least load: b has less to do with k and
    device b       `x           v than without, whatever else it has, and a has less to do without them

The load f(X) of a device with the nodes X is a sum over these nodes, and over the tensors of which X has a
part and not the whole. f is submodular, and its second part is symmetric. Let M be the set with the least
load of all sets around x, the leader, in some neighbourhood. Then

    f(X + M) <= f(X)   the device X that has x has no more to do with all of M
    f(Y - M) <= f(Y)   another device Y has no more to do without its nodes of M

because f(M) is at most f(X & M) and f(M - Y), both of which are of sets around x. The order of the devices
allows the move if all that M reads of others comes before x, and all that others read of M comes after x. So
M is joined to x, and the joined group may then be joined to another one.

This does not hold on a CPU, which pays for no tensor: x may be on a CPU and M elsewhere. There a joined group
is asked for no more than the leader's own CPU time, which relaxes the rules (see `partition/__init__.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from pd2bw_fx.passes.partition.choices import Deadline
from pd2bw_fx.passes.partition.groups import Groups, RelaxedGroups, joined, tensors_between, totals
from pd2bw_fx.workload import Workload

from .load_network import LoadNetwork

_BALL = 40  # nodes of a neighbourhood, at most
_RADIUS = 4  # edges from its centre
_ELSEWHERE = -1  # stands for all nodes outside of it


def join_dominated_pairs(workload: Workload, groups: Groups, *, with_cpus: bool) -> Groups:
    """Joins groups to a neighbour where the two are a least load around the neighbour, which takes no time.

    With CPUs only groups that take no CPU time are joined.
    """
    quotient = _quotient(workload, groups)
    quotient.join_pairs(free_of_cpu=with_cpus)
    return joined(groups, quotient.leaders())


def join_dominated(
    workload: Workload, groups: Groups, deadline: Deadline, *, min_beside: int = 0
) -> RelaxedGroups:
    """Joins each group to the leader whose least-load set it is in, by what accelerators pay.

    A CPU is asked for the least that it may have of a joined group. Only groups are joined that have at least
    `min_beside` others beside them, which come neither before nor after. What has been joined when the
    deadline passes is joined at no loss.
    """
    quotient = _quotient(workload, groups, min_beside)
    quotient.join_pairs()
    quotient.join_neighbourhoods(deadline)
    leaders = quotient.leaders()
    together = joined(groups, leaders)
    own_cpu_time = np.array([quotient.own_cpu_time[at] for at in sorted(set(leaders))])
    return RelaxedGroups(together, replace(totals(workload, together), cpu_time=own_cpu_time))


def leaders_of(
    work: Sequence[float],
    tensors: Mapping[tuple[int, ...], float],
    edges: Iterable[tuple[int, int]],
    deadline: Deadline,
) -> list[int]:
    """Returns the leader that each node is joined to; leaders lead themselves.

    Nodes are in a topological order, `tensors` has the cost of each tensor by its ends. Devices have to be
    all alike, with unlimited memory.
    """
    quotient = _Quotient(work, tensors, edges)
    quotient.join_pairs()
    quotient.join_neighbourhoods(deadline)
    return quotient.leaders()


def _quotient(workload: Workload, groups: Groups, min_beside: int = 0) -> _Quotient:
    of = totals(workload, groups)
    quotient = _Quotient(
        of.accelerator_time.tolist(),
        tensors_between(workload, groups),
        groups.edges,
        of.cpu_time.tolist(),
        workload.num_cpus,
    )
    all_fit = of.num_bytes.sum() <= workload.accelerator_bytes
    stays = of.is_barred if all_fit else of.is_barred | (of.num_bytes > 0)
    quotient.stays = [flag or quotient.num_beside(at) < min_beside for at, flag in enumerate(stays.tolist())]
    return quotient


class _Quotient:
    """Groups that are being joined. A joined group has the number of its leader, and with it the leader's
    place in the topological order."""

    def __init__(
        self,
        work: Sequence[float],
        tensors: Mapping[tuple[int, ...], float],
        edges: Iterable[tuple[int, int]],
        cpu_time: Sequence[float] | None = None,
        num_cpus: int = 0,
    ) -> None:
        count = len(work)
        self.leader = list(range(count))
        self.work = list(work)
        self.cpu_time = [0.0] * count if cpu_time is None else list(cpu_time)
        self.own_cpu_time = list(self.cpu_time)
        self.together = sum if num_cpus == 1 else max  # with several CPUs each leader may be on another one
        self.stays = [False] * count
        self.tensors: list[dict[tuple[int, ...], float]] = [{} for _ in range(count)]
        for ends, cost in tensors.items():
            for end in ends:
                self.tensors[end][ends] = cost
        self.before: list[set[int]] = [set() for _ in range(count)]
        self.after: list[set[int]] = [set() for _ in range(count)]
        for u, v in edges:
            self.before[v].add(u)
            self.after[u].add(v)
        # Bit sets over the original groups, which joining does not change.
        self.ancestors, self.descendants = [0] * count, [0] * count
        for at in range(count):
            for u in self.before[at]:
                self.ancestors[at] |= self.ancestors[u] | 1 << u
        for at in reversed(range(count)):
            for v in self.after[at]:
                self.descendants[at] |= self.descendants[v] | 1 << v

    def leaders(self) -> list[int]:
        """Returns the final leader of each group; a leader may have been joined to another one later."""
        found = list(self.leader)
        for at in range(len(found)):
            while found[found[at]] != found[at]:
                found[at] = found[found[at]]
        return found

    def num_beside(self, at: int) -> int:
        """Returns how many groups come neither before nor after this one."""
        return len(self.work) - 1 - self.ancestors[at].bit_count() - self.descendants[at].bit_count()

    def join_pairs(self, *, free_of_cpu: bool = False) -> None:
        waiting = dict.fromkeys(range(len(self.leader)))
        while waiting:
            at, _ = waiting.popitem()
            if self.leader[at] != at or (free_of_cpu and self.cpu_time[at] > 0):
                continue
            for other in sorted(self.before[at] | self.after[at]):
                if not self.stays[at] and self._is_led(at, other):
                    is_mutual = not self.stays[other] and self._is_led(other, at)
                    leaders = [other, at] if is_mutual else [other]
                    waiting |= dict.fromkeys(self._join(other, {at}, leaders))
                    break

    def _is_led(self, at: int, by: int) -> bool:
        """Returns whether the two have no larger load than `by` alone, and the order allows to join them."""
        saved = self.tensors[at].get((min(at, by), max(at, by)), 0.0)
        added = sum(cost for ends, cost in self.tensors[at].items() if by not in ends)
        return self.work[at] + added <= saved and not self._is_misplaced(at, {at, by}, by)

    def _is_misplaced(self, at: int, together: set[int], of: int) -> bool:
        """Returns whether a neighbour of `at` outside of `together` may be on the wrong side of `of`."""
        before, after = self.before[at] - together, self.after[at] - together
        return not all(self.ancestors[of] >> node & 1 for node in before) or not all(
            self.descendants[of] >> node & 1 for node in after
        )

    def join_neighbourhoods(self, deadline: Deadline) -> None:
        waiting = dict.fromkeys(at for at, leader in enumerate(self.leader) if leader == at)
        while waiting and deadline.left_s > 0:
            at, _ = waiting.popitem()
            if self.leader[at] != at:
                continue
            together = self._joinable_to(at)
            if len(together) > 1:
                leaders = [at, *(other for other in sorted(together - {at}) if self._leads(other, together))]
                waiting |= dict.fromkeys(self._join(at, together - {at}, leaders))

    def _joinable_to(self, at: int) -> set[int]:
        """Returns the largest set with the least load around a group, as far as the order allows it."""
        near = self._neighbourhood(at)
        while len(near) > 1:
            together = self._least_around(at, near)
            misplaced = {other for other in together - {at} if self._is_misplaced(other, together, at)}
            if not misplaced:
                return together
            near -= misplaced
        return near

    def _leads(self, at: int, together: set[int]) -> bool:
        """Returns whether this one of the set could be its leader as well."""
        if any(self.stays[other] or self._is_misplaced(other, together, at) for other in together):
            return False
        return self._least_around(at, together) == together

    def _neighbourhood(self, at: int) -> set[int]:
        """Returns the groups within `_RADIUS` edges that may be joined to this one, itself included."""
        ball, rim = {at}, {at}
        for _ in range(_RADIUS):
            rim = {other for node in rim for other in self.before[node] | self.after[node]} - ball
            if len(ball) + len(rim) > _BALL:
                break
            ball |= rim
        return {other for other in ball if other == at or not self.stays[other]}

    def _least_around(self, at: int, inside: set[int]) -> set[int]:
        """Returns the largest set with the least load around a group, out of the groups `inside`."""
        paid = sum(self.tensors[at].values())
        if all(self.work[other] > paid for other in inside - {at}):
            return {at}  # no other is worth its work: it can save at most `paid`
        tensors = {ends: cost for node in inside for ends, cost in self.tensors[node].items()}
        seen = (
            (tuple(sorted({end if end in inside else _ELSEWHERE for end in ends})), cost)
            for ends, cost in tensors.items()
        )
        _, held = LoadNetwork({node: self.work[node] for node in inside}, seen).least({at}, {_ELSEWHERE})
        return held

    def _join(self, leader: int, joining: set[int], leaders: Sequence[int]) -> Iterator[int]:
        """Joins groups to their leader, and yields the groups that can perhaps be joined after that.

        A CPU is asked for the time of `leaders`, all groups that could lead the set: if one of them is not on
        the CPU, the set may be joined to that one instead.
        """
        self.own_cpu_time[leader] = self.together([self.own_cpu_time[at] for at in leaders])
        for at in joining:
            self.leader[at] = leader
            self.work[leader] += self.work[at]
            self.cpu_time[leader] += self.cpu_time[at]
            self.stays[leader] |= self.stays[at]
            self._hand_over(at, leader)
            for ends, cost in list(self.tensors[at].items()):
                self._change_ends(ends, cost, tuple(sorted({*ends, leader} - {at})))
        yield leader
        yield from self.before[leader] | self.after[leader]
        yield from {end for ends in self.tensors[leader] for end in ends}

    def _hand_over(self, at: int, leader: int) -> None:
        for one, other in ((self.before, self.after), (self.after, self.before)):
            for neighbour in one[at]:
                other[neighbour].discard(at)
                if neighbour != leader:
                    other[neighbour].add(leader)
                    one[leader].add(neighbour)
            one[at] = set()

    def _change_ends(self, ends: Sequence[int], cost: float, changed: tuple[int, ...]) -> None:
        for end in ends:
            del self.tensors[end][tuple(ends)]
        for end in changed if len(changed) > 1 else ():
            self.tensors[end][changed] = cost + self.tensors[end].get(changed, 0.0)
