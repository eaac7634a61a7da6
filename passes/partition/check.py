"""Checks an edited plan against its problem, and prices it again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from pd2bw_fx.cluster import Cluster
from pd2bw_fx.constraints import Constraints
from pd2bw_fx.costs import MemoryModel
from pd2bw_fx.errors import InfeasibleError, PlanMismatchError
from pd2bw_fx.plan import Plan
from pd2bw_fx.problem import Problem
from pd2bw_fx.units import format_bytes

from .choices import SearchResult
from .constrain import Pin, constrain
from .gradient_sums import GradientSums
from .instance import Integers, evaluate
from .planning import plan_of, proven_for
from .reader import Reader, check_problem, topological_order
from .replicas import with_replicas

_ROUNDING = 1e-9


def check_plan(
    plan: Plan,
    problem: Problem,
    cluster: Cluster,
    *,
    memory_model: MemoryModel = MemoryModel(),  # noqa: B008 - frozen
    overlap: bool = False,
    constraints: Constraints | None = None,
) -> Plan:
    """Returns the plan with the times, memory and transfers that its assignment really has.

    Four things are read from each stage: its operators, its device, whether it recomputes and what its method
    keeps there (`passes.check_given_plan` works that out for every method). All else is computed anew. The
    bound stays where it was proven for the same costs, cluster, memory model, constraints and `recompute`;
    otherwise nothing is proven (`bound_s` is 0).

    Raises PlanMismatchError for operators that are missing, unknown, listed twice or torn from what they
    belong to, for values that would run to an earlier stage, for devices that cannot be and for what the
    constraints forbid; InfeasibleError naming the stage that does not fit in memory.
    """
    check_problem(problem, cluster)
    hashes = [
        proven_for(
            plan,
            problem,
            cluster,
            memory_model=memory_model,
            overlap=overlap,
            constraints=constraints,
            recompute=recompute,
            order=order,
        )
        for recompute in _may_have_asked(plan)
        for order in (None, tuple(stage.device for stage in plan.stages))
    ]
    if plan.fingerprint != problem.fingerprint:
        raise _other_graph(plan, problem)
    _check_stages(plan, problem, cluster)
    constrained = constrain(problem, cluster, constraints or Constraints(), num_stages=plan.num_stages)
    problem, cluster = constrained.problem, constrained.cluster
    stage_of = _stage_of_blocks(plan, problem)
    _check_direction(problem, stage_of)
    _check_pins(plan, constrained.pins, stage_of)
    nodes = np.array([stage_of[problem.blocks[at].name] for at in topological_order(problem)], dtype=np.int64)
    priced = _priced(plan, problem, cluster, nodes, memory_model=memory_model, overlap=overlap)
    if plan.bound_for not in hashes or priced.bottleneck_s < plan.bound_s * (1 - _ROUNDING):
        return replace(priced, bound_s=0.0, bound_for=hashes[0])
    return replace(
        priced,
        bound_s=min(plan.bound_s, priced.bottleneck_s),
        bound_for=plan.bound_for,
        bound_of_any=plan.bound_of_any,
    )


def _other_graph(plan: Plan, problem: Problem) -> PlanMismatchError:
    planned = set(plan.stage_of), {name for stage in plan.stages for name in stage.parameters}
    known = {name for block in problem.blocks for name in block.operators}, set(problem.parameters)
    if planned[0] == known[0] and planned[1] <= known[1]:
        return PlanMismatchError(
            f"the plan was made for graph {plan.fingerprint!r}, and this is {problem.fingerprint!r}, of the "
            "same operators: its tensors have other sizes, as of example inputs of another microbatch size; "
            "give those that the plan was made with, or plan again"
        )
    return PlanMismatchError(
        f"the plan was made for graph {plan.fingerprint!r}, and this is {problem.fingerprint!r}, of other "
        f"operators: {_difference(planned, known)}; plan again"
    )


def _difference(planned: Sequence[set[str]], known: Sequence[set[str]]) -> str:
    """Returns a name that only one of the two has; operators first, then parameters."""
    for noun, theirs, ours in zip(("operator", "parameter"), planned, known, strict=True):
        if theirs - ours:
            return f"the plan has the {noun} {min(theirs - ours)!r}, which is not here"
        if ours - theirs and noun == "operator":
            return f"here is the {noun} {min(ours - theirs)!r}, which the plan does not have"
    raise AssertionError("the two have the same names")


def _may_have_asked(plan: Plan) -> Iterator[bool | Literal["auto"]]:
    """Yields the values of `recompute` that such a plan may have been asked for with."""
    yield "auto"
    again = {stage.recompute for stage in plan.stages}
    if len(again) == 1:
        yield from again


def _check_stages(plan: Plan, problem: Problem, cluster: Cluster) -> None:
    if not plan.stages:
        raise PlanMismatchError("the plan has no stages; one has a part of the operators at least")
    known = {name for block in problem.blocks for name in block.operators}
    seen: dict[str, int] = {}
    for at, stage in enumerate(plan.stages):
        if stage.stage != at:
            raise PlanMismatchError(f"stage {stage.stage} stands at place {at}; stages count from 0 in order")
        if not stage.operators:
            raise PlanMismatchError(f"stage {at} has no operators; leave the stage out or give it some")
        for name in stage.operators:
            if name not in known:
                raise PlanMismatchError(f"stage {at} lists {name!r}, which is no operator of this graph")
            if name in seen:
                where = (
                    f"twice in stage {at}" if seen[name] == at else f"in stage {seen[name]} and in stage {at}"
                )
                raise PlanMismatchError(f"operator {name!r} is {where}")
            seen[name] = at
        if not 0 <= stage.device <= len(cluster) - stage.replicas or stage.replicas < 1:
            copies = "" if stage.replicas == 1 else f" with {stage.replicas} replicas"
            raise PlanMismatchError(
                f"stage {at} is on device {stage.device}{copies}; there are devices 0 to {len(cluster) - 1}"
            )
    if plan.replicas is not None and not cluster.is_uniform:
        raise PlanMismatchError("stages with replicas need devices and links that are alike; leave them out")
    places = [stage.device + copy for stage in plan.stages for copy in range(stage.replicas)]
    if len(set(places)) < len(places):
        raise PlanMismatchError("two stages are on one device; a stage needs a device of its own")
    missing = sorted(known - seen.keys())
    if missing:
        raise PlanMismatchError(f"operator {missing[0]!r} is in no stage")


def _stage_of_blocks(plan: Plan, problem: Problem) -> dict[str, int]:
    planned = plan.stage_of
    for block in problem.blocks:
        for name in block.operators:
            if planned[name] != planned[block.operators[0]]:
                raise PlanMismatchError(
                    f"{name!r} is in stage {planned[name]} and {block.operators[0]!r} in stage "
                    f"{planned[block.operators[0]]}, but must stay together: one is a view of the other, or "
                    "constraints join them"
                )
    return {block.name: planned[block.operators[0]] for block in problem.blocks}


def _check_direction(problem: Problem, stage_of: dict[str, int]) -> None:
    for value in problem.values:
        for reader in value.consumers:
            if stage_of[reader] < stage_of[value.producer]:
                raise PlanMismatchError(
                    f"{reader!r} in stage {stage_of[reader]} reads {value.name!r}, which stage "
                    f"{stage_of[value.producer]} makes; nothing runs to an earlier stage"
                )


def _check_pins(plan: Plan, pins: Sequence[Pin], stage_of: dict[str, int]) -> None:
    for pin in pins:
        stage = stage_of[pin.block]
        device = plan.stages[stage].device
        if not pin.allows(stage, device):
            raise PlanMismatchError(
                f"{pin.name!r} is pinned to {pin.where}, and the plan has it on stage {stage} (device "
                f"{device}); change the plan, or the constraints"
            )


def _priced(
    plan: Plan,
    problem: Problem,
    cluster: Cluster,
    stage_of: Integers,
    *,
    memory_model: MemoryModel,
    overlap: bool,
) -> Plan:
    reader = Reader(
        problem,
        cluster,
        memory_model=memory_model,
        kept=[stage.kept for stage in plan.stages],
        overlap=overlap,
        recompute=False,
    )
    order = [stage.device for stage in plan.stages]
    recompute = tuple(stage.recompute for stage in plan.stages)
    instance = replace(reader.instance(order), recompute=recompute)
    if plan.replicas is not None:
        sums = GradientSums.of(problem, cluster)
        instance = with_replicas(instance, plan.replicas, sums, plan.microbatches_per_update)
    loads = evaluate(instance, stage_of)
    over = np.flatnonzero(loads.memory_bytes > instance.limit_bytes)
    for at in over.tolist():
        need, have = float(loads.memory_bytes[at]), float(instance.limit_bytes[at])
        raise InfeasibleError(
            f"stage {at} needs {format_bytes(need)} ({need:.0f} bytes) on {cluster.devices[order[at]].name}, "
            f"which has {format_bytes(have)} ({have:.0f} bytes); move operators away or let it recompute"
        )
    return plan_of(
        problem,
        cluster,
        instance,
        SearchResult(0, stage_of, loads.bottleneck_s, 0.0),
        order=order,
        memory_model=memory_model,
        kept=[stage.kept for stage in plan.stages],
        method=plan.method,
        microbatches_per_update=plan.microbatches_per_update,
        solver=plan.solver,
        planning_s=plan.planning_s,
        replicas=plan.replicas,
    )
