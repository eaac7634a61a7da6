"""The search: an upper bound first, then one feasibility program after another at a shrinking target.

Over the device orders: each is either refuted at the target or gives a better plan, which lowers the target
for all. What is refuted at a larger target stays refuted at a smaller one, so one pass over the orders ends
with a bound that holds for all of them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pd2bw_fx.errors import SolverError
from pd2bw_fx.passes.solver import Status

from .instance import Instance, Integers, evaluate, respects_edges
from .intervals import best_cut
from .program import FeasibilityProgram, Windows
from .windows import Reach, windows_for

# What solvers keep their rows to, relative: no bound is claimed closer than this.
_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """The best assignment, on which of the instances, and a bound that no assignment on any of them beats."""

    choice: int
    stage_of: Integers
    bottleneck_s: float
    bound_s: float


class Deadline:
    def __init__(self, time_limit_s: float) -> None:
        self._end = time.perf_counter() + time_limit_s

    @property
    def left_s(self) -> float:
        return max(0.0, self._end - time.perf_counter())


def search(instances: Sequence[Instance], *, solver: str, max_gap: float, deadline: Deadline) -> Found | None:
    """The fastest assignment over all instances (one problem under several device orders).

    None where it is proven that no assignment of any instance fits in memory. Raises SolverError where the
    time ran out before the first assignment was found.
    """
    reach = Reach(instances[0].num_nodes, instances[0].edges)
    best = _Incumbent()
    firsts = [_first_assignment(instance) for instance in instances]
    for choice, stage_of in enumerate(firsts):
        if stage_of is not None:
            best.offer(choice, stage_of, evaluate(instances[choice], stage_of).bottleneck_s)
    bound_s = np.inf
    order = sorted(range(len(instances)), key=lambda c: best.seen.get(c, np.inf))
    for choice in order:
        while True:
            target_s = best.bottleneck_s * (1.0 - max(max_gap, _TOLERANCE))
            if best.bottleneck_s == 0:
                return Found(best.choice, best.assignment(), 0.0, 0.0)
            status, stage_of = _ask(instances[choice], target_s, reach, solver, deadline)
            if status is Status.INFEASIBLE:
                bound_s = min(bound_s, target_s)
                break
            if stage_of is None:
                bound_s = 0.0
                break
            best.offer(choice, stage_of, evaluate(instances[choice], stage_of).bottleneck_s)
        if bound_s == 0.0:
            break
    if best.stage_of is None:
        if bound_s == 0.0:
            raise SolverError("the time limit passed before any plan was found; raise time_limit_s")
        return None
    bound_s = max(min(bound_s, best.bottleneck_s), min(lower_bound_s(i) for i in instances))
    return Found(best.choice, best.assignment(), best.bottleneck_s, min(bound_s, best.bottleneck_s))


class _Incumbent:
    def __init__(self) -> None:
        self.bottleneck_s = np.inf
        self.choice = -1
        self.stage_of: Integers | None = None
        self.seen: dict[int, float] = {}

    def offer(self, choice: int, stage_of: Integers, bottleneck_s: float) -> None:
        self.seen[choice] = min(bottleneck_s, self.seen.get(choice, np.inf))
        if bottleneck_s < self.bottleneck_s:
            self.bottleneck_s, self.choice, self.stage_of = bottleneck_s, choice, stage_of

    def assignment(self) -> Integers:
        assert self.stage_of is not None
        return self.stage_of


def lower_bound_s(instance: Instance) -> float:
    """No plan is faster: the largest node, and all work spread evenly over stages by their speed."""
    fastest = instance.work_s.min(axis=0)
    return float(max(fastest.max(initial=0.0), fastest.sum() / instance.num_stages))


def _first_assignment(instance: Instance) -> Integers | None:
    stage_of = best_cut(instance, range(instance.num_nodes))
    if stage_of is None or not evaluate(instance, stage_of).fits:
        return None
    return stage_of


def _ask(
    instance: Instance, target_s: float, reach: Reach, solver: str, deadline: Deadline
) -> tuple[Status, Integers | None]:
    windows: Windows | None = windows_for(instance, target_s, reach)
    if windows is None:
        return Status.INFEASIBLE, None
    program = FeasibilityProgram(instance, target_s, windows)
    while True:
        status, stage_of = program.solve(solver=solver, time_limit_s=deadline.left_s)
        if stage_of is None:
            return status, None
        loads = evaluate(instance, stage_of)
        if loads.bottleneck_s > target_s * (1 + _TOLERANCE) or not respects_edges(instance, stage_of):
            raise SolverError(
                f"{solver} returned an assignment that breaks the program it solved "
                f"({loads.bottleneck_s:g} s against {target_s:g} s); try another solver"
            )
        if loads.fits:
            return status, stage_of
        # Too large by less than the solver's tolerance, a few bytes in a gigabyte: not this one, then.
        program.exclude(stage_of)
