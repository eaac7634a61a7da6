"""A buffer that the forward makes anew after it has computed with it: a gradient reads what it was."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import Tensor, nn

import pd2bw_fx


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("queue", torch.randn(6, 8))


class Contrast(Layers):
    """As MoCo keeps its keys."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        scores = self.last(hidden) @ self.queue.t()
        self.queue = torch.cat([hidden.detach(), self.queue])[:6]
        return scores.logsumexp(1).mean()


class Scaled(Layers):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x) * self.queue[0]
        self.queue = 0.9 * self.queue + 0.1 * hidden.detach().std(0)
        return self.last(hidden).square().mean()


@pytest.mark.parametrize("kind", [Contrast, Scaled])
def test_stages_have_the_models_gradients_and_its_buffer(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, batches = kind(), [torch.randn(4, 8) for _ in range(3)]
    own, queue = copy.deepcopy(model), model.get_buffer("queue")
    before = queue.clone()
    sgd = functools.partial(torch.optim.SGD, lr=0.1)

    pipe = pd2bw_fx.split(model, batches[0], cluster=2, num_stages=2, costs="analytic", check="full")

    assert model.get_buffer("queue") is queue
    assert torch.equal(queue, before)
    trained = pipe.train_local(batches, optimizer=sgd, method="1f1b", microbatches_per_update=1)
    optimizer, losses = sgd(own.parameters()), []
    for x in batches:
        optimizer.zero_grad()
        loss = own(x)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert trained.losses == pytest.approx(losses, rel=1e-4)
    torch.testing.assert_close(pipe.state_dict()["queue"], own.get_buffer("queue"))
