"""What `split` is asked for, and the plan that comes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pd2bw_fx.actions import Shape
from pd2bw_fx.arguments import (
    require_choice,
    require_function,
    require_kind,
    require_search,
    require_whole_number,
)
from pd2bw_fx.cluster import Cluster
from pd2bw_fx.constraints import Constraints
from pd2bw_fx.costs import MemoryModel
from pd2bw_fx.plan import Plan, Progress
from pd2bw_fx.problem import Problem

from .arrange import arrange, share_out, wished_shape
from .partition import check_plan
from .schedule import shape_of
from .solver import check_solver


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """How to plan, with the names and the meaning that `split` gives them.

    Raises InputError for what cannot be as soon as it is made: before a large model is traced and measured.
    """

    cluster: Cluster
    method: str
    num_stages: int | None
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
        for name in ("num_stages", "microbatches_per_update", "chunks"):
            if (value := getattr(self, name)) is not None:
                require_whole_number(name, value)
        if isinstance(self.replicas, str):
            require_choice("replicas", self.replicas, "auto")
        require_kind("memory_model", self.memory_model, MemoryModel, "a MemoryModel")
        require_choice("recompute", self.recompute, True, False, "auto")
        if self.constraints is not None:
            require_kind("constraints", self.constraints, Constraints, "pd2bw_fx.Constraints")
        if self.plan is not None:
            require_kind("plan", self.plan, Plan, "a Plan, of Plan.loads(text) for one in a file,")
        require_search(self.max_gap, self.time_limit_s)
        check_solver(self.solver)
        if self.progress is not None:
            require_function("progress", self.progress, "a function that takes the search's Progress")
        if self.plan is None and self.replicas is None:
            self._shape()

    @property
    def setting(self) -> dict[str, Any]:
        """What a plan must be explained with, besides the problem."""
        return {
            "memory_model": self.memory_model,
            "recompute": self.recompute,
            "constraints": self.constraints,
        }

    def granted(self, problem: Problem) -> tuple[Plan, Shape]:
        """The fastest plan, or the one that is given with what it costs, and its schedule's shape."""
        if self.plan is not None:
            plan = check_plan(
                self.plan,
                problem,
                self.cluster,
                memory_model=self.memory_model,
                constraints=self.constraints,
            )
            return plan, shape_of(plan, plan.method, microbatches_per_update=plan.microbatches_per_update)
        options = {
            "solver": self.solver,
            "max_gap": self.max_gap,
            "time_limit_s": self.time_limit_s,
            "progress": self.progress,
        }
        if self.replicas is None:
            return arrange(problem, self.cluster, self.method, self._shape(), options=options, **self.setting)
        return share_out(
            problem,
            self.cluster,
            self.method,
            self.replicas,
            num_stages=self.num_stages,
            microbatches_per_update=self.microbatches_per_update,
            options=options,
            **self.setting,
        )

    def _shape(self) -> Shape:
        return wished_shape(
            self.method,
            self.cluster,
            num_stages=self.num_stages,
            microbatches_per_update=self.microbatches_per_update,
            chunks=self.chunks,
        )
