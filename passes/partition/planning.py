"""Writes the plan of an assignment: stages, times, memory and transfers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Literal

from pd2bw_fx.cluster import Cluster
from pd2bw_fx.constraints import Constraints
from pd2bw_fx.costs import Kept, MemoryModel, StageMemory
from pd2bw_fx.plan import Plan, StagePlan, Transfer
from pd2bw_fx.problem import Block, ParameterSize, Problem

from .choices import SearchResult
from .instance import Hops, Instance, Integers, Loads, evaluate
from .reader import crossing_values, topological_order, transfer_s
from .route import hops_of, routed


def proven_for(
    plan: Plan,
    problem: Problem,
    cluster: Cluster,
    *,
    memory_model: MemoryModel,
    overlap: bool,
    constraints: Constraints | None,
    recompute: bool | Literal["auto"],
    order: tuple[int, ...] | None,
) -> str:
    """Returns a hash of everything that a plan's bound depends on, which is all but the assignment.

    Where the hash differs, the bound proves nothing. `recompute` and `order` are those of the request.
    """
    kept = [stage.kept for stage in plan.stages]
    asked = (plan.method, plan.microbatches_per_update, plan.replicas, kept, overlap, recompute, order)
    text = repr((problem, cluster, memory_model, constraints or Constraints(), asked))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def plan_of(
    problem: Problem,
    cluster: Cluster,
    instance: Instance,
    found: SearchResult,
    *,
    order: Sequence[int],
    memory_model: MemoryModel,
    kept: Sequence[Kept],
    method: str,
    microbatches_per_update: int,
    solver: str,
    planning_s: float,
    replicas: Sequence[int] | None = None,
) -> Plan:
    """Makes the plan of a search result: stages with their operators in the problem's order, and transfers.

    With `replicas` the instance is that of `replicas.with_replicas`, and every value is sent straight,
    because the links are alike.
    """
    routes, loads = (
        routed(instance, found.stage_of) if replicas is None else ({}, evaluate(instance, found.stage_of))
    )
    bottleneck_s = loads.bottleneck_s if routes else found.bottleneck_s
    nodes = topological_order(problem)
    stage_of = {problem.blocks[at].name: int(found.stage_of[node]) for node, at in enumerate(nodes)}
    stages = []
    for stage, device in enumerate(order):
        blocks = [block for block in problem.blocks if stage_of[block.name] == stage]
        stages.append(
            _stage(
                stage,
                device,
                blocks,
                loads,
                cluster=cluster,
                sizes=problem.parameters,
                memory_model=memory_model,
                kept=kept[stage],
                replicas=1 if replicas is None else replicas[stage],
                overlap=instance.overlap,
            )
        )
    return Plan(
        stages=tuple(stages),
        transfers=_transfers(problem, cluster, instance, found.stage_of, routes, order),
        bottleneck_s=bottleneck_s,
        bound_s=min(found.bound_s, bottleneck_s),
        method=method,
        microbatches_per_update=microbatches_per_update,
        solver=solver,
        planning_s=planning_s,
        fingerprint=problem.fingerprint,
        costs_origin=problem.costs_origin,
    )


def _stage(
    stage: int,
    device: int,
    blocks: Sequence[Block],
    loads: Loads,
    *,
    cluster: Cluster,
    sizes: Mapping[str, ParameterSize],
    memory_model: MemoryModel,
    kept: Kept,
    replicas: int,
    overlap: bool,
) -> StagePlan:
    parameters = tuple(dict.fromkeys(name for block in blocks for name in block.parameters))
    send_s, receive_s = float(loads.send_s[stage]) * replicas, float(loads.receive_s[stage]) * replicas
    forward_s = sum(block.forward_s[device] for block in blocks)
    backward_s = sum(block.backward_s[device] for block in blocks)
    if overlap and send_s + receive_s > 0:
        work_s = float(loads.work_s[stage] + loads.again_s[stage])
        # With overlap the links only add the time that they need beyond the work.
        share = max(0.0, send_s + receive_s - work_s) / (send_s + receive_s)
        send_s, receive_s = share * send_s, share * receive_s
    return StagePlan(
        stage=stage,
        device=device,
        device_name=cluster.devices[device].name,
        operators=tuple(name for block in blocks for name in block.operators),
        parameters=parameters,
        forward_s=forward_s,
        backward_s=backward_s,
        send_s=send_s,
        receive_s=receive_s,
        memory=_memory(parameters, sizes, memory_model, kept, loads, stage),
        memory_limit_bytes=cluster.devices[device].memory_bytes,
        microbatches_in_flight=kept.in_flight,
        recompute=loads.recompute[stage],
        weight_versions=memory_model.versions(kept),
        gradients_wait=kept.gradients_wait,
        updates_each=kept.updates_each,
        correction_copies=kept.correction_copies,
        flushes=kept.flushes,
        replicas=replicas,
        gradient_sum_s=max(0.0, float(loads.work_s[stage]) - (forward_s + backward_s) / replicas)
        if replicas > 1
        else 0.0,
    )


def _memory(
    parameters: Sequence[str],
    sizes: Mapping[str, ParameterSize],
    memory_model: MemoryModel,
    kept: Kept,
    loads: Loads,
    stage: int,
) -> StageMemory:
    trainable = sum(sizes[name].trainable_bytes for name in parameters)
    frozen = sum(sizes[name].frozen_bytes for name in parameters)
    return StageMemory(
        weight_bytes=memory_model.weight_copies(kept) * trainable + frozen,
        gradient_bytes=memory_model.gradient_copies * trainable,
        optimizer_bytes=memory_model.optimizer_copies * trainable,
        activation_bytes=round(float(loads.saved_bytes[stage])),
        transfer_bytes=round(float(loads.held_bytes[stage])),
        workspace_bytes=round(float(loads.workspace_bytes[stage])),
        apart_bytes=round(float(loads.apart_bytes[stage])),
    )


def _transfers(
    problem: Problem,
    cluster: Cluster,
    instance: Instance,
    stage_of: Integers,
    routes: Mapping[int, Hops],
    order: Sequence[int],
) -> tuple[Transfer, ...]:
    transfers = []
    for net, value in enumerate(crossing_values(problem)):
        for source, target in hops_of(instance, stage_of, routes, net):
            seconds = transfer_s(value, cluster, order[source], order[target])
            transfers.append(
                Transfer(value.name, source, target, int(value.bytes), int(value.gradient_bytes), seconds)
            )
    return tuple(sorted(transfers, key=lambda t: (t.source, t.target, t.value)))
