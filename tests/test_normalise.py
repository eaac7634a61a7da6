"""The normal form, operator by operator: it computes the same, and says the truth of each."""

from __future__ import annotations

import keyword
import logging
import re

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from pd2bw_fx.graph import Operator, OperatorGraph
from pd2bw_fx.models.gpt import GPT, GPTConfig
from pd2bw_fx.passes.codegen import generate
from pd2bw_fx.passes.normalise import normalise, tensors
from pd2bw_fx.passes.trace import trace
from tests.exact import assert_outputs_are_described, assert_same, graph_of
from tests.stages import case_of, compared, planned


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


def test_gradients_and_shapes_of_regions_are_what_a_real_run_has() -> None:
    batch = {"x": torch.randn(5, 4), "labels": torch.zeros(5, 4)}
    assert_outputs_are_described(graph_of(_Regions(), batch), batch)


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
