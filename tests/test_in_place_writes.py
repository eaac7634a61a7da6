"""Writes in place become functional in the normal form: values and gradients are the model's, bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pd2bw_fx.graph import OperatorGraph
from tests.exact import Batch, assert_outputs_are_described, assert_same, graph_of

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


def _zeros_into_new_memory(y: Tensor) -> Tensor:
    state = y.data.new(y.shape[0], 6).zero_()
    others = y.new_empty(y.shape[0], 6).zero_()
    others += 2
    return (y * (state + others)).sum()


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
        _zeros_into_new_memory,
    )
}


class _Writing(nn.Module):
    """Writes in place to activations and to buffers; a result for each kind of write, and a loss of all."""

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
        return {"loss": results["one_after_another"]} | results


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
    for batch_size in (5, 3, 2):
        assert_same(model, graph, _writing_batch(batch_size))


def test_memory_that_is_filled_at_once_is_made_so(writing: tuple[_Writing, OperatorGraph]) -> None:
    _, graph = writing

    made = {op.target.partition(".")[2] for op in graph.operators.values() if "zero" in op.target}
    assert {"zeros.default", "new_zeros.default"} <= made
    assert not any("empty" in op.target for op in graph.operators.values())


def test_gradients_and_shapes_of_in_place_writes_are_what_a_real_run_has(
    writing: tuple[_Writing, OperatorGraph],
) -> None:
    _, graph = writing
    assert_outputs_are_described(graph, _writing_batch(5))


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
