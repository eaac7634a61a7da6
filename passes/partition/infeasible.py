"""Why no plan fits: the device, the bytes it would need, the bytes it has, and what to try."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pd2bw_fx.cluster import Cluster
from pd2bw_fx.errors import InfeasibleError
from pd2bw_fx.problem import Problem
from pd2bw_fx.units import format_bytes

from .instance import Instance, evaluate
from .program import FeasibilityProgram, Windows
from .reader import topological_order
from .search import Choices

_EXPLAIN_TIME_S = 5.0
_EXPLAIN_ORDERS = 8


def infeasible_error(
    problem: Problem,
    cluster: Cluster,
    choices: Choices,
    orders: Sequence[tuple[int, ...]],
    *,
    solver: str,
) -> InfeasibleError:
    """The error to raise: a block too large for any device, else the assignment that is least too large."""
    return _block_too_large(problem, cluster, choices[0]) or _least_excess(
        cluster, choices, orders, solver=solver
    )


def _block_too_large(problem: Problem, cluster: Cluster, instance: Instance) -> InfeasibleError | None:
    largest = max(range(len(cluster)), key=lambda d: cluster.devices[d].memory_bytes)
    device = cluster.devices[largest]
    need = instance.static_bytes + instance.saved_bytes + instance.workspace_bytes
    for shared in instance.shared:
        need[list(shared.nodes)] += shared.num_bytes
    node = int(need.argmax())
    if need[node] <= device.memory_bytes:
        return None
    name = problem.blocks[topological_order(problem)[node]].name
    return InfeasibleError(
        f"block {name!r} alone needs {format_bytes(need[node])} ({need[node]:.0f} bytes) with its copies of "
        f"the weights, and {device.name}, the largest device, has {format_bytes(device.memory_bytes)} "
        f"({device.memory_bytes} bytes); try a device with more memory, a smaller microbatch, or an "
        "optimizer with less state"
    )


def _least_excess(
    cluster: Cluster,
    choices: Choices,
    orders: Sequence[tuple[int, ...]],
    *,
    solver: str,
) -> InfeasibleError:
    best: tuple[float, int, int, float] | None = None
    for choice in range(min(len(choices), _EXPLAIN_ORDERS)):
        instance = choices[choice]
        n, k = instance.num_nodes, instance.num_stages
        windows = Windows(np.zeros(n, dtype=np.int64), np.full(n, k - 1, dtype=np.int64))
        program = FeasibilityProgram(instance, np.inf, windows, soft_memory=True)
        _, stage_of = program.solve(solver=solver, time_limit_s=_EXPLAIN_TIME_S)
        if stage_of is None:
            continue
        need = evaluate(instance, stage_of).memory_bytes
        stage = int((need / instance.limit_bytes).argmax())
        share = float(need[stage] / instance.limit_bytes[stage])
        if best is None or share < best[0]:
            best = (share, choice, stage, float(need[stage]))
    advice = 'try more stages, recompute="auto", a smaller microbatch, or devices with more memory'
    if best is None:
        total = format_bytes(sum(device.memory_bytes for device in cluster.devices))
        return InfeasibleError(f"no assignment fits in the {total} of {len(cluster)} devices; {advice}")
    _, choice, stage, need_bytes = best
    device = cluster.devices[orders[choice][stage]]
    return InfeasibleError(
        f"no assignment fits: at best stage {stage} needs {format_bytes(need_bytes)} ({need_bytes:.0f} "
        f"bytes) on {device.name}, which has {format_bytes(device.memory_bytes)} ({device.memory_bytes} "
        f"bytes); {advice}"
    )
