"""Stages whose forward is run again before the backward train as those that keep their activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pd2bw_fx
from pd2bw_fx.models import build
from pd2bw_fx.runtime.recompute import WrittenState, unread_statistics
from pd2bw_fx.runtime.reference import train_reference
from tests.trained import sgd


class Remembering(nn.Module):
    """Its result depends on a running mean that its forward has just written."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.register_buffer("means", torch.zeros(3, 8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer, mean in zip(self.layers, self.means, strict=True):
            x = layer(x)
            mean.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
            x = torch.tanh(x - mean)
        return nn.functional.mse_loss(x, y)

    def example_inputs(self, batch_size: int = 4) -> tuple[Tensor, Tensor]:
        x = torch.randn(batch_size, 8, dtype=torch.float64)
        return x, x.sin()


class Following(Remembering):
    """Its last layer's teacher is written by the forward, and frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            self.teacher.weight.mul_(0.9).add_(self.layers[2].weight, alpha=0.3)
        return super().forward(x, y) + self.teacher(x - self.layers[2](x)).square().mean()


class Renormalised(nn.Module):
    """Normalised by the batch, and corrected by the running statistics that this has written."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.norm, self.last_norm = nn.BatchNorm1d(8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.layers[0](x)
        x = torch.tanh(self.norm(x) * self.norm.running_var + self.norm.running_mean)
        x = torch.tanh(self.last_norm(self.layers[1](x)))
        return nn.functional.mse_loss(self.layers[2](x), y)

    def example_inputs(self, batch_size: int = 4) -> tuple[Tensor, Tensor]:
        x = torch.randn(batch_size, 8, dtype=torch.float64)
        return x, x.sin()


@pytest.mark.parametrize("made", [lambda: build("resnet"), Following, Renormalised])
def test_recomputed_stages_train_as_kept_ones_do(made: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    model = made().double()
    pipe = pd2bw_fx.split(
        model,
        model.example_inputs(),
        cluster=2,
        costs="analytic",
        check=False,
        recompute=True,
        microbatches_per_update=2,
    )
    assert all(stage.recompute for stage in pipe.plan.stages)
    drawn = model.example_inputs(batch_size=16)
    batches = list(zip(*(tensor.split(4) for tensor in drawn), strict=True))

    result = pipe.train_local(batches, optimizer=sgd)

    reference = train_reference(model, batches, optimizer=sgd, microbatches_per_update=2)
    assert result.losses == pytest.approx(reference.losses, rel=1e-12)
    for name, tensor in pipe.state_dict().items():
        torch.testing.assert_close(tensor, reference.state_dict[name], rtol=1e-10, atol=1e-12)


def test_statistics_that_nothing_reads_are_not_copied_for_a_second_run() -> None:
    torch.manual_seed(0)
    model = Renormalised().double()
    pipe = pd2bw_fx.split(model, model.example_inputs(), cluster=1, costs="analytic", check=False)
    module, program = pipe.stages[0].module, pipe.programs[0]
    state = WrittenState(program, frozenset(), unread_statistics(pipe.graph))
    names = {buffer: name for name, buffer in module.named_buffers()}
    read = {f"norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}

    copies = state.before(module)
    module(*model.example_inputs())
    state.keep(copies)

    assert {names[tensor] for tensor in copies} == read | {"last_norm.num_batches_tracked"}
    assert {names[tensor] for tensor in state.before(module)} == {names[tensor] for tensor in copies}
