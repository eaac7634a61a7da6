"""Copies of a stage whose parameters have gradients in some updates and none in others: of experts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pd2bw_fx
from pd2bw_fx.runtime.reference import train_reference

SETTINGS: dict[str, Any] = {
    "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1),
    "microbatches_per_update": 4,
    "max_gradient_norm": 0.5,
}


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, hidden: Tensor, which: Tensor) -> Tensor:
        result = torch.zeros_like(hidden)
        for number, expert in enumerate(self.each):
            rows = (which == number).nonzero().flatten()
            if len(rows):
                result = result.index_copy(0, rows, expert(hidden[rows]))
        return result


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 1)
        self.experts = Experts()

    def forward(self, x: Tensor, which: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return self.last(torch.tanh(hidden + self.experts(hidden, which))).square().mean()


@pytest.fixture(scope="module")
def pipe() -> pd2bw_fx.Pipeline:
    torch.manual_seed(0)
    model = Model().double()
    pd2bw_fx.untraced(model.experts, returns=lambda hidden, which: torch.empty_like(hidden))
    example = torch.randn(2, 6, dtype=torch.float64), torch.tensor([0, 1])
    return pd2bw_fx.split(model, example, cluster=2, num_stages=2, costs="analytic", check=False)


@pytest.fixture(scope="module")
def batches() -> list[tuple[Tensor, Tensor]]:
    """The third expert has rows from the fourth update on, the second none in two of the last."""
    torch.manual_seed(1)
    chosen = [(0, 1)] * 3 + [(0, 1, 2), (2,), (0, 2), (1, 2), (1,)]
    return [
        (torch.randn(8, 6, dtype=torch.float64), torch.tensor([which[row % len(which)] for row in range(8)]))
        for which in chosen
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"method": "2bw"},
        {"method": "2bw", "replicas": 2},
        {"method": "1f1b", "replicas": 2},
        {"method": "chimera"},
        {"method": "ddp"},
    ],
    ids=str,
)
def test_copies_stay_alike_and_unused_parameters_stay_as_they_are(
    pipe: pd2bw_fx.Pipeline, batches: list[tuple[Tensor, Tensor]], options: dict[str, Any]
) -> None:
    model = copy.deepcopy(pipe.graph.root)
    assert isinstance(model, nn.Module)
    model.load_state_dict(pipe.state_dict())
    rule = "2bw" if options["method"] == "2bw" else "synchronous"
    expected = train_reference(model, batches, method=rule, **SETTINGS)
    trained = pd2bw_fx.split(pipe, cluster=2, method=options["method"], check=False)
    result = trained.train_local(batches, **SETTINGS, **options)

    assert result.losses == pytest.approx(expected.losses, rel=1e-12)
    for name, tensor in expected.state_dict.items():
        torch.testing.assert_close(trained.state_dict()[name], tensor, rtol=1e-10, atol=1e-13, msg=name)
