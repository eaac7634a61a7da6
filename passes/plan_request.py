"""How `split` is asked to plan, and the plan that is made for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from pd2bw_fx.actions import Shape, require_microbatches
from pd2bw_fx.arguments import (
    make_plain,
    require_choice,
    require_function,
    require_kind,
    require_replicas,
    require_search,
    require_whole_number,
)
from pd2bw_fx.cluster import Cluster
from pd2bw_fx.constraints import Constraints
from pd2bw_fx.costs import MemoryModel
from pd2bw_fx.errors import InfeasibleError, InputError, SolverError
from pd2bw_fx.plan import Plan, Progress, update_s
from pd2bw_fx.problem import Problem

from .arrange import CHUNKS, arrange, requested_shape, shape_again, share_out
from .check_given_plan import check_given_plan
from .partition import Deadline, NothingFaster, floor_s
from .schedule import BaPipe, Placing, method_of
from .solver import check_solver


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """The arguments of `split` that say how to plan, with the same names and meaning.

    It raises InputError for impossible arguments as soon as it is made, before a large model is traced and
    measured.
    """

    cluster: Cluster
    method: str | None
    num_stages: int | Literal["auto"] | None
    microbatches_per_update: int | None
    chunks: int | None
    replicas: int | Sequence[int] | Literal["auto"] | None
    memory_model: MemoryModel
    recompute: bool | Literal["auto"]
    constraints: Constraints | None
    plan: Plan | None
    solver: str
    max_gap: float
    time_limit_s: float
    progress: Callable[[Progress], None] | None

    def __post_init__(self) -> None:
        make_plain(self, *_NUMBERS)
        if self.microbatches_per_update is not None:
            require_microbatches(self.microbatches_per_update)
        for name in ("num_stages", "chunks"):
            value = getattr(self, name)
            if value is not None and not (name == "num_stages" and value == "auto"):
                require_whole_number(name, value)
        if not isinstance(self.replicas, str) or self.replicas != "auto":
            require_replicas(self.replicas, or_else=', or "auto"')
        require_kind("memory_model", self.memory_model, MemoryModel, "a MemoryModel")
        require_choice("recompute", self.recompute, True, False, "auto")
        if self.constraints is not None:
            require_kind("constraints", self.constraints, Constraints, "pd2bw_fx.Constraints")
        if self.plan is not None:
            require_kind("plan", self.plan, Plan, "a Plan, of Plan.loads(text) for one in a file,")
            self._require_no_other(self.plan)
        require_search(self.max_gap, self.time_limit_s)
        check_solver(self.solver)
        if self.progress is not None:
            require_function("progress", self.progress, "a function that takes the search's Progress")
        if self.replicas is not None and self.num_stages == "auto":
            raise InputError(f'num_stages="auto" with replicas={self.replicas!r}; leave one of them out')
        if self.plan is None and self.replicas is None and self.num_stages != "auto":
            self._shape(self.num_stages)

    def _require_no_other(self, plan: Plan) -> None:
        """Refuses arguments that disagree with the given plan."""
        if not plan.stages:
            return  # `check_given_plan` refuses it
        copies = [stage.replicas for stage in plan.stages]
        wished = (self.replicas,) * plan.num_stages if isinstance(self.replicas, int) else self.replicas
        chunks = plan.num_stages // len({stage.device for stage in plan.stages})
        again = all(stage.recompute for stage in plan.stages)
        said = {
            "method": (self.method, plan.method),
            "num_stages": (self.num_stages, plan.num_stages),
            "microbatches_per_update": (self.microbatches_per_update, plan.microbatches_per_update),
            "chunks": (self.chunks, chunks),
            "replicas": (None if wished in (None, "auto") else list(wished), copies),
            "recompute": (self.recompute or None, self.recompute if self.recompute == "auto" else again),
        }
        for name, (asked, planned) in said.items():
            if asked is not None and asked != planned:
                raise InputError(
                    f"{name}={asked!r} beside a plan that has {planned!r}; leave {name} out, edit the plan, "
                    "or leave the plan out to have another made"
                )

    @property
    def _method(self) -> str:
        return "2bw" if self.method is None else self.method

    @property
    def planning_options(self) -> dict[str, Any]:
        """The arguments of `partition` for memory, recomputation and constraints."""
        return {
            "memory_model": self.memory_model,
            "recompute": self.recompute,
            "constraints": self.constraints,
        }

    def explain_options(self, plan: Plan, shape: Shape) -> dict[str, Any]:
        """Returns the arguments of `explain` for a plan of this request. For bapipe they say whether messages
        overlap work, which depends on the order that it chose."""
        overlaps = isinstance(method_of(plan.method), BaPipe) and shape.slack > 0
        return self.planning_options | ({"overlap": True} if overlaps else {})

    def plan_and_shape(self, problem: Problem) -> tuple[Plan, Shape]:
        """Returns the fastest plan, or the given one with its costs, and the shape of its schedule."""
        if self.plan is not None:
            plan = check_given_plan(
                self.plan,
                problem,
                self.cluster,
                memory_model=self.memory_model,
                constraints=self.constraints,
            )
            return plan, shape_again(plan, self.cluster)
        if self.num_stages == "auto":
            return self._of_any_number(problem)
        if self.replicas is None:
            return self._arranged(problem, self.num_stages, Deadline(self.time_limit_s))
        return share_out(
            problem,
            self.cluster,
            self._method,
            self.replicas,
            num_stages=self.num_stages,
            microbatches_per_update=self.microbatches_per_update,
            options=self._options(Deadline(self.time_limit_s)),
            **self.planning_options,
        )

    def _of_any_number(self, problem: Problem) -> tuple[Plan, Shape]:
        """Returns the fastest plan over all numbers of stages, which share the time limit.

        The fastest plan takes least for a microbatch, with filling and draining shared out over those of an
        update. An update has as many microbatches as it would have if that number of stages were asked for.
        No plan is made of a number whose work alone takes as long as the best plan. Ctrl-C ends all of it.
        The bound is 0 where the time was too short for some number of stages.
        """
        started_s, deadline = time.perf_counter(), Deadline(self.time_limit_s)
        best: tuple[Plan, Shape] | None = None
        bounds_s: dict[int, float] = {}
        reason: InputError | InfeasibleError | SolverError | None = None
        is_round = method_of(self._method).placing is Placing.ROUND
        on_each = (self.chunks or CHUNKS) if is_round else 1
        for number in range(len(self.cluster), 0, -1):
            if deadline.is_stopped and best is not None:
                bounds_s[number * on_each] = 0.0
                break
            if best is None:
                share_s = deadline.left_s * (_FIRST_SHARE if number > 1 else 1.0)
            else:  # some time is left for the question whether the numbers that are open are any faster
                share_s = deadline.left_s / ((1 if best[0].drains else 3) * number)
            try:
                least_s = None if best is None else self._no_faster_s(problem, number, best[0])
                if least_s is not None:
                    bounds_s[number * on_each] = least_s
                    continue
                found = self._arranged(problem, number * on_each, Deadline(share_s, within=deadline))
            except (InputError, InfeasibleError) as error:  # of the method, or the memory
                reason = reason or error
                continue
            except SolverError as error:  # of the time: a plan of this number may be the fastest
                reason, bounds_s[number * on_each] = reason or error, 0.0
                continue
            bounds_s[number * on_each] = found[0].bound_s
            if best is None or _microbatch_s(found[0]) < _microbatch_s(best[0]):
                best = found
        if best is None:
            assert reason is not None
            raise reason
        if best[0].drains:  # another number may have a faster slowest stage, but longer updates
            return replace(best[0], planning_s=time.perf_counter() - started_s), best[1]
        (plan, shape), bound_s = self._proven(problem, best, bounds_s, deadline)
        planning_s = time.perf_counter() - started_s
        bound_s = min(bound_s, plan.bottleneck_s)
        return replace(plan, planning_s=planning_s, bound_s=bound_s, bound_of_any=True), shape

    def _no_faster_s(self, problem: Problem, number: int, best: Plan) -> float | None:
        """Returns a bound on the slowest of so many stages, by their work alone, if they take no less for a
        microbatch than the best plan; None if they may be faster."""
        if method_of(self._method).placing is not Placing.ROW:  # a device may have several stages
            return None
        work_s = np.array([np.add(block.forward_s, block.backward_s) for block in problem.blocks]).T
        slowest_s = floor_s(work_s, number)
        stages_s = max(slowest_s, float(work_s.min(axis=0).sum()))
        m = self._shape(number).microbatches_per_update
        least_s = update_s(m, slowest_s, stages_s, drains=best.drains) / m
        return slowest_s if least_s >= _microbatch_s(best) else None

    def _proven(
        self, problem: Problem, best: tuple[Plan, Shape], bounds_s: dict[int, float], deadline: Deadline
    ) -> tuple[tuple[Plan, Shape], float]:
        """Returns the best plan, and a bound on the plans of all numbers of stages, whose own are given.

        A number whose bound is lower than the best plan is asked for a faster one. Mostly there is none. That
        is known far sooner than how fast a plan of that number can be.
        """
        bounds_s = dict(bounds_s)
        for left, number in zip(range(len(bounds_s), 0, -1), sorted(bounds_s), strict=True):
            fastest_s = best[0].bottleneck_s
            if deadline.left_s == 0 or bounds_s[number] >= fastest_s * (1 - self.max_gap):
                continue
            share = Deadline(deadline.left_s / left, within=deadline)
            try:
                best = self._arranged(problem, number, share, faster_than_s=fastest_s)
                proven_s = best[0].bound_s
            except NothingFaster as nothing:
                proven_s = nothing.bound_s
            except SolverError:
                continue
            bounds_s[number] = max(bounds_s[number], proven_s)
        return best, min(bounds_s.values())

    def _arranged(
        self,
        problem: Problem,
        num_stages: int | None,
        deadline: Deadline,
        *,
        faster_than_s: float | None = None,
    ) -> tuple[Plan, Shape]:
        options = self._options(deadline) | {"faster_than_s": faster_than_s}
        shape = self._shape(num_stages)
        return arrange(problem, self.cluster, self._method, shape, options=options, **self.planning_options)

    def _options(self, deadline: Deadline) -> dict[str, Any]:
        return {
            "solver": self.solver,
            "max_gap": self.max_gap,
            "time_limit_s": max(deadline.left_s, _LEAST_TIME_S),
            "within": deadline,
            "progress": self.progress,
        }

    def _shape(self, num_stages: int | None) -> Shape:
        return requested_shape(
            self._method,
            self.cluster,
            num_stages=num_stages,
            microbatches_per_update=self.microbatches_per_update,
            chunks=self.chunks,
        )


def _microbatch_s(plan: Plan) -> float:
    return plan.update_s / plan.microbatches_per_update


_FIRST_SHARE = 2 / 3  # of the time limit, for the first of all numbers of stages
_LEAST_TIME_S = 1e-3  # enough for a first plan where nothing has to be searched for
_NUMBERS = (
    "num_stages", "microbatches_per_update", "chunks", "replicas", "max_gap", "time_limit_s",
)  # fmt: skip
