"""Plans published workloads: the contiguous max-load problem, as instances for the search.

An accelerator's load is the time of its nodes, plus the cost of each tensor that crosses its border, once. A
CPU's load is the time of its nodes alone. The forward graph has to be contiguous, and nodes of one colour
stay together. Devices are the stages of a pipeline: what they hold is a chain of down-sets, as the paper's
dynamic program has it. Two sets that no path leaves and comes back to, and that feed each other, are none.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from pd2bw_fx.arguments import require_search
from pd2bw_fx.errors import InputError, SolverError
from pd2bw_fx.passes.solver import Status, check_solver
from pd2bw_fx.plan import Progress
from pd2bw_fx.units import counted
from pd2bw_fx.workload import Workload

from .bounds.dominance import join_dominated, join_dominated_pairs
from .bounds.downsets import DeviceKind, DownSets, OutOfTime, has_few_down_sets
from .bounds.side_branches import join_side_branches, moved_ahead
from .choices import Answer, Choices, Deadline
from .groups import Groups, RelaxedGroups, Totals, groups_of, tensors_between, totals
from .infeasibility.placing import does_not_fit
from .instance import Instance, Net, evaluate
from .search.search import Enumeration, search

_FEW_DOWN_SETS = 10_000  # these are enumerated in about a second
_MAX_DOWN_SETS = 400_000  # more of them are not enumerated
_FEW_WITH_CPUS = 40_000  # groups are joined until no more are left, where there are CPUs
_MOST_ORDERS = 200_000  # of accelerators and CPUs
_EXPLAINING_S = 8.0  # at most, for what would be enough where the nodes do not fit
_ANY = 0.999  # a gap: any placement will do
_JOINING_SHARE = 0.25  # of the time limit, for joining groups
# Of a device's work: side branches of up to so much are left out, the fewest that leave few down-sets.
_SHARES_LEFT_OUT = (0.02, 0.05, 0.1, 0.15)
# Joined first are groups with this share of all others beside them, then those with fewer.
_SHARES_BESIDE = (1 / 4, 1 / 6, 1 / 8, 1 / 10, 1 / 12, 1 / 16, 1 / 32, 1 / 64, 0)


@dataclass(frozen=True, slots=True)
class Placement:
    """A placement: the device of every node, by id: "acc0", "acc1", ... in pipeline order, and "cpu0", ...

    No placement has an `objective` below `bound`. Times are in the workload's own unit. `loads` has the load
    of every device, in pipeline order, also of one that has no node.
    """

    objective: float
    bound: float
    assignment: Mapping[int, str]
    planning_s: float
    solver: str
    loads: Mapping[str, float]

    @property
    def gap(self) -> float:
        return max(0.0, 1.0 - self.bound / self.objective) if self.objective > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "objective": self.objective,
            "bound": self.bound,
            "gap": self.gap,
            "loads": dict(self.loads),
            "assignment": {str(node): device for node, device in sorted(self.assignment.items())},
            "planning_s": self.planning_s,
            "solver": self.solver,
        }

    def __str__(self) -> str:
        sizes = Counter(self.assignment.values())
        lines = [f"objective {self.objective:.8g}, bound {self.bound:.8g}, gap {self.gap:.1e}"]
        lines += [
            f"  {device}: load {load:.8g}, {counted(sizes[device], 'node')}"
            for device, load in self.loads.items()
        ]
        return "\n".join(lines)


def plan_workload(
    workload: Workload,
    *,
    accelerators_only: bool = False,
    solver: str = "highs",
    max_gap: float = 5e-6,
    time_limit_s: float = 60.0,
    progress: Callable[[Progress], None] | None = None,
) -> Placement:
    """Returns the contiguous placement whose largest load is least, proven to within `max_gap`.

    It is the best of all placements for which the devices have an order such that none reads from a later
    one. `progress` is called at every step, with times in the workload's own unit. Ctrl-C returns the best so
    far. Raises InputError where there is no device, InfeasibleError where the nodes do not fit on the
    accelerators, SolverError where time ran out before the first placement.
    """
    started_s = time.perf_counter()
    require_search(max_gap, time_limit_s)
    check_solver(solver)
    num_cpus = 0 if accelerators_only else workload.num_cpus
    if workload.num_accelerators + num_cpus == 0:
        raise InputError("the workload has no accelerators; plan it with its CPUs")
    deadline = Deadline(time_limit_s)
    groups = join_dominated_pairs(workload, groups_of(workload), with_cpus=num_cpus > 0)
    relaxed = None
    try:
        share = Deadline(deadline.left_s * _JOINING_SHARE)
        if num_cpus == 0 and not _has_few_down_sets(groups, _FEW_DOWN_SETS):
            # Without CPUs, which pay for no tensor, joining loses no optimum.
            groups = join_dominated(workload, groups, share).groups
        relaxed = _relaxed_groups(workload, groups, share, with_cpus=num_cpus > 0)
    except KeyboardInterrupt:
        deadline = Deadline(0.0)  # the search stops at a first placement
    most = len(groups.members)  # devices of a kind that can have a node
    orders = _device_orders(min(workload.num_accelerators, most), min(num_cpus, most))
    choices = _choices(workload, groups, orders)
    of_groups = _Enumeration(choices, orders)
    enumerations: list[Enumeration] = [of_groups]
    if relaxed is not None:
        of_relaxed = _Enumeration(_choices(workload, relaxed.groups, orders, relaxed.asked), orders)
        together = [relaxed.groups.of[members[0]] for members in groups.members]
        enumerations.insert(0, _RelaxedEnumeration(of_relaxed, together, relaxed.trees, choices))
    found = search(
        choices,
        solver=solver,
        max_gap=max_gap,
        deadline=deadline,
        report=progress,
        enumerations=enumerations,
        kinds=of_groups.kinds(),
    )
    if found is None:
        explaining = Deadline(_EXPLAINING_S, within=deadline)
        raise does_not_fit(
            workload, groups_of(workload), partial(_fullest, solver=solver, deadline=explaining)
        )
    names = _device_names(orders[found.choice])
    loads = evaluate(choices[found.choice], found.stage_of).load_s
    return Placement(
        objective=found.bottleneck_s,
        bound=found.bound_s,
        assignment={
            node: names[int(found.stage_of[at])] for at, group in enumerate(groups.members) for node in group
        },
        planning_s=time.perf_counter() - started_s,
        solver=solver,
        loads=dict(zip(names, loads.tolist(), strict=True)),
    )


def _fullest(workload: Workload, *, solver: str, deadline: Deadline) -> float | None:
    """Returns the bytes on the fullest accelerator of any placement without CPUs. It is None where there is
    none, or none was found in half of the time that is left."""
    groups = groups_of(workload)
    most = min(workload.num_accelerators, len(groups.members))
    choices = _choices(workload, groups, _device_orders(most, 0))
    within = Deadline(deadline.left_s / 2, within=deadline)
    try:
        found = search(choices, solver=solver, max_gap=_ANY, deadline=within)
    except SolverError:
        return None
    return None if found is None else float(evaluate(choices[0], found.stage_of).memory_bytes.max())


def _relaxed_groups(
    workload: Workload, groups: Groups, deadline: Deadline, *, with_cpus: bool
) -> RelaxedGroups | None:
    """Returns joined groups with few down-sets, where the groups have many, or None where none were found."""
    if _has_few_down_sets(groups, _FEW_DOWN_SETS):
        return None
    for most in _SHARES_LEFT_OUT:
        trunk = join_side_branches(workload, groups, most_of_a_device=most)
        if _has_few_down_sets(trunk.groups, _FEW_DOWN_SETS):
            return trunk
    return _fewest_joined(workload, groups, deadline) if with_cpus else None


def _has_few_down_sets(groups: Groups, few: int) -> bool:
    return has_few_down_sets(len(groups.members), groups.edges, few)


def _fewest_joined(workload: Workload, groups: Groups, deadline: Deadline) -> RelaxedGroups:
    """Joins no more groups than it takes to leave few down-sets: each joined group asks less of a CPU."""
    for share in _SHARES_BESIDE:
        joined = join_dominated(workload, groups, deadline, min_beside=int(share * len(groups.members)))
        if _has_few_down_sets(joined.groups, _FEW_WITH_CPUS) or deadline.left_s == 0:
            break
    return joined


class _Enumeration:
    """Answers by enumerating the down-sets of a workload, which are made at the first question."""

    def __init__(self, choices: Choices, orders: Sequence[tuple[bool, ...]]) -> None:
        self._choices = choices
        self._orders = orders
        self._down_sets: DownSets | None = None
        self._tried = 0  # a limit that the number of down-sets exceeds

    def is_short(self) -> bool:
        return self._make(_FEW_DOWN_SETS) is not None

    def _make(self, max_sets: int, deadline: Deadline | None = None) -> DownSets | None:
        if self._down_sets is None and self._tried < max_sets:
            self._down_sets = DownSets.of(self.kinds(), max_sets=max_sets, deadline=deadline)
            self._tried = max_sets
        return self._down_sets

    def __call__(self, target_s: float, deadline: Deadline) -> Answer:
        if not np.isfinite(target_s):
            return Answer(Status.UNKNOWN)
        try:
            down_sets = self._make(_MAX_DOWN_SETS, deadline)
            if down_sets is None:
                return Answer(Status.UNKNOWN)
            self._down_sets = down_sets = down_sets.within_reach(target_s)
            chain = down_sets.chain_within(target_s, deadline)
        except OutOfTime:
            return Answer(Status.UNKNOWN)
        if chain is None:
            return Answer(Status.INFEASIBLE)
        is_cpu = [self._is_cpu[kind] for kind in chain.kinds]
        order = self._orders[0]
        left = [flag for flag in (False, True) for _ in range(order.count(flag) - is_cpu.count(flag))]
        return Answer(Status.FEASIBLE, self._orders.index((*is_cpu, *left)), chain.stage_of)

    @property
    def _is_cpu(self) -> list[bool]:
        """For each kind of device, whether it is CPUs; accelerators come first, where there are any."""
        return sorted(set(self._orders[0]))

    def kinds(self) -> list[DeviceKind]:
        instance, order = self._choices[0], self._orders[0]
        return [DeviceKind(instance, order.index(flag), order.count(flag)) for flag in self._is_cpu]


class _RelaxedEnumeration:
    """Answers for a target by enumerating the down-sets of relaxed groups, whose devices have less to do.

    An assignment that it finds is evaluated by the real rules, with `trees` moved to earlier devices where
    that helps. `together` has the joined group of each group.
    """

    def __init__(
        self,
        relaxed: _Enumeration,
        together: Sequence[int],
        trees: Sequence[tuple[int, ...]],
        choices: Choices,
    ) -> None:
        self._relaxed = relaxed
        self._together = list(together)
        self._trees = trees
        self._choices = choices

    def is_short(self) -> bool:
        return self._relaxed.is_short()

    def __call__(self, target_s: float, deadline: Deadline) -> Answer:
        status, choice, found, _ = self._relaxed(target_s, deadline)
        if found is None:
            return Answer(status, choice)
        instance = self._choices[choice]
        stage_of = moved_ahead(instance, found[self._together], self._trees, target_s)
        loads = evaluate(instance, stage_of)
        is_real = loads.fits and loads.bottleneck_s <= target_s
        return Answer(status if is_real else Status.UNKNOWN, choice, stage_of)


def _device_orders(num_accelerators: int, num_cpus: int) -> list[tuple[bool, ...]]:
    """Returns every order of the devices, with True for a CPU. Raises InputError if there are too many."""
    count = math.comb(num_accelerators + num_cpus, num_cpus)
    if count > _MOST_ORDERS:
        raise InputError(
            f"{num_accelerators} accelerators and {num_cpus} CPUs can stand in {count:,} orders; "
            f"at most {_MOST_ORDERS:,} are looked at: plan for fewer of the kind that there is more of"
        )
    stages = range(num_accelerators + num_cpus)
    return [
        tuple(stage not in accelerators for stage in stages)
        for accelerators in map(set, itertools.combinations(stages, num_accelerators))
    ]


def _device_names(order: tuple[bool, ...]) -> list[str]:
    names = []
    for stage, is_cpu in enumerate(order):
        number = sum(1 for other in order[:stage] if other == is_cpu)
        names.append(f"{'cpu' if is_cpu else 'acc'}{number}")
    return names


def _choices(
    workload: Workload,
    groups: Groups,
    orders: Sequence[tuple[bool, ...]],
    asked: Totals | None = None,
) -> Choices:
    """Makes an instance for each device order. `asked` replaces the sums over each group."""
    tensors = tensors_between(workload, groups)
    nets = tuple(Net(ends[0], ends[1:]) for ends in tensors)
    of = totals(workload, groups) if asked is None else asked

    def of_order(choice: int) -> Instance:
        return _instance(workload, groups, nets, list(tensors.values()), orders[choice], of)

    return Choices(len(orders), of_order, work_s=of_order(0).work_s)


def _instance(
    workload: Workload,
    groups: Groups,
    nets: tuple[Net, ...],
    costs: Sequence[float],
    order: tuple[bool, ...],
    of: Totals,
) -> Instance:
    n, k = len(groups.members), len(order)
    is_cpu = np.array(order)
    cost_s = np.zeros((len(nets), k, k))
    cost_s += np.array(costs)[:, None, None] * ~is_cpu[None, :, None]
    return Instance(
        num_stages=k,
        edges=groups.edges,
        work_s=np.where(is_cpu[:, None], of.cpu_time[None, :], of.accelerator_time[None, :]),
        again_s=np.zeros((k, n)),
        nets=nets,
        cost_s=cost_s,
        per_destination=False,
        overlap=False,
        recompute=False,
        may_be_empty=True,
        limit_bytes=np.where(is_cpu, np.inf, workload.accelerator_bytes),
        in_flight=np.ones(k, dtype=np.int64),
        static_bytes=np.broadcast_to(of.num_bytes, (k, n)),
        gradient_bytes=np.zeros(n),
        gradients_wait=np.zeros(k, dtype=bool),
        updates_each=np.zeros(k, dtype=bool),
        flushes=np.zeros(k, dtype=bool),
        saved_bytes=np.zeros(n),
        workspace_bytes=np.zeros(n),
        stepped_bytes=np.zeros(n),
        forbidden=~is_cpu[:, None] & of.is_barred[None, :],
    )
