"""The normal form, operator by operator: it computes the same, and says the truth of each."""

from __future__ import annotations

import copy
import keyword
import logging
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from pd2bw_fx.graph import Operator, OperatorGraph
from pd2bw_fx.models.gpt import GPT, GPTConfig
from pd2bw_fx.passes.codegen import generate
from pd2bw_fx.passes.normalise import normalise, tensors
from pd2bw_fx.passes.trace import trace
from pd2bw_fx.program import ProgramInterpreter
from tests.exact import Batch, assert_same, graph_of
from tests.stages import case_of, compared, planned

# Each writes in place into what it is given, a tensor of (batch, 6), or into what it makes of it.


def _through_views_of_views(y: Tensor) -> Tensor:
    pairs = y.view(-1, 2, 3)
    first = pairs[:, 0]
    pairs.mul_(3)
    first.add_(1)
    y[:, 5] = first[:, 0]
    return y.sum() + pairs.sum() + first.sum()


def _through_a_transpose(y: Tensor) -> Tensor:
    y.t()[0] = 7.0
    return y.sum()


def _through_slices(y: Tensor) -> Tensor:
    doubled = (y * 2).detach()
    left, middle = y[:, 0:2], y[:, 2:4]
    left.mul_(doubled[:, :2])
    middle += left
    return y.sum() + middle.sum()


def _through_a_select(y: Tensor) -> Tensor:
    y.select(1, 3).neg_()
    return y.sum()


def _through_a_permuted_view(y: Tensor) -> Tensor:
    y.view(-1, 2, 3).permute(2, 0, 1)[1].mul_(2)
    return y.sum()


def _to_diagonals(y: Tensor) -> Tensor:
    square = y.t() @ y
    square.diagonal(1).mul_(2)
    square.fill_diagonal_(0.5)
    return (y @ square.triu_().detach() + square.view(2, 3, 6).diagonal(-1, 1, 2).sum()).sum()


def _to_one_of_several_views(y: Tensor) -> Tensor:
    weights = y.new_zeros(6)
    weights.split(3)[1].add_(1)
    weights.unbind(0)[0].add_(2)
    return (y * weights).sum()


def _to_a_mask(y: Tensor) -> Tensor:
    mask = torch.zeros(3, dtype=y.dtype, device=y.device)
    mask[1] = 1
    mask.masked_fill_(mask > 0, 4.0)
    return (mask * y[:, :3]).sum()


def _to_a_narrower_type(y: Tensor) -> Tensor:
    narrow = torch.ones_like(y[:, 0], dtype=torch.long).float()
    narrow[:, None].mul_(y.detach()[:, :1])
    return narrow.sum() + y.sum()


def _where_values_are_large(y: Tensor) -> Tensor:
    clipped = y.clone()
    clipped[clipped > 1] = 0.5
    clipped.clamp_(max=3)
    return clipped.pow(2).sum()


_WRITES = {
    write.__name__.removeprefix("_"): write
    for write in (
        _through_views_of_views,
        _through_a_transpose,
        _through_slices,
        _through_a_select,
        _through_a_permuted_view,
        _to_diagonals,
        _to_one_of_several_views,
        _to_a_mask,
        _to_a_narrower_type,
        _where_values_are_large,
    )
}


