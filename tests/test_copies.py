"""What has the values of its operand once more: a copy of memory that is written, or without its gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.exact import assert_same, graph_of


class _Layers(nn.Module):
    def __init__(self, compute: Callable[[_Layers, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.compute = compute
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.scale = 1.0
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.ones(8))
        self.register_buffer("seen", torch.zeros(8, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x, self.first(x)).square().mean()


def _assert_same(compute: Callable[[_Layers, Tensor, Tensor], Tensor]) -> set[str]:
    """Loss, gradients and buffers, in a second call too; the operators that there are."""
    torch.manual_seed(0)
    model = _Layers(compute).double()
    batch = {"x": torch.randn(4, 8).double()}
    graph = graph_of(model, batch)
    for x in (batch["x"], torch.randn(6, 8).double()):
        assert_same(model, graph, {"x": x})
        model(x)
    return {operator.target for operator in graph.operators.values()}


_WITHOUT_GRADIENT: dict[str, Callable[[_Layers, Tensor], Tensor]] = {
    "product": lambda layers, h: h * layers.scale,
    "quotient": lambda layers, h: h / layers.scale,
    "view": lambda layers, h: h.view(-1, 8),
    "reshape": lambda layers, h: h.reshape(h.shape[0], -1),
    "slice": lambda layers, h: h[:, :8],
    "expand": lambda layers, h: h.expand(h.shape[0], 8),
    "cat": lambda layers, h: torch.cat([h], 1),
    "through another shape": lambda layers, h: h.unsqueeze(1).squeeze(1),
    "turned twice": lambda layers, h: h.t().t(),
    "broadcast": lambda layers, h: torch.broadcast_tensors(h, torch.ones_like(h))[0],
    "of a weight": lambda layers, h: F.linear(h, layers.first.weight[:]),
}


@pytest.mark.parametrize("make", _WITHOUT_GRADIENT.values(), ids=_WITHOUT_GRADIENT)
def test_no_gradient_flows_through_what_is_made_without(make: Callable[[_Layers, Tensor], Tensor]) -> None:
    def compute(layers: _Layers, x: Tensor, h: Tensor) -> Tensor:
        with torch.no_grad():
            weight = make(layers, h)
        return layers.second(h * weight)

    _assert_same(compute)


def test_a_view_that_begins_without_a_gradient_and_is_turned_back_with_one_has_none() -> None:
    def compute(layers: _Layers, x: Tensor, h: Tensor) -> Tensor:
        with torch.no_grad():
            wider = h.unsqueeze(1)
        return layers.second(h * wider.squeeze(1))

    _assert_same(compute)


def test_what_hands_its_operand_on_without_gradients_hands_its_gradient_on() -> None:
    def compute(layers: _Layers, x: Tensor, h: Tensor) -> Tensor:
        with torch.no_grad():
            same = h.to(h.dtype).contiguous()
        return layers.second(h * same)

    _assert_same(compute)


def test_a_copy_stays_where_other_kernels_of_attention_need_it() -> None:
    """The CPU's fast kernel lays its result by rows, the plain one and those of some GPUs by heads."""

    def compute(layers: _Layers, x: Tensor, h: Tensor) -> Tensor:
        heads = h.view(-1, 4, 2, 4).transpose(1, 2)
        attended = F.scaled_dot_product_attention(heads, heads, heads)
        return layers.second(attended.transpose(1, 2).contiguous().view(-1, 8))

    model, batch = _Layers(compute).double(), {"x": torch.randn(4, 4, 8).double()}
    graph = graph_of(model, batch)
    for kernel in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
        with sdpa_kernel(kernel):
            assert_same(model, graph, batch)


def _counted(layers: _Layers, x: Tensor, h: Tensor) -> Tensor:
    before = layers.calls + 0
    layers.calls += 1
    return layers.second(h) * torch.where(before < 1, 1.0, 0.1)


def _averaged(layers: _Layers, x: Tensor, h: Tensor) -> Tensor:
    before, halved = layers.average * 1.0, layers.average / 1
    layers.average.mul_(0.9).add_(0.1 * h.detach().mean(0))
    return layers.second(h) + (layers.average - before) * halved


def _put_together(layers: _Layers, x: Tensor, h: Tensor) -> Tensor:
    before = torch.cat([layers.average])
    layers.average.mul_(0.9)
    return layers.second(h * before)


def _written_beside_an_activation(layers: _Layers, x: Tensor, h: Tensor) -> Tensor:
    other = torch.cat([h], 1)
    other[:, 0] = 5.0
    return layers.second(h + other)


def _written_beside_an_input(layers: _Layers, x: Tensor, h: Tensor) -> Tensor:
    other = torch.cat([torch.tensor([]).double(), x], 1)
    other[:, 0] = 5.0
    return layers.second(h + other * x)


@pytest.mark.parametrize(
    "compute",
    [_counted, _averaged, _put_together, _written_beside_an_activation, _written_beside_an_input],
)
def test_a_copy_stays_where_one_of_the_two_is_written(
    compute: Callable[[_Layers, Tensor, Tensor], Tensor],
) -> None:
    _assert_same(compute)


def _turned(layers: _Layers, x: Tensor, h: Tensor) -> Tensor:
    turned = h.view(-1, 2, 4).transpose(0, 1).contiguous()
    turned *= 2
    return layers.second(h + turned.transpose(0, 1).reshape(-1, 8))


def _turned_later(layers: _Layers, x: Tensor, h: Tensor) -> Tensor:
    h = F.relu(h, inplace=True)
    return layers.second(h + h.view(-1, 2, 4).transpose(0, 1).contiguous().transpose(0, 1).reshape(-1, 8))


@pytest.mark.parametrize(
    ("compute", "example", "sizes"),
    [(_turned, 1, "1 only"), (_turned, 3, "2 or more"), (_turned_later, 1, "1 or more")],
)
def test_a_copy_of_several_samples_that_is_none_of_one_and_is_written_sets_the_batch(
    compute: Callable[[_Layers, Tensor, Tensor], Tensor], example: int, sizes: str
) -> None:
    torch.manual_seed(0)
    model, x = _Layers(compute).double(), torch.randn(4, 8).double()

    graph = graph_of(model, {"x": x[:example]})

    assert str(graph.batch_sizes) == sizes
    for size in range(1, 5):
        if size in graph.batch_sizes:
            assert_same(model, graph, {"x": x[:size]})


def _masked(layers: _Layers, x: Tensor, h: Tensor) -> Tensor:
    mask = x > 1
    mask |= x < -1
    mask[:, 2:] &= x[:, 2:] < 0
    mask ^= x[:, :1] > 0
    return layers.second(h * mask)


def _shifted(layers: _Layers, x: Tensor, h: Tensor) -> Tensor:
    number = (x > 0).long()
    number <<= 2
    number >>= 1
    number |= 5
    number %= 4
    number //= 2
    return layers.second(h * number)


def _remembered(layers: _Layers, x: Tensor, h: Tensor) -> Tensor:
    layers.seen |= (x > 1).any(0)
    return layers.second(h * layers.seen)


@pytest.mark.parametrize("compute", [_masked, _shifted, _remembered])
def test_augmented_assignments_of_bits_are_those_of_other_operators(
    compute: Callable[[_Layers, Tensor, Tensor], Tensor],
) -> None:
    assert not [target for target in _assert_same(compute) if "__i" in target]
