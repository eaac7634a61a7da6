"""Experts that take as many rows as the router gives them: sizes that are numbers out of tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import pd2bw_fx


class Routed(nn.Module):
    """x: (batch, 8). Each row goes to the expert that scores it highest, and no expert has a fixed share."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        sizes = (chosen.unsqueeze(1) == torch.arange(4)).sum(0).tolist()
        parts = zip(self.experts, x[order].split(sizes), strict=True)
        sorted_weights = torch.cat([weights[chosen == expert] for expert in range(4)])
        mixed = torch.cat([expert(rows) for expert, rows in parts]) * sorted_weights.unsqueeze(1)
        return x + torch.zeros_like(x).index_copy(0, order, mixed)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Routed(), Routed(), Routed())

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).square().mean()


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_experts_take_as_many_rows_as_they_are_given(num_stages: int) -> None:
    torch.manual_seed(0)
    model = Model().double()

    pipe = pd2bw_fx.split(model, (torch.randn(6, 8).double(),), cluster=num_stages, costs="analytic")

    for batch_size in (3, 11):
        assert pipe.verify(model, example={"x": torch.randn(batch_size, 8).double()}).exact
    for code in (".sum(0).tolist()", " = x[order].split(sizes)"):
        assert code in "".join(stage.source for stage in pipe.stages)
