"""Numbers that a forward reads out of a tensor all at once, as they are in the generated code."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import pd2bw_fx


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


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.Parameter(torch.tensor([0.5, 2.0, 3.0]))
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        low, middle, high = self.factors.tolist()
        return self.layer(x * low + middle) * (low + middle + high)  # type: ignore[no-any-return]


def test_numbers_have_the_names_that_the_author_gives_them() -> None:
    source = source_of(Named(), torch.randn(8, 4))

    assert "low, middle, high = self.factors.tolist()" in source
    assert "(low + middle + high)" in source


class Summed(Named):
    def __init__(self, *, is_reversed: bool) -> None:
        super().__init__()
        self.is_reversed = is_reversed

    def forward(self, x: Tensor) -> Tensor:
        numbers = self.factors.tolist()
        total = numbers[2] + numbers[1] + numbers[0] if self.is_reversed else sum(numbers)
        return self.layer(x) * total  # type: ignore[no-any-return]


def test_a_sum_of_floats_keeps_its_order() -> None:
    assert "total = sum(numbers)" in source_of(Summed(is_reversed=False), torch.randn(8, 4))
    assert "numbers[2] + numbers[1] + numbers[0]" in source_of(Summed(is_reversed=True), torch.randn(8, 4))


class Read(Named):
    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.factors.unbind()
        return self.layer(x * first.item()) * first + second.item() * third.item()


def test_parts_that_are_read_as_tensors_too_stay_tensors() -> None:
    source = source_of(Read(), torch.randn(8, 4))

    assert "first, second, third = self.factors.unbind()" in source
    assert "tolist" not in source
