"""Blocks: every operator once, no cycle, and every cut of them is legal."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import networkx as nx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from transformers import GPT2Config, GPT2LMHeadModel

import pd2bw_fx
from pd2bw_fx.cluster import Cluster
from pd2bw_fx.constraints import Constraints
from pd2bw_fx.costs import Costs
from pd2bw_fx.device import Device
from pd2bw_fx.errors import InputError
from pd2bw_fx.graph import OperatorGraph
from pd2bw_fx.models import MODELS, build
from pd2bw_fx.passes.coarsen import coarsen
from pd2bw_fx.passes.normalise import normalise
from pd2bw_fx.passes.profile import profile
from pd2bw_fx.passes.trace import trace
from pd2bw_fx.problem import Problem
from pd2bw_fx.program import ProgramInterpreter
from tests.stages import split_of_our_own

CLUSTER = Cluster.uniform(2, memory_bytes="8 GiB")


def traced(model: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[OperatorGraph, Costs]:
    result = trace(model, inputs, {})
    graph = normalise(result)
    return graph, profile(graph, result.examples, device=CLUSTER.devices[0], method="analytic")


def cuttable(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A model in double precision without dropout, that two runs may be compared."""
    if name == "hf_gpt2":
        config = GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=64, n_positions=16, bos_token_id=0)
        config.eos_token_id = config.pad_token_id = 0
        model: nn.Module = GPT2LMHeadModel(config)
        tokens = torch.randint(64, (2, 8))
        inputs: tuple[tuple[Any, ...], dict[str, Any]] = ((), {"input_ids": tokens, "labels": tokens})
    else:
        model = build(name)
        inputs = (), {}
    model = model.double()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "dropout") and isinstance(module.dropout, float):
            module.dropout = 0.0
    if name == "hf_gpt2":
        return model, *inputs
    return model, model.example_inputs(2), {}  # type: ignore[operator]


class Coarsened(NamedTuple):
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: dict[str, Tensor]
    graph: OperatorGraph
    problem: Problem


@functools.cache
def coarsened(name: str) -> Coarsened:
    torch.manual_seed(0)
    model, args, kwargs = cuttable(name)
    result = trace(model, args, kwargs)
    graph = normalise(result)
    costs = profile(graph, result.examples, device=CLUSTER.devices[0], method="analytic")
    inputs = {name: result.examples[name] for name in graph.inputs}
    return Coarsened(model, args, kwargs, inputs, graph, coarsen(graph, costs, CLUSTER))


def problem_of(name: str) -> tuple[OperatorGraph, Problem]:
    found = coarsened(name)
    return found.graph, found.problem


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


class TwoStages(ProgramInterpreter):
    """Runs one side of a cut: its own operators, replicable ones, and nothing else but what it was sent."""

    def __init__(self, graph: OperatorGraph, own: set[str], received: dict[str, Tensor]) -> None:
        assert graph.fx is not None
        super().__init__(graph.fx)
        self.graph_operators = graph.operators
        self.own = own
        self.received = received

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "output":
            return None
        if n.op.startswith("call_") and n.name not in self.own:
            if n.name in self.received:
                return self.received[n.name]
            if not self.graph_operators[n.name].is_replicable:
                return None  # the other side's: whoever reads it here fails
        return super().run_node(n)

    def values(self, inputs: dict[str, Tensor]) -> dict[str, Any]:
        self.garbage_collect_values = False
        self.run(*inputs.values(), enable_io_processing=False)
        return {node.name: value for node, value in self.env.items()}


def cut_run(graph: OperatorGraph, problem: Problem, cut: int, inputs: dict[str, Tensor]) -> Tensor:
    """The loss with blocks[:cut] on one side and the rest on the other; gradients end up in parameters."""
    sides = problem.blocks[:cut], problem.blocks[cut:]
    first, second = ({name for block in side for name in block.operators} for side in sides)
    front_blocks, back_blocks = ({block.name for block in side} for side in sides)
    front = TwoStages(graph, first, {}).values(inputs)
    crossing = [v for v in problem.values if v.producer in front_blocks and back_blocks & {*v.consumers}]
    received = {
        value.name: front[value.name].detach().clone().requires_grad_(value.gradient_bytes > 0)
        for value in crossing
    }
    for value in crossing:
        assert value.bytes == received[value.name].numel() * received[value.name].dtype.itemsize
    back = TwoStages(graph, second, received).values(inputs)
    loss_value = next(output.value for output in graph.outputs if output.name == graph.loss)
    loss: Tensor = back[loss_value]
    loss.backward()  # type: ignore[no-untyped-call]
    sent = [(front[name], tensor.grad) for name, tensor in received.items() if tensor.grad is not None]
    if sent:
        torch.autograd.backward([tensor for tensor, _ in sent], [gradient for _, gradient in sent])
    return loss.detach()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", [*sorted(MODELS), "hf_gpt2"])
