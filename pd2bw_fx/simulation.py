"""Simulates a pipeline's plan under a requested method, slack and replicas."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pd2bw_fx.actions import RunRequest, Shape, require_microbatches
from pd2bw_fx.arguments import plain, require_kind, require_replicas, require_whole_number
from pd2bw_fx.cluster import Cluster
from pd2bw_fx.costs import MemoryModel
from pd2bw_fx.errors import InputError
from pd2bw_fx.passes.coarsen import coarsen
from pd2bw_fx.passes.schedule import Placing, method_of, schedule_of, shape_of
from pd2bw_fx.passes.simulate import peak_memory_bytes, simulate
from pd2bw_fx.plan import Plan, as_one_stage
from pd2bw_fx.timeline import Timeline

if TYPE_CHECKING:
    from pd2bw_fx.pipeline import Pipeline

_UPDATES_OF_A_LONGER_ONE = 6
_TIMES_IN_FLIGHT = 12  # microbatches of the longer one, over the most that are in flight
_MOST_MICROBATCHES = 1_000_000  # of all updates together: on two stages the better part of a minute


def simulate_pipeline(
    pipeline: Pipeline,
    request: RunRequest,
    *,
    num_updates: int | None,
    cluster: Cluster,
    **options: Any,
) -> Timeline:
    """Implements `Pipeline.simulate`."""
    plan, schedule = pipeline.plan, pipeline.schedule
    num_updates = plain(num_updates)
    if num_updates is not None:
        require_whole_number("num_updates", num_updates)
    if num_updates is not None or request != RunRequest():
        method = request.method or plan.method
        if method_of(method).placing is Placing.WHOLE and plan.num_stages > 1:
            request = replace(request, replicas=request.replicas or plan.num_stages)
            plan = _in_one_stage(pipeline)
        shape = shape_for(pipeline, replace(request, method=method), plan)
        count = len(pipeline.schedule.updates) if num_updates is None else num_updates
        if count * shape.microbatches_per_update > _MOST_MICROBATCHES:
            raise InputError(
                f"num_updates is {count}, of {shape.microbatches_per_update} microbatches each; at most "
                f"{_MOST_MICROBATCHES} microbatches are simulated: a few updates show how all of them go"
            )
        schedule = schedule_of(method, shape, updates=range(count), drain=True)
    parameters, trained = pipeline.graph.parameters, pipeline.graph.trained()
    options["trainable_bytes"] = {n: p.spec.num_bytes for n, p in parameters.items() if n in trained}
    timeline = simulate(schedule, plan, cluster, **options)
    built_for = schedule.shape
    if timeline.steady_per_s is not None or built_for is None or not method_of(schedule.method).trains:
        return timeline
    # It is too short to have a steady state: a longer one gives the throughput.
    filling = _TIMES_IN_FLIGHT * max(timeline.in_flight_peak)
    count = max(_UPDATES_OF_A_LONGER_ONE, -(-filling // built_for.microbatches_per_update))
    longer = schedule_of(schedule.method, built_for, updates=range(count), drain=True)
    return replace(timeline, longer_per_s=simulate(longer, plan, cluster, **options).steady_per_s)


def simulated_peak_bytes(pipeline: Pipeline, timeline: Timeline) -> tuple[int, ...]:
    """Implements `Pipeline.peak_memory_bytes`."""
    require_kind("timeline", timeline, Timeline, "a Timeline (of Pipeline.simulate)")
    is_whole = method_of(timeline.method).placing is Placing.WHOLE
    plan = _in_one_stage(pipeline) if is_whole else pipeline.plan
    return peak_memory_bytes(timeline, plan, _memory_model(pipeline))


def shape_for(pipeline: Pipeline, request: RunRequest, plan: Plan) -> Shape:
    """Returns what the requested method's schedule is built for, on a plan of the pipeline's stages."""
    method, slack, replicas = request.method or plan.method, request.slack, request.replicas
    m = request.microbatches_per_update
    m = plan.microbatches_per_update if m is None else m
    require_microbatches(m)
    if slack != "auto":
        require_kind("slack", slack, (int, float), 'a number or "auto"')
        if isinstance(slack, bool) or not math.isfinite(slack):
            raise InputError(f'slack is {slack}; a number of 0 or more, or "auto", was expected')
    require_replicas(replicas)
    own = pipeline.schedule.shape
    planned_slack = 0.0 if method_of(method).fills_slack else "auto"
    is_another = (
        plan is not pipeline.plan
        or slack not in (0.0, planned_slack)
        or replicas
        or request.vertical_sync
        or method != plan.method
    )
    if own is not None and not is_another and m == own.microbatches_per_update:
        return own
    counts = (replicas,) * plan.num_stages if isinstance(replicas, int) else replicas
    return shape_of(
        plan,
        method,
        microbatches_per_update=m,
        slack=slack,
        replicas=None if counts is None else tuple(counts),
        vertical_sync=request.vertical_sync,
    )


def _in_one_stage(pipeline: Pipeline) -> Plan:
    """Joins the plan's stages, with its slowest device's times: an update waits for that device's copy."""
    problem = coarsen(pipeline.graph, pipeline.costs, pipeline.cluster)
    plan = pipeline.plan
    together = as_one_stage(plan, problem.parameters, _memory_model(pipeline))
    if pipeline.cluster.is_uniform:
        return together
    again = {name for stage in plan.stages if stage.recompute for name in stage.operators}
    devices = {stage.device for stage in plan.stages}
    forward_s = {d: sum(block.forward_s[d] for block in problem.blocks) for d in devices}
    backward_s = {
        d: sum(
            block.backward_s[d] + block.forward_s[d] * (block.operators[0] in again)
            for block in problem.blocks
        )
        for d in devices
    }
    slowest = max(devices, key=lambda d: forward_s[d] + backward_s[d])
    stage = replace(together.stages[0], forward_s=forward_s[slowest], backward_s=backward_s[slowest])
    return replace(together, stages=(stage,), bottleneck_s=stage.load_s)


def _memory_model(pipeline: Pipeline) -> MemoryModel:
    model: MemoryModel = pipeline.planning_options.get("memory_model", MemoryModel())
    return model
