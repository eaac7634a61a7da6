"""A model put through all passes, up to the comparison of its stages with the model itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from pd2bw_fx.cluster import Cluster
from pd2bw_fx.graph import OperatorGraph
from pd2bw_fx.passes.coarsen import coarsen
from pd2bw_fx.passes.codegen import generate
from pd2bw_fx.passes.normalise import normalise
from pd2bw_fx.passes.partition import partition
from pd2bw_fx.passes.profile import profile
from pd2bw_fx.passes.trace import trace
from pd2bw_fx.passes.verify import Sides, Verification, verify
from pd2bw_fx.plan import Plan
from pd2bw_fx.program import tensors
from pd2bw_fx.stage import StageProgram
from pd2bw_fx.traced import Traced


@dataclass(frozen=True, slots=True)
class Through:
    """A model that has gone the whole way."""

    traced: Traced
    graph: OperatorGraph
    plan: Plan
    programs: tuple[StageProgram, ...]
    verification: Verification


def put_through(
    model: nn.Module, inputs: dict[str, Any] | tuple[Any, ...], num_stages: int = 2, tracer: str = "auto"
) -> Through:
    """All passes up to the comparison of the stages with the model; raises what the first to fail raises."""
    cluster = Cluster.uniform(num_stages)
    args, kwargs = (inputs, {}) if isinstance(inputs, tuple) else ((), inputs)
    traced = trace(model, args, kwargs, tracer=tracer)
    graph = normalise(traced)
    costs = profile(graph, traced.examples, device=cluster.devices[0], method="analytic")
    plan = partition(coarsen(graph, costs, cluster), cluster, num_stages=num_stages)
    programs = generate(graph, plan)
    assert traced.call is not None
    sides = Sides(graph, plan, programs, traced.examples, model, traced.call)
    verification = verify(sides, tensors(graph))
    return Through(traced, graph, plan, programs, verification)
