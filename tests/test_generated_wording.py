"""What an operator computes is worded as its author words it, where torch has several words for it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pd2bw_fx import split
from pd2bw_fx.passes.codegen import generate
from tests.stages import case_of, compared, planned


class _Worded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean, self.deviation = nn.Linear(8, 4), nn.Linear(8, 4)
        self.rate = 0.3

    def forward(self, x: Tensor) -> Tensor:
        mean, deviation = self.mean(x), self.deviation(x)
        drawn = mean + torch.exp(0.5 * deviation)
        drawn = self.rate * torch.tanh(drawn) + drawn[:, None].sum(1).clamp(min=-3.0)
        drawn = torch.min(drawn**2 * 2, self.rate * deviation).float()
        drawn = torch.clamp(drawn, min=-2.0)
        places = torch.arange(4, device=x.device)
        offsets = (places[:, None] - places) + (mean.shape[1] - 1) * max(self.rate, 1.0)
        drawn = drawn @ offsets + 1.0 / (2 + deviation.sigmoid()) + torch.exp(1j * mean).real
        drawn = drawn + 2 / (3 + mean.exp()) * mean.exp().reciprocal()
        drawn = 2 / (3 + mean.exp()) - drawn
        drawn = self.rate / (drawn.abs() + 1)
        return -0.5 * torch.sum(1 + deviation - mean.pow(2), dim=1).mean() + (drawn - 1).mean()


def test_an_operator_is_worded_as_its_author_words_it() -> None:
    torch.manual_seed(0)
    case = case_of(_Worded().double(), (torch.randn(3, 8, dtype=torch.float64),))

    plan = planned(case, 1)
    (program,) = generate(case.graph, plan)

    assert compared(case, plan, [program]).exact
    lines = [line.strip().partition("  # ")[0] for line in program.source.splitlines()]
    for line in (
        "drawn = mean + torch.exp(0.5 * deviation)",
        "drawn = 0.3 * torch.tanh(drawn) + drawn[:, None].sum(1).clamp(min=-3.0)",
        "drawn = torch.min(drawn**2 * 2, 0.3 * deviation).float()",
        "drawn = torch.clamp(drawn, min=-2.0)",
        "offsets = rows - places + 3.0",
        "drawn = drawn @ offsets + 1.0 / (2 + deviation.sigmoid()) + torch.exp(1j * mean).real",
        "drawn = drawn + (3 + mean.exp()).reciprocal() * 2 * mean.exp().reciprocal()",
        "drawn = 2 / (3 + mean.exp()) - drawn",
        "drawn = 0.3 / (drawn.abs() + 1)",
        "return -0.5 * torch.sum(1 + deviation - mean.pow(2), dim=1).mean() + (drawn - 1).mean()",
    ):
        assert line in lines, program.source


class _Summed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first_of_the_layers, self.last_of_the_layers = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.last_of_the_layers(self.first_of_the_layers(x).tanh())
        whole, inner = self.first_of_the_layers.weight, self.last_of_the_layers.weight
        penalty: Tensor = (whole[:, 1:7] ** 2).sum() - (inner[1:7, 1:7] ** 2).sum()
        return y.square().mean() + penalty


def test_a_number_takes_the_place_of_what_keeps_a_name_from_being_a_builtin() -> None:
    pipe = split(_Summed(), torch.randn(4, 8), cluster=1, costs="analytic")
    assert "penalty = sum_ - sum_2" in pipe.stages[0].source
