"""Checks a plan that the user gives, as its method places and keeps its stages, and prices it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

from pd2bw_fx.actions import MOST_MICROBATCHES, Shape
from pd2bw_fx.cluster import Cluster
from pd2bw_fx.constraints import Constraints
from pd2bw_fx.costs import Kept, MemoryModel
from pd2bw_fx.errors import PlanMismatchError
from pd2bw_fx.plan import Plan
from pd2bw_fx.problem import Problem

from .arrange import by_device, shape_again
from .device_slots import slots_for
from .partition import check_plan
from .schedule import BaPipe, Placing, keeping, keeping_copies, method_of, shape_of

_ROOMY = 2**60  # bytes of memory that hold any plan
_REASONS = {
    Placing.ROUND: "stages go round the devices",
    Placing.BOTH_WAYS: "stages stand on the devices in their order, from both ends",
    Placing.WHOLE: "its one stage is on all devices, of which the first is named",
}


def check_given_plan(
    plan: Plan,
    problem: Problem,
    cluster: Cluster,
    *,
    memory_model: MemoryModel = MemoryModel(),  # noqa: B008 - frozen
    constraints: Constraints | None = None,
) -> Plan:
    """Checks and prices a plan with `check_plan`, on the device slots of its method and with what that keeps.

    Raises what `check_plan` raises, and InputError for a method that is unknown or cannot have such a plan.
    """
    if not plan.stages:
        raise PlanMismatchError("the plan has no stages; one has a part of the operators at least")
    if plan.microbatches_per_update > MOST_MICROBATCHES:
        raise PlanMismatchError(
            f"the plan has {plan.microbatches_per_update} microbatches an update; the schedule of at most "
            f"{MOST_MICROBATCHES} is laid out"
        )
    _require_one_device(plan, cluster)
    method = method_of(plan.method)
    shape = shape_of(plan, plan.method, microbatches_per_update=plan.microbatches_per_update)
    price = functools.partial(check_plan, memory_model=memory_model)
    if isinstance(method, BaPipe):  # its order decides what it keeps and whether messages overlap work
        shape = _order_again(plan, shape, problem, cluster)
        price = functools.partial(price, overlap=shape.slack > 0)
    if method.trains:
        plan = _with(plan, _kept(plan, shape, cluster))
    slots = slots_for(
        problem,
        cluster,
        method.placing,
        constraints,
        num_stages=plan.num_stages,
        chunks=shape.chunks,
    )
    price = functools.partial(price, constraints=slots.constraints)
    if slots.order is None:
        return price(plan, problem, cluster)
    for stage, slot in zip(plan.stages, slots.order, strict=True):
        if stage.device != slots.devices_of[slot][0]:
            raise PlanMismatchError(
                f"stage {stage.stage} is on device {stage.device}; {plan.method} has it on device "
                f"{slots.devices_of[slot][0]}, for {_REASONS[method.placing]}"
            )
    spread = replace(plan, stages=tuple(replace(stage, device=stage.stage) for stage in plan.stages))
    priced = slots.of_plan(price(spread, slots.problem, slots.cluster))
    return priced if method.placing is Placing.WHOLE else by_device(priced)


def _require_one_device(plan: Plan, cluster: Cluster) -> None:
    """Refuses a stage whose device index and device name are two devices of the cluster.

    The cluster may list its devices in another order than when the plan was made, or an edit may have changed
    only one of the two.
    """
    index = {device.name: at for at, device in enumerate(cluster.devices)}
    for stage in plan.stages:
        named = index.get(stage.device_name, stage.device)
        if named != stage.device and 0 <= stage.device < len(cluster):
            raise PlanMismatchError(
                f"stage {stage.stage} is on device {stage.device}, which is "
                f"{cluster.devices[stage.device].name!r} in this cluster, and has the device_name "
                f"{stage.device_name!r}, which is device {named}; write the one that is meant in both, or "
                "plan again where the cluster lists its devices in another order"
            )


def _order_again(plan: Plan, shape: Shape, problem: Problem, cluster: Cluster) -> Shape:
    """Chooses bapipe's order again, by the times that the plan really has."""
    roomy = replace(cluster, devices=tuple(replace(d, memory_bytes=_ROOMY) for d in cluster.devices))
    first = replace(shape, base="1f1b", slack=0.0)
    timed = check_plan(_with(plan, _kept(plan, first, cluster)), problem, roomy)
    stages = (
        replace(stage, microbatches_in_flight=own.microbatches_in_flight)
        for stage, own in zip(timed.stages, plan.stages, strict=True)
    )
    return shape_again(replace(timed, stages=tuple(stages)), cluster)


def _kept(plan: Plan, shape: Shape, cluster: Cluster) -> Sequence[Kept]:
    if plan.replicas is not None:
        return keeping_copies(plan.method)(plan.replicas, plan.microbatches_per_update)
    if method_of(plan.method).placing is Placing.WHOLE:
        shape = replace(shape, replicas=(len(cluster),))
    return keeping(plan.method, shape)(plan.num_stages)


def _with(plan: Plan, kept: Sequence[Kept]) -> Plan:
    stages = (
        replace(
            stage,
            weight_versions=own.weight_versions,
            microbatches_in_flight=own.in_flight,
            gradients_wait=own.gradients_wait,
            updates_each=own.updates_each,
            correction_copies=own.correction_copies,
            flushes=own.flushes,
        )
        for stage, own in zip(plan.stages, kept, strict=True)
    )
    return replace(plan, stages=tuple(stages))
