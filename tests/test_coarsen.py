"""Blocks: every operator once, no cycle, and every cut of them is legal."""

from __future__ import annotations

import networkx as nx
import pytest
import torch
from torch import Tensor, nn

from pd2bw_fx.cluster import Cluster, Device
from pd2bw_fx.costs import Costs
from pd2bw_fx.errors import InputError
from pd2bw_fx.graph import OperatorGraph
from pd2bw_fx.models import MODELS, build
from pd2bw_fx.passes.coarsen import coarsen
from pd2bw_fx.passes.normalise import normalise
from pd2bw_fx.passes.profile import profile
from pd2bw_fx.passes.trace import trace
from pd2bw_fx.problem import Problem

CLUSTER = Cluster.uniform(2, memory_bytes="8 GiB")


def traced(model: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[OperatorGraph, Costs]:
    result = trace(model, inputs, {})
    graph = normalise(result)
    return graph, profile(graph, result.examples, device=CLUSTER.devices[0], method="analytic")


def problem_of(name: str) -> tuple[OperatorGraph, Problem]:
    model = build(name)
    graph, costs = traced(model, model.example_inputs())  # type: ignore[operator]
    return graph, coarsen(graph, costs, CLUSTER)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_blocks_hold_every_operator_once_in_an_order_without_way_back(name: str) -> None:
    graph, problem = problem_of(name)

    placed = [operator for block in problem.blocks for operator in block.operators]
    position = {block.name: index for index, block in enumerate(problem.blocks)}

    assert sorted(placed) == sorted(n for n, o in graph.operators.items() if not o.is_replicable)
    for value in problem.values:
        assert all(position[value.producer] < position[consumer] for consumer in value.consumers)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_value_that_a_block_needs_from_another_is_named(name: str) -> None:
    graph, problem = problem_of(name)
    block_of = {operator: block.name for block in problem.blocks for operator in block.operators}
    sent = {(value.name, consumer) for value in problem.values for consumer in value.consumers}

    needed = {
        (read, block_of[reader])
        for reader in block_of
        for read in graph.operators[reader].reads
        if read in block_of and block_of[read] != block_of[reader]
    }

    assert needed == sent


def test_views_stay_with_what_they_view_and_statistics_with_their_norm() -> None:
    graph, problem = problem_of("resnet")
    block_of = {operator: block.name for block in problem.blocks for operator in block.operators}

    for operator in graph.operators.values():
        if operator.name not in block_of:
            continue
        if operator.is_view and operator.reads and operator.reads[0] in block_of:
            assert block_of[operator.name] == block_of[operator.reads[0]]
    groups: dict[str, set[str]] = {}
    for operator in graph.operators.values():
        if operator.memory_group is not None:
            groups.setdefault(operator.memory_group, set()).add(block_of[operator.name])
    assert groups
    assert all(len(blocks) == 1 for blocks in groups.values())


class Shared(nn.Module):
    """A view of x is added to what is made of x elsewhere: joining the view must not make a cycle."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        base = self.a(x)
        other = self.b(base)
        return (base.view(-1, 2, 4) + other.view(-1, 2, 4)).sum()


def test_contraction_leaves_no_cycle() -> None:
    graph, costs = traced(Shared(), (torch.randn(3, 8),))

    problem = coarsen(graph, costs, CLUSTER)

    quotient = nx.DiGraph((value.producer, c) for value in problem.values for c in value.consumers)
    assert nx.is_directed_acyclic_graph(quotient)


def test_a_faster_device_takes_less_time_and_costs_add_up() -> None:
    graph, costs = traced(Shared(), (torch.randn(3, 8),))
    devices = (Device("slow", 2**30, speed=0.5), Device("fast", 2**30, speed=2.0))
    cluster = Cluster(devices, ((0, 1e9), (1e9, 0)), ((0, 0), (0, 0)))

    problem = coarsen(graph, costs, cluster)

    slow = sum(block.forward_s[0] for block in problem.blocks)
    fast = sum(block.forward_s[1] for block in problem.blocks)
    placed = [o.name for o in graph.operators.values() if not o.is_replicable]
    assert slow == pytest.approx(4 * fast)
    assert slow == pytest.approx(sum(costs.operators[name].forward_s for name in placed) / 0.5)


def test_trainable_parameters_and_buffers_are_counted_apart() -> None:
    graph, problem = problem_of("resnet")

    weight = problem.parameters["stem.weight"]
    statistics = problem.parameters["stem_norm.running_mean"]

    assert weight.trainable_bytes == graph.parameters["stem.weight"].spec.num_bytes
    assert weight.frozen_bytes == 0
    assert (statistics.trainable_bytes, statistics.frozen_bytes) == (0, 8 * 4)


def test_missing_costs_are_named() -> None:
    graph, costs = traced(Shared(), (torch.randn(3, 8),))
    incomplete = Costs({}, costs.device, costs.microbatch_size, costs.origin)

    with pytest.raises(InputError, match="know nothing of operator"):
        coarsen(graph, incomplete, CLUSTER)
