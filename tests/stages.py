"""Makes generated stages of a model, for the tests of what they compute and how they read."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pd2bw_fx
from pd2bw_fx.cluster import Cluster
from pd2bw_fx.costs import Costs, StageMemory
from pd2bw_fx.graph import OperatorGraph
from pd2bw_fx.models import build
from pd2bw_fx.passes.coarsen import coarsen
from pd2bw_fx.passes.codegen import generate
from pd2bw_fx.passes.normalise import normalise
from pd2bw_fx.passes.partition import partition
from pd2bw_fx.passes.profile import profile
from pd2bw_fx.passes.trace import trace
from pd2bw_fx.passes.verify import Sides, Verification, verify
from pd2bw_fx.pipeline import Pipeline
from pd2bw_fx.plan import Plan, StagePlan
from pd2bw_fx.problem import Problem
from pd2bw_fx.program import tensors
from pd2bw_fx.stage import StageProgram, build_module
from pd2bw_fx.traced import Traced

ROOT = Path(__file__).parent.parent
CLUSTERS = {count: Cluster.uniform(count) for count in (1, 2, 3)}


@dataclass(frozen=True, slots=True)
class Case:
    model: nn.Module
    traced: Traced
    graph: OperatorGraph
    costs: Costs  # which devices of all CLUSTERS have alike
    problem: Problem


def case_of(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, tracer: str = "auto"
) -> Case:
    traced = trace(model, args, kwargs or {}, tracer=tracer)
    graph = normalise(traced)
    costs = profile(graph, traced.examples, device=CLUSTERS[1].devices[0], method="analytic")
    return Case(model, traced, graph, costs, coarsen(graph, costs, CLUSTERS[1]))


@functools.cache
def of_our_own(name: str) -> Case:
    torch.manual_seed(0)
    model = build(name).double()
    inputs = [x.double() if x.is_floating_point() else x for x in model.example_inputs(batch_size=3)]  # type: ignore[operator]
    return case_of(model, inputs)


@functools.cache
def _pipeline_of_our_own(name: str) -> Pipeline:
    torch.manual_seed(0)
    return pd2bw_fx.split(build(name), cluster=1, costs="analytic", check=False)


def split_of_our_own(name: str, **options: Any) -> Pipeline:
    """Splits one of our models at estimated costs, for tests of its plan: it is traced only once."""
    return pd2bw_fx.split(_pipeline_of_our_own(name), **{"costs": "analytic", "check": False, **options})


def planned(case: Case, num_stages: int) -> Plan:
    cluster = CLUSTERS[num_stages]
    return partition(coarsen(case.graph, case.costs, cluster), cluster, num_stages=num_stages)


def by_hand(case: Case, stage_of_block: Mapping[str, int], device_name: str = "cpu:0") -> Plan:
    """Makes a plan from the stage of each block; stages without a block are left out."""
    numbers = {stage: i for i, stage in enumerate(sorted(set(stage_of_block.values())))}
    members: list[list[str]] = [[] for _ in numbers]
    for block in case.problem.blocks:
        members[numbers[stage_of_block[block.name]]] += block.operators
    position = {name: i for i, name in enumerate(case.graph.operators)}
    stages = tuple(
        StagePlan(
            stage=stage, device=stage, device_name=device_name,
            operators=tuple(sorted(names, key=position.__getitem__)), parameters=(),
            forward_s=0.0, backward_s=0.0, send_s=0.0, receive_s=0.0,
            memory=StageMemory(0, 0, 0, 0, 0, 0), memory_limit_bytes=0, microbatches_in_flight=1,
        )
        for stage, names in enumerate(members)
    )  # fmt: skip
    return Plan(
        stages=stages, transfers=(), bottleneck_s=0.0, bound_s=0.0, method="2bw",
        microbatches_per_update=len(stages), solver="by hand", planning_s=0.0,
        fingerprint=case.graph.fingerprint(),
    )  # fmt: skip


def compared(case: Case, plan: Plan, programs: Sequence[StageProgram] | None = None) -> Verification:
    programs = generate(case.graph, plan) if programs is None else programs
    assert case.traced.call is not None
    sides = Sides(case.graph, plan, programs, case.traced.examples, case.model, case.traced.call)
    return verify(sides, tensors(case.graph))


def run_stages(
    case: Case, programs: Sequence[StageProgram], inputs: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Runs a forward through the stages; returns the model's outputs by name."""
    values: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}
    for program in programs:
        module = build_module(program, tensors(case.graph))
        arguments = [inputs[p.value] if p.source is None else values[p.value] for p in program.inputs]
        returned = module(*arguments)
        for port, value in zip(
            program.outputs, (returned,) if isinstance(returned, Tensor) else returned, strict=True
        ):
            values[port.value] = value
            if port.model_output is not None:
                outputs[port.model_output] = value
    return outputs


def ruff_faults(folder: Path) -> str:
    ruff = [sys.executable, "-m", "ruff"]
    config = ["--config", str(ROOT / "pyproject.toml"), "--no-cache"]
    lint = subprocess.run([*ruff, "check", "-q", *config, str(folder)], capture_output=True, text=True)
    layout = subprocess.run(
        [*ruff, "format", "--diff", "-q", *config, str(folder)], capture_output=True, text=True
    )
    return lint.stdout + lint.stderr + layout.stdout + layout.stderr
