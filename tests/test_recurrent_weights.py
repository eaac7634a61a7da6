"""Recurrent layers, whose weights cuDNN would have in memory of its own."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

import pd2bw_fx
from pd2bw_fx.actions import Wanted
from pd2bw_fx.runtime.engine import Engine
from pd2bw_fx.runtime.job import jobs, work_for
from pd2bw_fx.runtime.options import EngineOptions
from pd2bw_fx.runtime.reference import train_reference

SGD = functools.partial(torch.optim.SGD, lr=0.1)


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(4, 6, batch_first=True)
        self.last = nn.Linear(6, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.last(self.cells(x)[0][:, -1]), y)


def moved_as_by_cudnn(layer: nn.RNNBase) -> None:
    for weight in layer._flat_weights:
        weight.data = weight.data.clone()  # type: ignore[union-attr]


@pytest.mark.usefixtures("one_rank")
def test_an_optimizer_steps_the_weights_that_a_recurrent_layer_computes_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model = Reader().double()
    batches = [(torch.randn(4, 3, 4).double(), torch.randn(4, 1).double()) for _ in range(4)]
    pipe = pd2bw_fx.split(model, batches[0], cluster=1, costs="analytic")
    expected = train_reference(model, batches, optimizer=SGD, microbatches_per_update=2)
    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", moved_as_by_cudnn)

    (job,) = jobs(pipe, work_for(pipe, Wanted("2bw", 2, 0.0, None, False)))
    with Engine(job, EngineOptions(optimizer=SGD)) as engine:
        losses = [float(engine.step(batch)) for batch in batches]

    assert losses == pytest.approx(expected.losses, rel=1e-12)