def test_every_cut_of_the_blocks_gives_the_eager_models_loss_and_gradients(name: str) -> None:
    model, args, kwargs, inputs, graph, problem = coarsened(name)
    out = model(*args, **kwargs)
    loss = out if isinstance(out, Tensor) else out.loss
    loss.backward()
    expected = gradients(model)

    last = len(problem.blocks) - 1
    for cut in sorted({1, last, *range(2, last, max(1, last // 8))}):
        model.zero_grad()
        cut_loss = cut_run(graph, problem, cut, inputs)

        torch.testing.assert_close(cut_loss, loss.detach(), rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(gradients(model), expected, rtol=1e-9, atol=1e-12)


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


class Pooler(nn.Module):
    """Begins with a view of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.dense(hidden[:, 0]).square().mean()


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.pooler = nn.Linear(8, 8), Pooler()

    def forward(self, x: Tensor) -> Tensor:
        return self.pooler(self.encoder(x))


def test_a_module_that_begins_with_a_view_can_be_on_another_stage_than_what_it_views() -> None:
    apart = Constraints(stage_of={"encoder": 0, "pooler": 1}, whole=("pooler",))
    pipe = pd2bw_fx.split(Pooled(), torch.randn(4, 3, 8), cluster=2, constraints=apart, costs="analytic")

    assert "return self.dense(hidden[:, 0]).square().mean()" in pipe.stages[1].source
    pipe.verify()


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
    assert (statistics.trainable_bytes, statistics.frozen_bytes) == (0, 8 * 8)


def test_missing_costs_are_named() -> None:
    graph, costs = traced(Shared(), (torch.randn(3, 8),))
    incomplete = Costs({}, costs.device, costs.microbatch_size, costs.origin)

    with pytest.raises(InputError, match="know nothing of operator"):
        coarsen(graph, incomplete, CLUSTER)


class Unread(nn.Module):
    """A branch that draws and is read by nobody, and a count that is only written."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.unread = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        F.dropout(self.unread(x))
        self.count.add_(1)
        return F.dropout(hidden).square().mean()


@pytest.mark.parametrize("num_stages", [2, 3])
def test_what_no_output_depends_on_is_no_stage_of_its_own(num_stages: int) -> None:
    pipe = pd2bw_fx.split(Unread(), torch.randn(3, 4), cluster=num_stages, costs="analytic", check="full")

    assert all(program.outputs for program in pipe.programs)


def test_a_model_whose_outputs_need_no_parameter_is_refused() -> None:
    class Square(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.square().mean()

    with pytest.raises(InputError, match="outputs depend on its inputs alone and on no parameter"):
        pd2bw_fx.split(Square(), torch.randn(3, 4), cluster=1, costs="analytic")


def test_a_model_that_returns_no_tensor_is_refused() -> None:
    class Told(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> float:
            return self.linear(x).mean().item()

    with pytest.raises(InputError, match=r"Told returns no tensor; .* not what \.item\(\) makes of it"):
        pd2bw_fx.split(Told(), torch.randn(3, 4), cluster=1, costs="analytic")


def test_a_device_that_states_its_rates_is_estimated_by_them() -> None:
    model = build("mlp")
    first, *others = Cluster.uniform(4).devices
    devices = (
        first,
        replace(others[0], flops_per_s=first.flops_per_s * 1000, memory_bytes_per_s=1e15),
        replace(others[1], memory_bytes_per_s=first.memory_bytes_per_s / 4, speed=7.0),
        replace(others[2], speed=2.0),
    )
    cluster = replace(Cluster.uniform(4), devices=devices)
    pipe = pd2bw_fx.split(model, cluster=1, costs="analytic", check=False)

    problem = coarsen(pipe.graph, pipe.costs, cluster)

    linear = next(b for b in problem.blocks if "linear" in b.operators[0])
    cost = pipe.costs.operators[linear.operators[0]]
    flops, num_bytes = cost.forward_work
    assert flops > 0
    assert cost.forward_s == pytest.approx(5e-6 + first.roof_s(flops, num_bytes))
    assert linear.forward_s[1] == pytest.approx(5e-6 + devices[1].roof_s(flops, num_bytes), rel=1e-6)
    assert linear.forward_s[2] == pytest.approx(5e-6 + devices[2].roof_s(flops, num_bytes), rel=1e-6)
    assert linear.forward_s[2] > linear.forward_s[0]
    assert linear.forward_s[3] == linear.forward_s[0] / 2
    assert Costs.from_json(json.loads(json.dumps(pipe.costs.to_json()))) == pipe.costs


def test_a_device_of_a_cluster_file_that_states_no_rates_goes_by_its_speed(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(
        "bytes_per_s = [[0, 1e9], [1e9, 0]]\nlatency_s = [[0, 0], [0, 0]]\n"
        '[[device]]\nname = "a"\nmemory = "1 GiB"\nflops_per_s = 60e12\nmemory_bytes_per_s = 1e12\n'
        '[[device]]\nname = "b"\nmemory = "1 GiB"\nspeed = 0.01\n'
    )
    pipe = split_of_our_own("mlp", cluster=file)
    block = coarsen(pipe.graph, pipe.costs, pipe.cluster).blocks[0]
    assert block.forward_s[1] == pytest.approx(100 * block.forward_s[0])


def test_costs_that_are_no_numbers_are_refused() -> None:
    pipe = split_of_our_own("mlp", cluster=2)
    wrong: Any = "1 ms"
    operators = {name: replace(cost, forward_s=wrong) for name, cost in pipe.costs.operators.items()}
    costs = replace(pipe.costs, operators=operators)
    with pytest.raises(InputError, match=r"operator '\w+': forward_s is '1 ms'; a number of seconds"):
        pd2bw_fx.split(build("mlp"), cluster=2, costs=costs, check=False)
