"""Plans stages with several copies, not equally many each, as PipeDream does (arXiv 1806.03377, section 3.2).

Stage s runs on r_s devices, and microbatch k on the (k mod r_s)-th of them. For every microbatch a copy has

    load_s = (work_s + links_s) / r_s + 2 (r_s - 1) ((1 + |w_s| / bucket) L + |w_s| / (r_s B)) / m

to do. The second term is for summing the gradients over the copies, once every m microbatches
(`gradient_sums.py`), over links of latency L and bandwidth B. Like all else it is added, not overlapped.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np

from pd2bw_fx.arguments import plain, require_choice, require_search, require_whole_number
from pd2bw_fx.cluster import Cluster
from pd2bw_fx.constraints import Constraints
from pd2bw_fx.costs import Kept, MemoryModel
from pd2bw_fx.errors import InfeasibleError, InputError, SolverError
from pd2bw_fx.passes.solver import check_solver
from pd2bw_fx.plan import Plan, Progress
from pd2bw_fx.problem import Problem

from .choices import Choices, Deadline, NoPlanInTime, SearchResult
from .constrain import Constrained, constrain
from .gradient_sums import GradientSums
from .instance import Instance
from .planning import plan_of, proven_for
from .reader import Reader, check_problem
from .search.search import search

_MOST_DEVICES = 10  # n devices can be shared out in 2^n ways

# Takes the copies of each stage and the microbatches of an update; returns what a method keeps at each stage.
KeepingCopies: TypeAlias = Callable[[tuple[int, ...], int], Sequence[Kept]]


def stashing(replicas: tuple[int, ...], microbatches_per_update: int) -> tuple[Kept, ...]:
    """Returns what PipeDream keeps: ceil((r_s + .. + r_d-1) / r_s) microbatches in flight, each with the
    weights that its forward ran on."""
    kept = []
    for stage, count in enumerate(replicas):
        in_flight = -(-sum(replicas[stage:]) // count)
        turns = max(1, microbatches_per_update // count)
        kept.append(Kept(-(-(in_flight - 1) // turns) + 1, in_flight, turns == 1, turns == 1))
    return tuple(kept)


def partition_replicated(
    problem: Problem,
    cluster: Cluster,
    *,
    microbatches_per_update: int | None = None,
    num_stages: Sequence[int] | None = None,
    replicas: Sequence[int] | None = None,
    kept: KeepingCopies = stashing,
    memory_model: MemoryModel = MemoryModel(),  # noqa: B008 - frozen
    method: str = "pipedream",
    recompute: bool | Literal["auto"] = False,
    constraints: Constraints | None = None,
    solver: str = "highs",
    max_gap: float = 1e-4,
    time_limit_s: float = 60.0,
    progress: Callable[[Progress], None] | None = None,
    within: Deadline | None = None,
) -> Plan:
    """Returns the plan whose slowest stage is fastest, over stages and numbers of copies.

    The cluster's devices and links must be alike; devices may be left unused. All ways to share the devices
    out over a number of stages are choices of one search, and `num_stages` has the numbers to try (any unless
    said). `replicas` fixes the copies of each stage. The copies of a stage share the microbatches of an
    update equally; without `microbatches_per_update` an update has the fewest that allow it. Copies are on
    neighbouring devices, those of the first stage first. Other arguments are those of `partition`.

    Raises InputError for a cluster or arguments that this cannot be done with, InfeasibleError where nothing
    fits, SolverError where time ran out before the first plan.
    """
    started_s = time.perf_counter()
    wishes = constraints or Constraints()
    check_problem(problem, cluster)
    check_solver(solver)
    require_search(max_gap, time_limit_s)
    require_choice("recompute", recompute, True, False, "auto")
    microbatches_per_update = plain(microbatches_per_update)
    _check(cluster, wishes, microbatches_per_update)
    tried = _tried(problem, cluster, microbatches_per_update, num_stages, replicas)
    deadline = Deadline(time_limit_s, within=within)
    best: Plan | None = None
    bound_s, ran_out = np.inf, False
    for shares in tried:
        if deadline.is_stopped and best is not None:
            ran_out = True
            break
        constrained = constrain(problem, cluster, wishes, num_stages=len(shares[0]))
        request = ReplicaRequest(
            constrained, microbatches_per_update, kept, memory_model, recompute, tuple(shares)
        )
        try:
            choices = request.choices()
            found = search(choices, solver=solver, max_gap=max_gap, deadline=deadline, report=progress)
        except SolverError:
            ran_out = True
            continue
        if found is None:
            continue
        bound_s = min(bound_s, found.bound_s)
        if best is None or found.bottleneck_s < best.bottleneck_s:
            best = request.plan(choices, found, method=method, solver=solver)
    if best is None and ran_out:
        raise NoPlanInTime
    if best is None:
        raise InfeasibleError(
            f"no assignment fits on {len(cluster)} devices of {cluster.devices[0].memory_bytes} bytes, "
            "whatever is copied; partition says what is missing without copies"
        )
    took_s = time.perf_counter() - started_s
    key = proven_for(
        best,
        problem,
        cluster,
        memory_model=memory_model,
        overlap=False,
        constraints=constraints,
        recompute=recompute,
        order=None,
    )
    return replace(best, bound_s=0.0 if ran_out else float(bound_s), planning_s=took_s, bound_for=key)


def _check(cluster: Cluster, wishes: Constraints, microbatches_per_update: int | None) -> None:
    if not cluster.is_uniform:
        raise InputError("copies of a stage need devices and links that are alike")
    if wishes.device_of or wishes.memory_bytes:
        raise InputError(
            "device_of and memory_bytes make devices unlike, and copies of a stage need devices that are "
            "alike; pin to stages (stage_of) instead"
        )
    if microbatches_per_update is not None:
        require_whole_number("microbatches_per_update", microbatches_per_update)


def _tried(
    problem: Problem,
    cluster: Cluster,
    microbatches_per_update: int | None,
    num_stages: Sequence[int] | None,
    replicas: Sequence[int] | None,
) -> list[list[tuple[int, ...]]]:
    """Returns the ways to share the devices out, in a list for each number of stages."""
    n, m = len(cluster), microbatches_per_update
    if replicas is not None:
        share = tuple(replicas)
        if num_stages is not None and len(share) not in num_stages:
            raise InputError(f"replicas is {share}, and num_stages={num_stages!r}; leave one of them out")
        if not share or min(share) < 1 or sum(share) > n:
            raise InputError(
                f"replicas is {share}; expected numbers of one or more that add up to at most {n}"
            )
        if m is not None and any(m % count for count in share):
            raise InputError(
                f"{m} microbatches an update cannot be shared equally by replicas={share}; try "
                f"microbatches_per_update={math.lcm(*share)}"
            )
        return [[share]]
    if n > _MOST_DEVICES:
        raise InputError(f"{n} devices; unequal copies are planned for up to {_MOST_DEVICES}")
    most = min(n, len(problem.blocks))
    wanted = range(1, most + 1) if num_stages is None else num_stages
    tried = [list(_shares(n, d, m)) for d in wanted if 1 <= d <= most]
    if not any(tried):
        raise InputError(f"num_stages={num_stages!r} names nothing from 1 to {most}")
    return [shares for shares in tried if shares]


def _shares(num_devices: int, num_stages: int, m: int | None) -> Iterator[tuple[int, ...]]:
    counts = [r for r in range(1, num_devices - num_stages + 2) if m is None or m % r == 0]
    for share in itertools.product(counts, repeat=num_stages):
        if sum(share) <= num_devices:
            yield share


@dataclass(frozen=True, slots=True)
class ReplicaRequest:
    """One number of stages, with every way (`shares`) to share the devices out over them."""

    constrained: Constrained
    microbatches_per_update: int | None
    keeping: KeepingCopies
    memory_model: MemoryModel
    recompute: bool | Literal["auto"]
    shares: tuple[tuple[int, ...], ...]

    def microbatches(self, share: tuple[int, ...]) -> int:
        return self.microbatches_per_update or math.lcm(*share)

    def kept(self, share: tuple[int, ...]) -> Sequence[Kept]:
        return self.keeping(share, self.microbatches(share))

    def choices(self) -> Choices:
        problem, cluster = self.constrained.problem, self.constrained.cluster
        reader = Reader(
            problem,
            cluster,
            memory_model=self.memory_model,
            kept=self.kept(self.shares[0]),
            overlap=False,
            recompute=self.recompute,
            pins=self.constrained.pins,
        )
        base = reader.instance(range(len(self.shares[0])))
        sums = GradientSums.of(problem, cluster)

        def of(choice: int) -> Instance:
            share = self.shares[choice]
            own = reader.keeping(base, self.kept(share))
            return with_replicas(own, share, sums, self.microbatches(share))

        return Choices(len(self.shares), of)

    def plan(self, choices: Choices, found: SearchResult, *, method: str, solver: str) -> Plan:
        share = self.shares[found.choice]
        return plan_of(
            self.constrained.problem,
            self.constrained.cluster,
            choices[found.choice],
            found,
            order=[sum(share[:stage]) for stage in range(len(share))],
            memory_model=self.memory_model,
            kept=self.kept(share),
            method=method,
            microbatches_per_update=self.microbatches(share),
            solver=solver,
            planning_s=0.0,
            replicas=share,
        )


def with_replicas(
    instance: Instance, share: Sequence[int], sums: GradientSums, microbatches_per_update: int
) -> Instance:
    """Returns the instance with replicas: r copies are r times as fast, but sum their gradients."""
    r = np.array(share, dtype=float)
    return replace(
        instance,
        fixed_s=sums.of_stages_s(share) / microbatches_per_update,
        work_s=instance.work_s / r[:, None] + sums.of_nodes_s(share) / microbatches_per_update,
        again_s=instance.again_s / r[:, None],
        cost_s=instance.cost_s / r[None, :, None],
    )
