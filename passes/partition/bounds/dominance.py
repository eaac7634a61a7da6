"""Groups of a workload that may share a device with another one at no loss, so that they do.

    device a    k   v           k and v make what x alone reads: where they take less time than their
                 `. |           tensors, x with both is the least load around x, and b has less to do with
    device b       `x           them beside x, whatever else it has; a has less to do anyway

The load of a device is a sum over its nodes, and over the tensors that it has a part of and not the whole: a
submodular function f of its nodes, whose second part is symmetric. Let M be a set around x with the least
load of all sets around x in some neighbourhood. Then a device that has x has no more to do with all of M, and
another one no more without its nodes of M: f(X + M) <= f(X) and f(Y - M) <= f(Y) are inequalities of such
functions, for f is no less at X & M and at M - Y, which are sets around x. The order of devices allows the
move where what M reads of others comes before x, and what others read of M comes behind x. So M goes with x,
and then perhaps the whole of it with another one.

On a CPU, which pays for no tensor, that is not so: x may be on one, and M elsewhere. A CPU that is asked for
no more of the group than x's own time is a milder device than the real one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from pd2bw_fx.passes.partition.choices import Deadline
from pd2bw_fx.passes.partition.groups import Groups, RelaxedGroups, joined, tensors_between, totals
from pd2bw_fx.workload import Workload

from .load_network import LoadNetwork

_BALL = 40  # nodes of a neighbourhood
_RADIUS = 4
_ELSEWHERE = -1  # all nodes outside of it


def join_dominated_pairs(workload: Workload, groups: Groups, *, with_cpus: bool) -> Groups:
    """Groups joined to a neighbour where the two are a least load around that one: found in no time.

    Beside a CPU only what takes none of its time is joined.
    """
    quotient = _quotient(workload, groups)
    quotient.join_pairs(free_of_cpu=with_cpus)
    return joined(groups, quotient.leaders())


def join_dominated(
    workload: Workload, groups: Groups, deadline: Deadline, *, min_beside: int = 0
) -> RelaxedGroups:
    """Groups joined to whatever has the least load with them around it, as accelerators see it.

    A CPU is asked for the least that it may have of them.

    Only those that have `min_beside` others beside them, neither before nor behind; what is joined when the
    time is up is so at no loss.
    """
    quotient = _quotient(workload, groups, min_beside)
    quotient.join_pairs()
    quotient.join_neighbourhoods(deadline)
    leaders = quotient.leaders()
    company = joined(groups, leaders)
    own_cpu_time = np.array([quotient.own_cpu_time[at] for at in sorted(set(leaders))])
    return RelaxedGroups(company, replace(totals(workload, company), cpu_time=own_cpu_time))


def leaders_of(
    work: Sequence[float],
    tensors: Mapping[tuple[int, ...], float],
    edges: Iterable[tuple[int, int]],
    deadline: Deadline,
) -> list[int]:
    """Of nodes in a topological order, with what tensors cost by their ends: whom each goes with.

    Leaders lead themselves. For devices that are all alike, and whose memory is no concern.
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
    """Groups on their way to larger ones: each is in its place in the order of the one that leads it."""

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
        self.together = sum if num_cpus == 1 else max  # where each may be on another one
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
        # As bits: joining changes what comes before and behind nobody.
        self.ancestors, self.descendants = [0] * count, [0] * count
        for at in range(count):
            for u in self.before[at]:
                self.ancestors[at] |= self.ancestors[u] | 1 << u
        for at in reversed(range(count)):
            for v in self.after[at]:
                self.descendants[at] |= self.descendants[v] | 1 << v

    def leaders(self) -> list[int]:
        """Whom each goes with at last: who leads may have been joined to another one later."""
        found = list(self.leader)
        for at in range(len(found)):
            while found[found[at]] != found[at]:
                found[at] = found[found[at]]
        return found

    def num_beside(self, at: int) -> int:
        """How many come neither before nor behind."""
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
        """Whether the two have no larger load than `by` alone, and the order allows them to be one."""
        saved = self.tensors[at].get((min(at, by), max(at, by)), 0.0)
        added = sum(cost for ends, cost in self.tensors[at].items() if by not in ends)
        return self.work[at] + added <= saved and not self._is_misplaced(at, {at, by}, by)

    def _is_misplaced(self, at: int, company: set[int], of: int) -> bool:
        """Whether a neighbour of `at` outside the company may be on the wrong side of its leader."""
        before, after = self.before[at] - company, self.after[at] - company
        return not all(self.ancestors[of] >> node & 1 for node in before) or not all(
            self.descendants[of] >> node & 1 for node in after
        )

    def join_neighbourhoods(self, deadline: Deadline) -> None:
        waiting = dict.fromkeys(at for at, leader in enumerate(self.leader) if leader == at)
        while waiting and deadline.left_s > 0:
            at, _ = waiting.popitem()
            if self.leader[at] != at:
                continue
            company = self._company(at)
            if len(company) > 1:
                leaders = [at, *(other for other in sorted(company - {at}) if self._leads(other, company))]
                waiting |= dict.fromkeys(self._join(at, company - {at}, leaders))

    def _company(self, at: int) -> set[int]:
        """The largest set with the least load around a group, as far as the order allows it."""
        near = self._neighbourhood(at)
        while len(near) > 1:
            company = self._least_around(at, near)
            misplaced = {other for other in company - {at} if self._is_misplaced(other, company, at)}
            if not misplaced:
                return company
            near -= misplaced
        return near

    def _leads(self, at: int, company: set[int]) -> bool:
        """Whether the company may as well be that of this one of it."""
        if any(self.stays[other] or self._is_misplaced(other, company, at) for other in company):
            return False
        return self._least_around(at, company) == company

    def _neighbourhood(self, at: int) -> set[int]:
        """Groups near by that may move to this one."""
        ball, rim = {at}, {at}
        for _ in range(_RADIUS):
            rim = {other for node in rim for other in self.before[node] | self.after[node]} - ball
            if len(ball) + len(rim) > _BALL:
                break
            ball |= rim
        return {other for other in ball if other == at or not self.stays[other]}

    def _least_around(self, at: int, inside: set[int]) -> set[int]:
        """The largest set with the least load around a group, of those `inside`, of which it is one."""
        paid = sum(self.tensors[at].values())
        if all(self.work[other] > paid for other in inside - {at}):
            return {at}  # nothing that could be saved is worth any of them
        tensors = {ends: cost for node in inside for ends, cost in self.tensors[node].items()}
        seen = (
            (tuple(sorted({end if end in inside else _ELSEWHERE for end in ends})), cost)
            for ends, cost in tensors.items()
        )
        _, held = LoadNetwork({node: self.work[node] for node in inside}, seen).least({at}, {_ELSEWHERE})
        return held

    def _join(self, leader: int, company: set[int], leaders: Sequence[int]) -> Iterator[int]:
        """Joins the company to its leader, and gives those who may have company of their own by that.

        On a CPU is all that could lead the company, or the company goes with what is elsewhere.
        """
        self.own_cpu_time[leader] = self.together([self.own_cpu_time[at] for at in leaders])
        for at in company:
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
