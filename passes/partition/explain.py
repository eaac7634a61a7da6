"""Why a plan is as it is, by solving again with one thing changed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from pd2bw_fx.arguments import require_search
from pd2bw_fx.cluster import Cluster
from pd2bw_fx.constraints import Constraints
from pd2bw_fx.costs import Kept, MemoryModel
from pd2bw_fx.errors import InfeasibleError, InputError, PlanMismatchError, SolverError
from pd2bw_fx.explanation import Change, Cut, Explanation, Slack, in_module
from pd2bw_fx.plan import Plan, StagePlan
from pd2bw_fx.problem import Problem
from pd2bw_fx.units import format_bytes, format_seconds

from .choices import Choices, Deadline
from .constrain import constrain, devices_meant
from .gradient_sums import GradientSums
from .instance import Flags, Instance, Integers, Loads, evaluate
from .memory_kept import METHODS
from .plan_problem import partition
from .reader import Reader, check_problem, topological_order
from .replicas import KeepingCopies, partition_replicated, stashing, with_replicas
from .request import Keeping, and_another, one_device_more
from .route import routed
from .search.search import search
from .search.search_with_routes import search_with_routes

GIB = 2**30
_LINKS_TRIED = 3
_LEAST_TIME_S = 1e-3  # enough for a first plan where nothing has to be searched for
_LEAST_GAIN = 2e-3
_ROUNDING = 1e-6


def explain(
    plan: Plan,
    problem: Problem,
    cluster: Cluster,
    *,
    memory_model: MemoryModel = MemoryModel(),  # noqa: B008 - frozen
    overlap: bool = False,
    recompute: bool | Literal["auto"] = False,
    constraints: Constraints | None = None,
    kept: Keeping | KeepingCopies | None = None,
    solver: str = "highs",
    max_gap: float = 1e-3,
    time_limit_s: float = 60.0,
) -> Explanation:
    """Explains a plan: each cut and the next best one, how much of time and memory is used, and what would
    help.

    Problem, cluster and the other arguments are those that the plan was made with. Half of the time is for
    the cuts, half for the changes; each next best and each change is a plan of its own, solved to `max_gap`.
    For a method that `partition` does not know, `kept` says what it keeps, as for `partition` or, for stages
    with copies, `partition_replicated`. Without it no other number of stages is tried.

    Raises PlanMismatchError where the plan was made for another problem, InputError for a gap or a time that
    no search can stop at.
    """
    require_search(max_gap, time_limit_s)
    check_problem(problem, cluster)
    wishes = constraints or Constraints()
    constrained = constrain(problem, cluster, wishes, num_stages=plan.num_stages)
    reader = Reader(
        constrained.problem,
        constrained.cluster,
        memory_model=memory_model,
        kept=[stage.kept for stage in plan.stages],
        overlap=overlap,
        recompute=recompute,
        pins=constrained.pins,
    )
    instance = reader.instance([stage.device for stage in plan.stages])
    if plan.replicas is not None:
        sums = GradientSums.of(constrained.problem, cluster)
        instance = with_replicas(instance, plan.replicas, sums, plan.microbatches_per_update)
    blocks = [constrained.problem.blocks[at] for at in topological_order(constrained.problem)]
    stage_of = _assignment(plan, [block.operators for block in blocks])
    _require_its_price(plan, _loads(plan, instance, stage_of), overlap=overlap)
    names = [block.name for block in blocks]
    deadline = Deadline(time_limit_s)
    cuts = _Cuts(instance, stage_of, names, plan, solver=solver, max_gap=max_gap)
    per_cut_s = time_limit_s / 2 / max(1, plan.num_stages - 1)
    options: dict[str, Any] = {
        "microbatches_per_update": plan.microbatches_per_update,
        "memory_model": memory_model,
        "method": plan.method,
        "solver": solver,
        "max_gap": max_gap,
        "recompute": recompute,
        "constraints": wishes,
    }
    if plan.replicas is not None:
        what_ifs = list(_what_ifs_of_copies(plan, problem, cluster, options | {"kept": kept or stashing}))
    else:
        options |= {"num_stages": plan.num_stages, "overlap": overlap}
        if kept is not None or plan.method not in METHODS:
            options["kept"] = kept or _as_planned(plan)
        what_ifs = list(_what_ifs(plan, problem, cluster, options))
    per_change_s = time_limit_s / 2 / max(1, len(what_ifs))
    changes = [_tried(what_if, Deadline(per_change_s, within=deadline)) for what_if in what_ifs]
    helpful = [c for c in changes if c and c.bottleneck_s < plan.bottleneck_s * (1 - _LEAST_GAIN)]
    return Explanation(
        bottleneck_s=plan.bottleneck_s,
        bound_s=plan.bound_s,
        cuts=tuple(
            cuts.explained(stage, Deadline(per_cut_s, within=deadline))
            for stage in range(plan.num_stages - 1)
        ),
        slacks=tuple(_slacks(plan, instance, stage_of)),
        changes=tuple(sorted(helpful, key=lambda change: change.bottleneck_s)),
        module_of=problem.module_of,
    )


def _as_planned(plan: Plan) -> Keeping:
    def kept(num_stages: int) -> Sequence[Kept]:
        if num_stages != plan.num_stages:
            raise InputError(f"what {plan.method} keeps at each of {num_stages} stages is not known here")
        return [stage.kept for stage in plan.stages]

    return kept


def _assignment(plan: Plan, operators: Sequence[Sequence[str]]) -> Integers:
    planned = plan.stage_of
    stages = []
    for names in operators:
        missing = [name for name in names if name not in planned]
        if missing:
            raise PlanMismatchError(
                f"the plan does not place operator {missing[0]!r}; plan this problem again"
            )
        stages.append(planned[names[0]])
    return np.array(stages, dtype=np.int64)


def _require_its_price(plan: Plan, loads: Loads, *, overlap: bool) -> None:
    """Refuses a plan that these costs price otherwise: it was made with other arguments."""
    if not math.isclose(loads.bottleneck_s, plan.bottleneck_s, rel_tol=_ROUNDING, abs_tol=1e-15):
        raise PlanMismatchError(
            f"the plan's slowest stage takes {format_seconds(plan.bottleneck_s)}, and with these costs, "
            f"this cluster and overlap={overlap} {format_seconds(loads.bottleneck_s)}; explain a plan with "
            "what it was made with (ddp on unlike devices is timed as its slowest copy, and is not explained)"
        )


class _Cuts:
    """Finds the best plan that is cut elsewhere at one boundary, with the same device for each stage."""

    def __init__(
        self,
        instance: Instance,
        stage_of: Integers,
        names: Sequence[str],
        plan: Plan,
        *,
        solver: str,
        max_gap: float,
    ) -> None:
        self.instance = instance
        self.stage_of = stage_of
        self.names = names
        self.plan = plan
        self.solver = solver
        self.max_gap = max_gap

    def explained(self, stage: int, deadline: Deadline) -> Cut:
        crossing = tuple(t for t in self.plan.transfers if t.source <= stage < t.target)
        if deadline.is_stopped:
            return Cut(stage, crossing, None)
        moves = list(self._moves(stage))
        choices = Choices(len(moves), lambda choice: self._with(*moves[choice]))
        # Stages with copies send all values straight, in this plan and in those that it is compared with.
        look = search if self.plan.replicas else search_with_routes
        try:
            found = look(choices, solver=self.solver, max_gap=self.max_gap, deadline=deadline)
        except SolverError:
            found = None  # In a Cut, None also says that there was no time to find another one.
        if found is None:
            return Cut(stage, crossing, None)
        later = (self.stage_of <= stage) & (found.stage_of > stage)
        earlier = (self.stage_of > stage) & (found.stage_of <= stage)
        return Cut(
            stage,
            crossing,
            found.bottleneck_s,
            moved_later=tuple(self.names[v] for v in np.flatnonzero(later).tolist()),
            moved_earlier=tuple(self.names[v] for v in np.flatnonzero(earlier).tolist()),
        )

    def _moves(self, stage: int) -> Iterator[tuple[int, Flags]]:
        """Yields moves as (node, stages that are closed to it), one of which is part of every other cut.

        Another cut has a last node of this side beyond the boundary, or a first node of the other side before
        it.
        """
        early = self.stage_of <= stage
        followed = {u for u, v in self.instance.edges if early[u] and early[v]}
        preceded = {v for u, v in self.instance.edges if not early[u] and not early[v]}
        stages = np.arange(self.instance.num_stages)
        for node in range(self.instance.num_nodes):
            if early[node] and node not in followed:
                yield node, stages <= stage
            elif not early[node] and node not in preceded:
                yield node, stages > stage

    def _with(self, node: int, closed: Flags) -> Instance:
        before = self.instance.forbidden
        shape = (self.instance.num_stages, self.instance.num_nodes)
        forbidden = np.zeros(shape, dtype=bool) if before is None else before.copy()
        forbidden[closed, node] = True
        return replace(self.instance, forbidden=forbidden)


def _slacks(plan: Plan, instance: Instance, stage_of: Integers) -> Iterator[Slack]:
    loads = _loads(plan, instance, stage_of)
    kept = _loads(plan, replace(instance, recompute=False), stage_of)
    for stage in plan.stages:
        at = stage.stage
        work_s = float(loads.work_s[at] + loads.again_s[at])
        links_s = float(loads.send_s[at] + loads.receive_s[at])
        parts = f"work {format_seconds(work_s - stage.gradient_sum_s)}, links {format_seconds(links_s)}"
        if stage.gradient_sum_s:
            parts += f", adding up gradients {format_seconds(stage.gradient_sum_s)}"
        what = f"time of stage {at} on {stage.place} ({parts})"
        yield Slack(what, float(loads.load_s[at]), plan.bottleneck_s, "s")
        limit = float(instance.limit_bytes[at])
        yield Slack(f"memory of {_each(stage)}", float(loads.memory_bytes[at]), limit, "bytes")
        if instance.recompute == "auto" and stage.recompute:
            what = f"memory of {_each(stage)} if nothing is recomputed"
            yield Slack(what, float(kept.memory_bytes[at]), limit, "bytes")


def _loads(plan: Plan, instance: Instance, stage_of: Integers) -> Loads:
    return evaluate(instance, stage_of) if plan.replicas else routed(instance, stage_of)[1]


def _each(stage: StagePlan) -> str:
    return stage.place if stage.replicas == 1 else f"each of {stage.place}"


@dataclass(frozen=True, slots=True)
class _WhatIf:
    """A change to the request, to be planned."""

    what: str
    problem: Problem
    cluster: Cluster
    options: dict[str, Any]
    planner: Callable[..., Plan] = partition


def _tried(what_if: _WhatIf, deadline: Deadline) -> Change | None:
    try:
        if deadline.is_stopped:
            return None
        options = what_if.options | {"time_limit_s": max(deadline.left_s, _LEAST_TIME_S), "within": deadline}
        plan = what_if.planner(what_if.problem, what_if.cluster, **options)
    except (InfeasibleError, InputError, SolverError):
        return None  # it does not help, the method cannot have it, or there was no time to find out
    return Change(what_if.what, plan.bottleneck_s, plan.bound_s)


def _what_ifs(plan: Plan, problem: Problem, cluster: Cluster, options: dict[str, Any]) -> Iterator[_WhatIf]:
    if options["recompute"] is False:
        yield _WhatIf('recompute="auto"', problem, cluster, options | {"recompute": "auto"})
    if options["recompute"] is True:
        yield _WhatIf('recompute="auto" in place of True', problem, cluster, options | {"recompute": "auto"})
    capped = {at for given in options["constraints"].memory_bytes for at in devices_meant(cluster, given)}
    for stage in plan.stages:
        if stage.device in capped:
            continue  # the user's own cap would hide the change
        more = _with_memory(cluster, stage.device, GIB)
        name = f"{format_bytes(GIB)} more on {stage.device_name}"
        yield _WhatIf(name, problem, more, options)
    yield from _faster_links(plan, problem, cluster, options)
    if len(plan.stages) < len(cluster):
        more_stages = options | {"num_stages": plan.num_stages + 1} | _microbatches(plan)
        yield _WhatIf("one stage more, on a device that is free", problem, cluster, more_stages)
    else:
        copied = plan.stages[-1].device
        more_stages = options | {"num_stages": plan.num_stages + 1} | _microbatches(plan)
        what = f"one stage more, on a further device like {plan.stages[-1].device_name}"
        another = and_another(cluster, copied, f"another {plan.stages[-1].device_name}")
        yield _WhatIf(what, one_device_more(problem, copied), another, more_stages)
    if plan.num_stages > 1:
        fewer = options | {"num_stages": plan.num_stages - 1}
        yield _WhatIf("one stage less", problem, cluster, fewer)
    largest = max(problem.blocks, key=lambda block: block.forward_s[0] + block.backward_s[0])
    halved = replace(
        largest,
        forward_s=tuple(seconds / 2 for seconds in largest.forward_s),
        backward_s=tuple(seconds / 2 for seconds in largest.backward_s),
    )
    blocks = tuple(halved if block is largest else block for block in problem.blocks)
    what = f"{in_module(largest.name, problem.module_of)} twice as fast"
    yield _WhatIf(what, replace(problem, blocks=blocks), cluster, options)


def _what_ifs_of_copies(
    plan: Plan, problem: Problem, cluster: Cluster, options: dict[str, Any]
) -> Iterator[_WhatIf]:
    """Yields changes for a plan whose stages have copies.

    Devices stay alike, so a change is made to all of them. Where other numbers of copies are tried, an update
    has the fewest microbatches that they can share equally.
    """

    def what_if(what: str, on: Cluster, of: Problem = problem, **changed: Any) -> _WhatIf:
        same = options | {"replicas": plan.replicas}
        return _WhatIf(what, of, on, same | changed, planner=partition_replicated)

    otherwise: dict[str, Any] = {"replicas": None, "microbatches_per_update": None}
    yield what_if("the devices shared out otherwise", cluster, **otherwise)
    if options["recompute"] != "auto":
        yield what_if('recompute="auto"', cluster, recompute="auto")
    devices = [replace(device, memory_bytes=device.memory_bytes + GIB) for device in cluster.devices]
    yield what_if(f"{format_bytes(GIB)} more on every device", replace(cluster, devices=tuple(devices)))
    yield what_if(
        "all links twice as fast",
        replace(
            cluster,
            bytes_per_s=tuple(tuple(2 * rate for rate in row) for row in cluster.bytes_per_s),
            latency_s=tuple(tuple(delay / 2 for delay in row) for row in cluster.latency_s),
        ),
    )
    last = len(cluster) - 1
    another = and_another(cluster, last, f"another {cluster.devices[last].name}")
    yield what_if("one device more", another, one_device_more(problem, last), **otherwise)


def _microbatches(plan: Plan) -> dict[str, int]:
    """Returns options for one stage more, where 2BW needs as many microbatches as stages."""
    return {"microbatches_per_update": max(plan.microbatches_per_update, plan.num_stages + 1)}


def _faster_links(
    plan: Plan, problem: Problem, cluster: Cluster, options: dict[str, Any]
) -> Iterator[_WhatIf]:
    """Yields faster links: those that carry most in this plan."""
    seconds: dict[tuple[int, int], float] = {}
    for transfer in plan.transfers:
        pair = plan.stages[transfer.source].device, plan.stages[transfer.target].device
        seconds[pair] = seconds.get(pair, 0.0) + transfer.seconds
    for a, b in sorted(seconds, key=lambda pair: -seconds[pair])[:_LINKS_TRIED]:
        rates = [list(row) for row in cluster.bytes_per_s]
        delays = [list(row) for row in cluster.latency_s]
        for source, target in ((a, b), (b, a)):
            rates[source][target] *= 2
            delays[source][target] /= 2
        faster = replace(cluster, bytes_per_s=tuple(map(tuple, rates)), latency_s=tuple(map(tuple, delays)))
        what = f"the link of {cluster.devices[a].name} and {cluster.devices[b].name} twice as fast"
        yield _WhatIf(what, problem, faster, options)


def _with_memory(cluster: Cluster, device: int, more_bytes: int) -> Cluster:
    devices = list(cluster.devices)
    devices[device] = replace(devices[device], memory_bytes=devices[device].memory_bytes + more_bytes)
    return replace(cluster, devices=tuple(devices))
