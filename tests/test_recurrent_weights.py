"""Recurrent layers, whose weights cuDNN would have in memory of its own."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import pd2bw_fx
from pd2bw_fx import program
from pd2bw_fx.actions import RunRequest
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

    (job,) = jobs(pipe, work_for(pipe, RunRequest("2bw", 2, 0.0, None, False)))
    with Engine(job, EngineOptions(optimizer=SGD)) as engine:
        losses = [float(engine.step(batch)) for batch in batches]

    assert losses == pytest.approx(expected.losses, rel=1e-12)


def test_what_recurrent_layers_give_is_known_without_the_memory_of_their_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Takes fake tensors for those of a GPU, where cuDNN would look for the memory of the weights."""

    def planned() -> pd2bw_fx.Plan:
        torch.manual_seed(0)
        return pd2bw_fx.split(Reader(), (torch.randn(4, 3, 4), torch.randn(4, 1)), costs="analytic").plan

    expected, asked = planned(), list[str]()

    def is_fake(value: object) -> bool:
        asked.append(type(value).__name__)
        return isinstance(value, FakeTensor)

    monkeypatch.setattr(program, "_is_fake_on_a_gpu", is_fake)

    assert planned().bottleneck_s == pytest.approx(expected.bottleneck_s, rel=0.01)
    assert "FakeTensor" in asked