class _Writing(nn.Module):
    """Writes in place to activations and to buffers; a result for each kind of write, and their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("memory", torch.zeros(6))
        self.register_buffer("calls", torch.zeros(()), persistent=False)
        self.steps = torch.arange(6.0)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.calls = self.calls + 1
        hidden = F.relu(self.norm(self.norm(self.linear(x))), inplace=True)
        results = {name: write(hidden + 0) for name, write in _WRITES.items()}
        y = hidden + 0
        results["one_after_another"] = sum((write(y) for write in _WRITES.values()), (y * self.steps).sum())
        with torch.no_grad():
            self.memory[:3] += y.mean(0)[:3]
            self.memory.mul_(0.9)
        results["to_a_buffer"] = (y * self.memory).sum()
        return {"loss": sum(results.values(), torch.zeros(())) / 100} | results


def _writing_batch(batch_size: int) -> Batch:
    return {"x": torch.randn(batch_size, 4).double()}


@pytest.fixture(scope="module")
def writing() -> tuple[_Writing, OperatorGraph]:
    torch.manual_seed(0)
    model = _Writing().double().train()
    return model, graph_of(model, _writing_batch(5))


@pytest.mark.parametrize("name", [*_WRITES, "one_after_another", "to_a_buffer"])
def test_an_in_place_write_becomes_functional(name: str, writing: tuple[_Writing, OperatorGraph]) -> None:
    model, graph = writing
    assert graph.fx is not None
    names = [output.name for output in graph.outputs]
    for batch_size in (5, 3, 2):
        batch = _writing_batch(batch_size)
        eager = copy.deepcopy(model)

        result = dict(zip(names, graph.fx(batch["x"]), strict=True))[name]

        expected = eager(**batch)[name]
        assert torch.equal(result, expected)
        gradients = torch.autograd.grad(expected, eager.parameters())
        for found, gradient in zip(torch.autograd.grad(result, model.parameters()), gradients, strict=True):
            assert torch.equal(found, gradient)


def test_in_place_writes_are_left_to_buffers_alone(writing: tuple[_Writing, OperatorGraph]) -> None:
    model, graph = writing

    written = {name: op.writes_buffers for name, op in graph.operators.items() if op.memory_group is not None}
    in_place = [op for op in graph.operators.values() if op.target.rpartition(".")[0].endswith("_")]
    assert all(op.writes_buffers for op in in_place)
    assert {buffer for buffers in written.values() for buffer in buffers} == {
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
        "memory",
        "calls",
    }
    for batch_size in (5, 3, 2):  # with gradients of 1e4, which have many terms, summed in another order
        assert_same(model, graph, _writing_batch(batch_size), tolerance=1e-9)


def test_a_write_without_a_functional_form_keeps_its_operators_together() -> None:
    class Strided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            strided = y.as_strided((4,), (5,))
            strided.zero_()
            return (y * 2).sum() + strided.sum()

    torch.manual_seed(0)
    model = Strided()
    graph = graph_of(model, {"x": torch.randn(4, 4)})

    group = {name for name, operator in graph.operators.items() if operator.memory_group is not None}
    assert group == {"linear", "as_strided", "zero_"}
    assert len({graph.operators[name].memory_group for name in group}) == 1
    assert_same(model, graph, {"x": torch.randn(4, 4)})


def test_values_of_a_size_that_depends_on_data_stay_together() -> None:
    class Picking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.linear(x)
            return hidden[hidden > 0].exp().sum() * 2

    model = Picking()
    graph = graph_of(model, {"x": torch.randn(4, 2)})

    together = [op.target for op in graph.operators.values() if op.memory_group is not None]
    assert together == ["aten.index.Tensor", "aten.exp.default", "aten.sum.default"]
    assert_same(model, graph, {"x": torch.randn(9, 2)})


class _Told(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def test_nothing_is_printed_of_what_is_run_another_way() -> None:
    class Padding(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            inside = x[:, 0] > 0
            out = x * 2
            out[inside] = F.pad(x[inside], (1, 0))[:, :-1]  # its kernel asks for a size that no one knows
            out[:, 1] = 1.0
            return out.sum()

    told = _Told()
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(told)
    try:
        graph_of(Padding(), {"x": torch.randn(4, 6)})
    finally:
        logger.removeHandler(told)

    assert not told.records


def test_weights_that_hold_no_data_are_enough() -> None:
    with FakeTensorMode():
        model = GPT.from_config(GPTConfig.small())
        examples = model.example_inputs(4)

    graph = normalise(trace(model, examples))

    with torch.random.fork_rng():
        real = GPT.from_config(GPTConfig.small())
    assert graph.operators.keys() == normalise(trace(real, real.example_inputs(4))).operators.keys()


def test_one_running_statistic_is_one_memory_group_however_often_it_is_written(
    writing: tuple[_Writing, OperatorGraph],
) -> None:
    _, graph = writing

    norms = [
        operator for operator in graph.operators.values() if operator.target.startswith("aten.batch_norm")
    ]
    counts = [op for op in graph.operators.values() if "norm.num_batches_tracked" in op.writes_buffers]
    assert len(norms) == len(counts) == 2
    assert len({operator.memory_group for operator in norms}) == 1
    assert len({operator.memory_group for operator in counts}) == 1


class _Regions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        mask = (x > 0).float()
        with torch.no_grad():
            scale = self.linear.weight.abs().mean()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = self.linear(x)
            with torch.autocast("cpu", enabled=False):
                exact = F.linear(x, self.linear.weight)
        hidden = self.frozen(hidden.float() * mask)
        return ((hidden / scale - labels) ** 2).mean() + exact.argmax(1).float().mean() + exact.sum().detach()


def test_no_grad_and_autocast_regions_are_flat_marked_and_entered_again() -> None:
    torch.manual_seed(0)
    model, batch = _Regions(), {"x": torch.randn(3, 4), "labels": torch.randn(3, 4)}

    graph = graph_of(model, batch)

    assert graph.fx is not None
    marks = {node.name: node.meta for node in graph.fx.graph.nodes}
    by_line = {operator.target: operator.name for operator in graph.operators.values()}
    assert marks[by_line["aten.abs.default"]]["no_grad"] is True
    autocasts = [node.meta["autocast"] for node in graph.fx.graph.nodes if "autocast" in node.meta]
    assert ("cpu", torch.bfloat16, True) in autocasts
    assert any(not enabled for _, _, enabled in autocasts)
    assert_same(model, graph, batch)
    assert_same(model, graph, {"x": torch.randn(2, 4), "labels": torch.randn(2, 4)})


class _Recorder(ProgramInterpreter):
    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        self.seen = {**getattr(self, "seen", {}), n.name: value}
        return value


def test_gradients_and_shapes_of_regions_are_what_a_real_run_has() -> None:
    batch = {"x": torch.randn(5, 4), "labels": torch.zeros(5, 4)}
    _assert_outputs_are_described(graph_of(_Regions(), batch), batch)


def test_gradients_and_shapes_of_in_place_writes_are_what_a_real_run_has(
    writing: tuple[_Writing, OperatorGraph],
) -> None:
    _, graph = writing
    _assert_outputs_are_described(graph, _writing_batch(5))


def _assert_outputs_are_described(graph: OperatorGraph, batch: Batch) -> None:
    assert graph.fx is not None
    recorder = _Recorder(graph.fx)
    recorder.run(*(batch[name] for name in graph.inputs))

    for name, operator in graph.operators.items():
        value = recorder.seen[name]
        found = [v for v in (value if isinstance(value, (tuple, list)) else [value]) if isinstance(v, Tensor)]
        assert [spec.requires_grad for spec in operator.outputs] == [v.requires_grad for v in found], name
        assert [spec.dtype for spec in operator.outputs] == [v.dtype for v in found], name
        assert [spec.example_shape for spec in operator.outputs] == [tuple(v.shape) for v in found], name


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("positions", torch.arange(7), persistent=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        size = tokens.shape[1]
        mask = torch.ones(size, size, dtype=torch.bool, device=tokens.device).tril()
        hidden = self.embedding(tokens) + self.positions[:size, None] / 7
        hidden = (mask[None].to(hidden.dtype) @ hidden) * torch.rand_like(hidden)
        logits = self.head(hidden)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def _tied_graph() -> tuple[nn.Module, OperatorGraph]:
    torch.manual_seed(0)
    model = _Tied()
    tokens = torch.randint(0, 11, (3, 5))
    return model, graph_of(model, {"tokens": tokens, "labels": tokens})


def _by_target(graph: OperatorGraph, target: str) -> Operator:
    return next(operator for operator in graph.operators.values() if operator.target.startswith(target))


def test_parameters_have_their_state_dict_names_and_tied_ones_are_one() -> None:
    model, graph = _tied_graph()

    assert list(graph.parameters) == ["embedding.weight", "unused.weight", "unused.bias"]
    assert graph.parameters["embedding.weight"].tied_names == ("head.weight",)
    assert _by_target(graph, "aten.linear").parameters == ("embedding.weight",)
    assert not graph.buffers["positions"].persistent
    live = tensors(graph)
    assert live["embedding.weight"] is dict(model.named_parameters())["embedding.weight"]
    assert set(live) == {*graph.parameters, *graph.buffers}


def test_a_preamble_is_replicable_and_what_draws_or_has_weights_is_not() -> None:
    _, graph = _tied_graph()

    assert _by_target(graph, "aten.tril").is_replicable
    assert _by_target(graph, "aten.to.dtype").is_replicable
    assert _by_target(graph, "aten.rand_like").is_random
    assert not _by_target(graph, "aten.rand_like").is_replicable
    assert not _by_target(graph, "aten.embedding").is_replicable
    assert not _by_target(graph, "aten.linear").is_replicable


def test_shapes_are_written_in_the_batch_and_operators_know_where_they_come_from() -> None:
    _, graph = _tied_graph()

    head = _by_target(graph, "aten.linear")
    flat = next(
        op for op in graph.operators.values() if op.outputs and op.outputs[0].shape == ("5*batch", 11)
    )
    assert head.outputs[0].shape == ("batch", 5, 11)
    assert head.outputs[0].example_shape == (3, 5, 11)
    assert (head.module_path, head.module_type) == ("head", "Linear")
    assert flat.source_line is not None
    assert flat.source_line.startswith("test_normalise.py:")
    assert flat.is_view


def test_the_normal_form_is_flat_and_names_are_safe() -> None:
    _, graph = _tied_graph()

    assert graph.fx is not None
    nodes = list(graph.fx.graph.nodes)
    assert {node.op for node in nodes} == {"placeholder", "get_attr", "call_function", "output"}
    assert [node.name for node in nodes if node.op == "call_function"] == list(graph.operators)
    assert all(name.isidentifier() and not keyword.iskeyword(name) for name in graph.operators)
    assert {node.target for node in nodes if node.op == "get_attr"} <= {*graph.parameters, *graph.buffers}
    assert not any("assert" in operator.target for operator in graph.operators.values())
    assert OperatorGraph.from_json(graph.to_json()) == graph.without_live_parts()


def test_hostile_module_names_are_carried_and_never_run() -> None:
    name = 'x")\nraise SystemExit("injected")\n("'
    layers = nn.ModuleDict({name: nn.Linear(2, 2)})

    class Hostile(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[name](x).sum()

    graph = normalise(trace(Hostile(), (torch.randn(2, 2),)))

    assert f"layers.{name}.weight" in graph.parameters
    assert graph.fx is not None
    x = torch.randn(3, 2)
    assert torch.equal(graph.fx(x)[0], layers[name](x).sum())


def test_a_layers_count_of_batches_stays_with_its_running_statistics() -> None:
    graph = graph_of(
        nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Flatten()), {"input": torch.rand(3, 3, 4, 4)}
    )

    writers = [operator for operator in graph.operators.values() if operator.writes_buffers]

    assert {name for operator in writers for name in operator.writes_buffers} >= {"1.num_batches_tracked"}
    assert len({operator.memory_group for operator in writers}) == 1


def test_what_changes_nothing_is_left_out() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            hidden = torch.cat([torch.tensor([]), self.linear(x) * 1.0], dim=-1)
            return F.mse_loss(hidden, y)

    graph = graph_of(Idle(), {"x": torch.rand(3, 4), "y": torch.rand(3, 4)})

    assert [o.target for o in graph.operators.values()] == ["aten.linear.default", "aten.mse_loss.default"]


def test_a_draw_that_nothing_reads_stays_for_the_draws_after_it() -> None:
    class Wasteful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.dropout = nn.Linear(4, 4), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            self.dropout(x)
            return self.dropout(self.linear(x)).sum()

    model, batch = Wasteful(), {"x": torch.rand(3, 4)}

    assert_same(model, graph_of(model, batch), batch)


class _Reshaping(nn.Module):
    """Shapes are changed in place, of views too, and what is written afterwards is written to the base."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        left = also_left = hidden[:, :3]
        left.unsqueeze_(1).mul_(2)
        also_left.squeeze_(1).add_(1)
        right = hidden[:, 3:]
        right.t_()
        right[0] = 0
        sums = torch.zeros(x.shape[0], 3, dtype=x.dtype)
        sums.unsqueeze_(0).addcmul_(left[None], left[:1])
        return self.last(hidden).sum() + sums.sum() + right.sum()


def test_shapes_changed_in_place_write_nothing() -> None:
    torch.manual_seed(0)
    case = case_of(_Reshaping().double(), (torch.randn(5, 4, dtype=torch.float64),))
    plan = planned(case, 1)
    (program,) = generate(case.graph, plan)

    assert compared(case, plan, [program]).exact
    assert not re.search(r"squeeze_|\.t_", program.source)
