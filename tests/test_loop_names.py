"""Loops have the author's names and numbers, over members and over numbers, and begin where theirs do."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.loop_lines import lines_inside, source_of


class Crossing(nn.Module):
    """Two lists side by side, and steps that the author counts from 1."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.ParameterList(nn.Parameter(torch.randn(8)) for _ in range(3))
        self.b = nn.ParameterList(nn.Parameter(torch.randn(8)) for _ in range(3))
        self.layer = nn.Linear(8, 8)

    def forward(self, x0: Tensor) -> Tensor:
        x = x0
        for weight, bias in zip(self.w, self.b, strict=True):
            x = x0 * (x @ weight).unsqueeze(-1) + bias + x
        total = x[:, 0].sin()
        for place in range(1, x.shape[1]):
            total = total * x[:, place - 1] + x[:, place].cos()
        return (self.layer(x).mean(1) + total).square().mean()


def test_members_side_by_side_and_what_counts_have_the_authors_names_and_numbers() -> None:
    source = source_of(Crossing(), torch.randn(3, 8))
    inside = lines_inside(source, "for weight, bias in zip(self.w, self.b, strict=True):")
    assert inside == ["x = x0 * (x @ weight).unsqueeze(-1) + bias + x"]
    inside = lines_inside(source, "for place in range(1, 8):")
    assert inside == ["total = total * x[:, place - 1] + x[:, place].cos()"]


class Branches(nn.Module):
    """A sum that begins with 0 and is added to in place, as in re-parameterised layers."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(3))
        self.scale = 0.5

    def forward(self, x: Tensor) -> Tensor:
        total = 0
        for branch in self.branches:
            total += branch(x)
        total = self.scale * self.branches[0](total)
        return total.square().mean()


def test_what_is_added_to_zero_in_place_is_added_in_a_loop() -> None:
    source = source_of(Branches(), torch.randn(3, 8))
    assert lines_inside(source, "for branch in self.branches:") == ["total = total + branch(x)"]
    assert "        total = 0\n" in source
    assert "total = 0.5 * self.branches[0](total)" in source


class _Gated(nn.Module):
    """A cell whose step takes and returns its states in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.out = nn.Linear(4, 4), nn.Linear(4, 4)

    def step(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        c, m = state
        gate = self.gate(x)
        m_new = torch.maximum(gate + m, gate)
        c = torch.exp(gate + m - m_new) * c + x
        return torch.sigmoid(self.out(x)) * c, (c, m_new)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(len(x), 4, device=x.device), torch.full((len(x), 4), -9.0, device=x.device)
        outs = []
        for t in range(x.shape[1]):
            out, state = self.step(x[:, t], state)
            outs.append(out)
        return torch.stack(outs, dim=1).square().mean()


def test_what_a_loop_begins_with_and_what_it_makes_last_stay_out_of_other_lines() -> None:
    """So the first round, and the last, are like the others."""
    source = source_of(_Gated(), torch.randn(3, 5, 4))

    assert lines_inside(source, "for t in range(5):") == [
        "part = x[:, t]",
        "gate = self.gate(part)",
        "m_new = torch.maximum(gate + full, gate)",
        "c = torch.exp(gate + full - m_new) * c + part",
        "outs.append(torch.sigmoid(self.out(part)) * c)",
        "full = m_new",
    ]


class _Scaled(nn.Module):
    """One round divides by 1, and one multiplies by 1, which changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        outs = []
        for i in range(4):
            outs.append(torch.tanh(self.first(x) / 2**i))
        x = torch.stack(outs).mean(0)
        for i, layer in enumerate(self.layers):
            x = layer(x) + x * i
        return (x * 1.0).square().mean()


def test_a_factor_of_1_stays_where_other_rounds_have_other_factors() -> None:
    source = source_of(_Scaled(), torch.randn(3, 4))

    assert "outs = [torch.tanh(self.first(x) / value) for value in (1, 2, 4, 8)]" in source
    assert lines_inside(source, "for i, layer in enumerate(self.layers):") == ["x = layer(x) + x * i"]
    assert "return x.square().mean()" in source


class Rows(nn.Module):
    """It joins its inputs in a loop, and goes on with all of them, or reads the first once more."""

    def __init__(self, *, reads_first: bool) -> None:
        super().__init__()
        self.linear, self.reads_first = nn.Linear(4, 4), reads_first

    def forward(self, *x: Tensor) -> Tensor:
        rows = []
        for row in x:
            rows.append(row.unsqueeze(1))
        hidden = self.linear(torch.cat(rows, dim=1))
        if self.reads_first:
            return hidden.sum(1) * rows[0].sum()
        first = hidden[:, [0, 0, 1]]
        second = hidden[:, [1, 2, 2]]
        return first * second


def test_an_argument_keeps_its_name_where_a_loop_takes_the_others() -> None:
    source = source_of(Rows(reads_first=True), *(torch.randn(3, 4) for _ in range(5)))

    assert "        x_0 = x_0.unsqueeze(1)" in source
    assert "        for row in [x_1, x_2, x_3, x_4]:\n            rows.append(row.unsqueeze(1))" in source


def test_numbers_go_to_the_device_of_what_they_are_read_with_and_hold_up_no_loop() -> None:
    source = source_of(Rows(reads_first=False), *(torch.randn(3, 4) for _ in range(3)))

    assert "        for row in [x_0, x_1, x_2]:\n            rows.append(row.unsqueeze(1))" in source
    assert "first = hidden[:, torch.tensor([0, 0, 1]).to(hidden.device, non_blocking=True)]" in source
