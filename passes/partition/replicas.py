"""Copies of single stages: unequal replication, as PipeDream has it (arXiv 1806.03377, section 3.2).

Stage s runs on r_s devices, and microbatch k on the (k mod r_s)-th of them. Of every microbatch a copy bears

    load_s = (work_s + links_s) / r_s + 2 (r_s - 1) |w_s| / (r_s B m)

the second term for adding up gradients over the copies once in m microbatches, each parameter once, over the
slowest link; like everything else it is added, not overlapped. A copy holds ceil((r_s + .. + r_d-1) / r_s)
microbatches in flight.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from pd2bw_fx.cluster import Cluster
from pd2bw_fx.costs import Kept, MemoryModel
from pd2bw_fx.errors import InfeasibleError, InputError, SolverError
from pd2bw_fx.passes.solver import check_solver
from pd2bw_fx.problem import Problem
from pd2bw_fx.sweep import ReplicatedPlan

from .instance import Floats, Instance
from .reader import Reader, check_problem, topological_order
from .search import Choices, Deadline, search

_MOST_DEVICES = 10  # two to the power of it are the ways to share them out


def partition_replicated(
    problem: Problem,
    cluster: Cluster,
    *,
    microbatches_per_update: int,
    num_stages: Sequence[int] | None = None,
    memory_model: MemoryModel = MemoryModel(),  # noqa: B008 - frozen
    recompute: bool | Literal["auto"] = False,
    solver: str = "highs",
    max_gap: float = 1e-4,
    time_limit_s: float = 60.0,
) -> ReplicatedPlan:
    """The stages, and the number of copies of each, with which the slowest stage is fastest.

    The cluster's devices and links must be alike; devices may be left unused. Every way to share them out
    over every number of stages (`num_stages`: those named, else any) is a choice of the same search.

    Raises InputError for a cluster or arguments that this cannot be done with, InfeasibleError where nothing
    fits, SolverError where time ran out before the first plan.
    """
    check_problem(problem, cluster)
    check_solver(solver)
    if not cluster.is_uniform:
        raise InputError("copies of a stage need devices and links that are alike")
    if len(cluster) > _MOST_DEVICES:
        raise InputError(f"{len(cluster)} devices; unequal copies are planned for up to {_MOST_DEVICES}")
    if microbatches_per_update < 1:
        raise InputError(f"microbatches_per_update is {microbatches_per_update}; at least one was expected")
    most = min(len(cluster), len(problem.blocks), microbatches_per_update)
    tried = [d for d in (range(1, most + 1) if num_stages is None else num_stages) if 1 <= d <= most]
    if not tried:
        raise InputError(f"num_stages={num_stages!r} names nothing from 1 to {most}")
    end = time.perf_counter() + time_limit_s
    best: ReplicatedPlan | None = None
    bound_s, ran_out = np.inf, False
    for d in tried:
        reader = Reader(
            problem,
            cluster,
            memory_model=memory_model,
            kept=[Kept(2, 1)] * d,
            overlap=False,
            recompute=recompute,
        )
        base = reader.instance(range(d))
        shares = list(_shares(len(cluster), d))
        summed_s = _summed_s(problem, cluster) / microbatches_per_update
        choices = Choices(len(shares), _InstanceOf(base, shares, summed_s))
        try:
            left_s = max(end - time.perf_counter(), 1e-3)
            found = search(choices, solver=solver, max_gap=max_gap, deadline=Deadline(left_s))
        except SolverError:
            ran_out = True
            continue
        if found is None:
            continue
        bound_s = min(bound_s, found.bound_s)
        if best is None or found.bottleneck_s < best.bottleneck_s:
            stage_of = [int(stage) for stage in found.stage_of]
            blocks = [problem.blocks[at] for at in topological_order(problem)]
            stages = tuple(
                tuple(
                    name
                    for block, stage in zip(blocks, stage_of, strict=True)
                    if stage == s
                    for name in block.operators
                )
                for s in range(d)
            )
            best = ReplicatedPlan(stages, shares[found.choice], found.bottleneck_s, 0.0)
    if best is None and ran_out:
        raise SolverError("the time limit passed before any plan was found; raise time_limit_s")
    if best is None:
        raise InfeasibleError(
            f"no assignment fits on {len(cluster)} devices of {cluster.devices[0].memory_bytes} bytes, "
            "whatever is copied; partition says what is missing without copies"
        )
    return replace(best, bound_s=0.0 if ran_out else float(bound_s))


def _shares(num_devices: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    for shares in itertools.product(range(1, num_devices - num_stages + 2), repeat=num_stages):
        if sum(shares) <= num_devices:
            yield shares


class _InstanceOf:
    """The instance of a share: a stage with r copies is one that is r times as fast."""

    def __init__(self, base: Instance, shares: Sequence[tuple[int, ...]], summed_s: Floats) -> None:
        self._base = base
        self._shares = shares
        self._summed_s = summed_s

    def __call__(self, choice: int) -> Instance:
        share = self._shares[choice]
        r = np.array(share, dtype=float)
        behind = np.cumsum(r[::-1])[::-1]
        return replace(
            self._base,
            work_s=self._base.work_s / r[:, None] + np.outer(2 * (r - 1) / r, self._summed_s),
            again_s=self._base.again_s / r[:, None],
            cost_s=self._base.cost_s / r[None, :, None],
            in_flight=np.ceil(behind / r).astype(np.int64),
        )


def _summed_s(problem: Problem, cluster: Cluster) -> Floats:
    """Seconds for each block's gradients over the link once; a parameter of several counts at the first."""
    rate = cluster.bytes_per_s[0][1] if len(cluster) > 1 else np.inf
    counted: set[str] = set()
    seconds = []
    for at in topological_order(problem):
        new = [name for name in dict.fromkeys(problem.blocks[at].parameters) if name not in counted]
        counted.update(new)
        seconds.append(sum(problem.parameters[name].trainable_bytes for name in new) / rate)
    return np.array(seconds)
