"""Numbers that a forward reads out of a tensor all at once, as they are in the generated code."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import Tensor, fx, nn

import pd2bw_fx
from pd2bw_fx.passes.codegen.number_lists import number_lists, sums_of


def source_of(model: nn.Module, *example: Tensor) -> str:
    """The code of the model in one stage, which computes what the model does."""
    pipe = pd2bw_fx.split(model, example, cluster=1, costs="analytic", check="full")
    return pipe.stages[0].source


class Counted(nn.Module):
    """Multiplies the rows of each group, sizes[0] of the first, .."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(groups, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        sizes = nn.functional.one_hot((x[:, 0] > 0).long(), len(self.weights)).sum(0)
        sizes = sizes.tolist()
        rows = x[: sum(sizes)].split(sizes)
        return torch.cat([part @ weight for part, weight in zip(rows, self.weights, strict=True)])


def test_numbers_are_a_list_and_their_sum_is_one() -> None:
    for groups in (3, 12):  # a tracer's symbols are sorted as words: u0, u1, u10, u11, u2
        source = source_of(Counted(groups), torch.randn(8, 4))

        assert "sizes = sizes.tolist()" in source
        assert "rows = x[: sum(sizes)].split(sizes)" in source
        assert ".item()" not in source
        assert "u0" not in source[source.index("class Counted") :]


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.Parameter(torch.tensor([0.5, 2.0, 3.0]))
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        low, middle, high = self.factors.tolist()
        return self.layer(x * low + middle) * high  # type: ignore[no-any-return]


def test_numbers_have_the_names_that_the_author_gives_them() -> None:
    source = source_of(Named(), torch.randn(8, 4))

    assert "low, middle, high = self.factors.tolist()" in source
    assert "self.layer(x * low + middle) * high" in source


class InTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        is_low = x[:, 0] < 0
        low, high = torch.stack([is_low.sum(), (~is_low).sum()]).tolist()
        rows = x[: low + high].split([low, high])
        return torch.cat([self.first(rows[0]), self.second(rows[1])])


def test_a_sum_of_numbers_with_names_is_of_the_names() -> None:
    source = source_of(InTwo(), torch.randn(8, 4))

    assert "low, high = torch.stack(" in source
    assert "x[: low + high].split([low, high])" in source


def traced_sum(order: tuple[int, ...], number: float) -> list[fx.Node]:
    """The operators of `numbers = x.tolist()` and `numbers[order[0]] + numbers[order[1]] ..`"""
    graph = fx.Graph()
    parts = graph.call_function(torch.ops.aten.unbind.int, (graph.placeholder("x"),))
    parts.meta["val"] = [torch.empty(())] * len(order)
    numbers = []
    for place in range(len(order)):
        part = graph.call_function(operator.getitem, (parts, place))
        numbers.append(graph.call_function(torch.ops.aten.item.default, (part,)))
        numbers[-1].meta["val"] = number
    total = numbers[order[0]]
    for place in order[1:]:
        total = graph.call_function(operator.add, (total, numbers[place]))
    graph.output(total)
    return list(graph.nodes)[1:-1]


@pytest.mark.parametrize(
    ("order", "number", "is_sum"),
    [((0, 1, 2), 1.5, True), ((2, 1, 0), 1.5, False), ((0, 2, 1), 2, True), ((0, 1, 1), 2, False)],
)
def test_a_sum_of_floats_keeps_its_order(order: tuple[int, ...], number: float, *, is_sum: bool) -> None:
    nodes = traced_sum(order, number)

    sums = sums_of(number_lists(nodes), nodes)

    assert list(sums) == (nodes[-1:] if is_sum else [])


class Read(Named):
    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.factors.unbind()
        return self.layer(x * first.item()) * first + second.item() * third.item()


def test_parts_that_are_read_as_tensors_too_stay_tensors() -> None:
    source = source_of(Read(), torch.randn(8, 4))

    assert "first, second, third = self.factors.unbind()" in source
    assert "tolist" not in source
