"""The exhaustive search that the planner is held against."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from pd2bw_fx.cluster import Cluster
from pd2bw_fx.costs import Kept
from pd2bw_fx.problem import Problem, Value


def brute_force(
    problem: Problem, cluster: Cluster, kept: Sequence[Kept], *, overlap: bool, recompute: Any
) -> float | None:
    """The least bottleneck over all stages of all blocks and all devices of all stages; None: none fits."""
    names, num_stages = [block.name for block in problem.blocks], len(kept)
    grid = np.array(list(itertools.product(range(num_stages), repeat=len(names))))  # (assignments, blocks)
    keep = np.ones(len(grid), dtype=bool)
    for value in problem.values:
        for consumer in value.consumers:
            keep &= grid[:, names.index(value.producer)] <= grid[:, names.index(consumer)]
    for stage in range(num_stages):
        keep &= (grid == stage).any(axis=1)
    grid = grid[keep]
    best = math.inf
    for devices in itertools.permutations(range(len(cluster)), num_stages):
        slowest = np.zeros(len(grid))
        for stage in range(num_stages):
            load = _stage_load(problem, cluster, names, grid, devices, stage, kept[stage], overlap, recompute)
            slowest = np.maximum(slowest, load)
        best = min(best, float(slowest.min(initial=math.inf)))
    return None if math.isinf(best) else best


def _stage_load(
    problem: Problem,
    cluster: Cluster,
    names: list[str],
    grid: Any,
    devices: tuple[int, ...],
    stage: int,
    kept: Kept,
    overlap: bool,
    recompute: Any,
) -> Any:
    """With momentum: the weights' versions, a gradient, a moment, and while stepping one parameter more."""
    here, device = grid == stage, devices[stage]
    forward = here @ np.array([block.forward_s[device] for block in problem.blocks])
    backward = here @ np.array([block.backward_s[device] for block in problem.blocks])
    links = np.zeros(len(grid))
    stepped = [
        max((problem.parameters[name].trainable_bytes for name in block.parameters), default=0)
        for block in problem.blocks
    ]
    working = (here * np.array([block.workspace_bytes for block in problem.blocks])).max(axis=1)
    stepping = (here * np.array(stepped)).max(axis=1)
    memory, gradients = np.zeros(len(grid)), np.zeros(len(grid))
    held = here @ np.zeros(len(names))
    for parameter, size in problem.parameters.items():
        users = [at for at, block in enumerate(problem.blocks) if parameter in block.parameters]
        num_bytes = (kept.weight_versions + 1) * size.trainable_bytes + size.frozen_bytes
        memory = memory + num_bytes * here[:, users].any(axis=1)
        gradients = gradients + size.trainable_bytes * here[:, users].any(axis=1)
    for value in problem.values:
        source = grid[:, names.index(value.producer)]
        readers = grid[:, [names.index(name) for name in value.consumers]]
        crosses = np.zeros(len(grid), dtype=bool)
        for other in range(len(devices)):
            if other == stage:
                continue
            sends = (source == stage) & (readers == other).any(axis=1)
            receives = (source == other) & (readers == stage).any(axis=1)
            links = links + sends * _round_trip(cluster, device, devices[other], value)
            links = links + receives * _round_trip(cluster, devices[other], device, value)
            crosses |= sends | receives
        held = held + value.bytes * crosses
    saved = here @ np.array([block.saved_bytes for block in problem.blocks])
    limit = cluster.devices[device].memory_bytes
    # Before and after the backward that makes the first gradients; else all is there at once.
    n = kept.in_flight
    moments = [(n, 0, 1, working), (n - 1, 1, 1 - kept.updates_each, working)]
    if not kept.gradients_wait:
        moments = [(n, 1, 1, working)]
    moments.append((0 if kept.flushes else n - 1, 1, 0, stepping))  # nothing is worked on
    keeps = repeats = np.ones(len(grid), dtype=bool)
    for flying, has, again, besides in moments:
        fixed = memory + has * gradients + flying * held + besides
        keeps = keeps & (fixed + flying * saved <= limit)
        repeats = repeats & (fixed + again * saved <= limit)
    if recompute == "auto":
        work = np.where(keeps, forward + backward, np.where(repeats, 2 * forward + backward, math.inf))
    elif recompute:
        work = np.where(repeats, 2 * forward + backward, math.inf)
    else:
        work = np.where(keeps, forward + backward, math.inf)
    return np.maximum(work, links) if overlap else work + links


def _round_trip(cluster: Cluster, source: int, target: int, value: Value) -> float:
    there = cluster.latency_s[source][target] + value.bytes / cluster.bytes_per_s[source][target]
    back = cluster.latency_s[target][source] + value.gradient_bytes / cluster.bytes_per_s[target][source]
    return there + (back if value.gradient_bytes else 0.0)
