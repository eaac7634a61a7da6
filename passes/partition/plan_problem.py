"""`partition`: checks its arguments, searches, and makes the plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

from pd2bw_fx.arguments import plain, require_choice, require_search, require_whole_number
from pd2bw_fx.cluster import Cluster
from pd2bw_fx.constraints import Constraints
from pd2bw_fx.costs import MemoryModel
from pd2bw_fx.errors import InputError
from pd2bw_fx.passes.solver import check_solver
from pd2bw_fx.plan import Plan, Progress
from pd2bw_fx.problem import Problem
from pd2bw_fx.units import counted

from .choices import Deadline, NoPlanInTime, SearchResult
from .constrain import constrain
from .infeasibility.infeasible import infeasible_error, no_plan_in_time
from .instance import Instance
from .memory_kept import METHODS, kept_by
from .planning import plan_of, proven_for
from .reader import check_problem
from .request import Keeping, SearchRequest
from .route import loads_of
from .search.search_with_routes import search_faster_with_routes, search_with_routes
from .thin_cuts import with_thin_cuts

_THINNER_SHARE, _THINNER_TIME_S = 0.1, 5.0  # of the time limit, and at most, for thinner cuts
_NEAREST_SHARE = 0.25  # of the time limit, in addition, for what is nearest where no plan was found


def partition(
    problem: Problem,
    cluster: Cluster,
    *,
    num_stages: int | None = None,
    microbatches_per_update: int | None = None,
    memory_model: MemoryModel = MemoryModel(),  # noqa: B008 - frozen
    method: str = "2bw",
    solver: str = "highs",
    max_gap: float = 1e-4,
    time_limit_s: float = 60.0,
    overlap: bool = False,
    recompute: bool | Literal["auto"] = False,
    constraints: Constraints | None = None,
    progress: Callable[[Progress], None] | None = None,
    kept: Keeping | None = None,
    order: Sequence[int] | None = None,
    within: Deadline | None = None,
    faster_than_s: float | None = None,
) -> Plan:
    """Returns the plan whose slowest stage is fastest, among those that fit in every device's memory.

    - `num_stages`: one for each device of the cluster unless given; with fewer, the best devices are chosen.
    - `microbatches_per_update`: twice the stages unless given; 2BW needs at least `num_stages`
      (arXiv 2006.09503, section 3.1).
    - `overlap`: if False, a stage's time is its work plus what it sends and receives. If True, links run
      beside the work, and the stage takes as long as the longer of the two.
    - `recompute`: True for every stage, False for none, "auto" where a stage does not fit without.
    - `constraints`: what is pinned, kept whole or capped; the plan is the best of those that satisfy them.
    - `max_gap`: the plan is proven to be within this share of the optimum (3e-6 at best, because solvers keep
      their rows to a millionth). If `time_limit_s` or Ctrl-C ends the search before that, the plan is the
      best so far, and `plan.gap` says what is proven.
    - `progress`: called at every step of the search.
    - `kept`: for a method that the planner does not know, a function from the number of stages to what the
      method keeps at each of them.
    - `order`: the device of each stage, where the method fixes it; otherwise every order is tried.
    - `within`: the deadline of a call that plans several times; Ctrl-C stops both.
    - `faster_than_s`: only a plan with a faster slowest stage is looked for, which takes far less time where
      there is none. NothingFaster is raised then.

    Raises InputError for a problem or an argument that makes no sense, InfeasibleError where no assignment
    fits in memory, SolverError where the solver is missing or time ran out before the first plan.
    """
    started_s = time.perf_counter()
    check_problem(problem, cluster)
    k = len(cluster) if num_stages is None else plain(num_stages)
    m = 2 * k if microbatches_per_update is None else plain(microbatches_per_update)
    _check_arguments(problem, cluster, k, m, method, kept, order, max_gap, time_limit_s, recompute)
    check_solver(solver)
    deadline = Deadline(time_limit_s, within=within)
    constrained = constrain(problem, cluster, constraints or Constraints(), num_stages=k)
    request = SearchRequest(
        constrained.problem,
        constrained.cluster,
        k,
        keeping=kept or (lambda num_stages: kept_by(method, num_stages, m)),
        pins=constrained.pins,
        memory_model=memory_model,
        overlap=overlap,
        recompute=recompute,
        order=None if order is None else tuple(order),
    )
    orders = request.orders()
    choices = request.choices(orders)
    given: dict[str, Any] = {"solver": solver, "max_gap": max_gap, "deadline": deadline, "report": progress}
    try:
        found = (
            search_with_routes(choices, **given)
            if faster_than_s is None
            else search_faster_with_routes(choices, faster_than_s, **given)
        )
    except NoPlanInTime:
        if deadline.is_stopped:
            raise
        has_more = within is not None and within.left_s > 0
        share = Deadline(_NEAREST_SHARE * time_limit_s, within=within if has_more else None)
        raise no_plan_in_time(request, choices, orders, solver=solver, deadline=share) from None
    if found is None:
        raise infeasible_error(request, choices, orders, solver=solver, within=within)
    instance = choices[found.choice]
    if order is None and not deadline.is_stopped:  # of an order's devices, some may have several stages
        found = _thinned(instance, found, Deadline(min(_THINNER_SHARE * time_limit_s, _THINNER_TIME_S)))
    plan = plan_of(
        request.problem,
        request.cluster,
        instance,
        found,
        order=orders[found.choice],
        memory_model=memory_model,
        kept=request.kept,
        method=method,
        microbatches_per_update=m,
        solver=solver,
        planning_s=time.perf_counter() - started_s,
    )
    key = proven_for(
        plan,
        problem,
        cluster,
        memory_model=memory_model,
        overlap=overlap,
        constraints=constraints,
        recompute=recompute,
        order=request.order,
    )
    return replace(plan, bound_for=key)


def _thinned(instance: Instance, found: SearchResult, deadline: Deadline) -> SearchResult:
    handing_on = replace(instance, hands_on=True)
    stage_of = with_thin_cuts(handing_on, found.stage_of, deadline)
    if stage_of is found.stage_of:
        return found
    return replace(found, stage_of=stage_of, bottleneck_s=loads_of(handing_on, stage_of).bottleneck_s)


def require_blocks(problem: Problem, num_stages: int) -> None:
    """Raises InputError where there are fewer blocks than stages."""
    if num_stages > len(problem.blocks):
        raise InputError(
            f"{num_stages} stages for a model of {counted(len(problem.blocks), 'block')} that can be apart; "
            f"a stage needs at least one, so at most num_stages={len(problem.blocks)}"
        )


def _check_arguments(
    problem: Problem,
    cluster: Cluster,
    num_stages: int,
    microbatches_per_update: int,
    method: str,
    kept: Keeping | None,
    order: Sequence[int] | None,
    max_gap: float,
    time_limit_s: float,
    recompute: object,
) -> None:
    require_whole_number("num_stages", num_stages)
    require_whole_number("microbatches_per_update", microbatches_per_update)
    if num_stages > len(cluster):
        raise InputError(
            f"{num_stages} stages for {len(cluster)} devices; a stage needs a device of its own, "
            f"so at most num_stages={len(cluster)}"
        )
    require_blocks(problem, num_stages)
    if kept is None and method not in METHODS:
        raise InputError(f"method {method!r} is unknown; known are {', '.join(METHODS)}")
    if kept is None:
        kept_by(method, num_stages, microbatches_per_update)
    if order is not None and (
        len(order) != num_stages or len({*order}) < len(order) or not {*order} <= {*range(len(cluster))}
    ):
        raise InputError(
            f"order is {tuple(order)}; expected {num_stages} different devices of 0 to {len(cluster) - 1}"
        )
    require_search(max_gap, time_limit_s)
    require_choice("recompute", recompute, True, False, "auto")
