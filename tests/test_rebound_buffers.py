"""Buffers that the forward, or a loss, makes anew after it has computed with them: a gradient reads what they
were."""

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


class Centred(nn.Module):
    """A loss with a running centre."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(8))
        self.in_place = in_place

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        centre = self.centre.clone() if self.in_place else self.centre
        loss = (output * (1 + centre) - targets).square().mean()
        mean = 0.5 * output.detach().mean(0)
        if self.in_place:
            self.centre.mul_(0.5).add_(mean)
        else:
            self.centre = 0.5 * self.centre + mean
        return loss


@pytest.mark.parametrize("in_place", [True, False])
def test_a_loss_goes_on_with_its_buffer_while_stages_train(in_place: bool) -> None:
    torch.manual_seed(0)
    model, loss_fn = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), Centred(in_place=in_place)
    x, y, batches = torch.randn(4, 8), torch.randn(4, 8), 3
    own, own_loss = copy.deepcopy((model, loss_fn))
    sgd = functools.partial(torch.optim.SGD, lr=0.1)

    pipe = pd2bw_fx.split(model, x, loss_fn=loss_fn, example_targets=y, cluster=2, costs="analytic")

    assert not loss_fn.centre.any()
    trained = pipe.train_local([(x, y)] * batches, optimizer=sgd, method="1f1b", microbatches_per_update=1)
    optimizer, losses = sgd(own.parameters()), []
    for _ in range(batches):
        optimizer.zero_grad()
        loss = own_loss(own(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert trained.losses == pytest.approx(losses, rel=1e-4)
    torch.testing.assert_close(pipe.tensors()["loss_fn.centre"], own_loss.centre)
    pipe.verify()  # the model with the buffer that its loss has by now
    assert not loss_fn.centre.any()
