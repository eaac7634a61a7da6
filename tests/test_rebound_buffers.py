"""Buffers and parameters that the forward, or a loss, makes anew after it has computed with them: a gradient
reads what they were."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pd2bw_fx
from pd2bw_fx.errors import TraceError, VerificationError


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("queue", torch.randn(6, 8))


class Contrast(Layers):
    """Keeps a queue as MoCo does its keys."""

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


def alone(optimizer: torch.optim.Optimizer, losses_of: Sequence[Callable[[], Tensor]]) -> list[float]:
    """One process's losses, an update for each."""
    losses = []
    for loss_of in losses_of:
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


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
    losses = alone(sgd(own.parameters()), [functools.partial(own, x) for x in batches])
    assert trained.losses == pytest.approx(losses, rel=1e-4)
    torch.testing.assert_close(pipe.state_dict()["queue"], own.get_buffer("queue"))


class Centred(nn.Module):
    """A loss with a running centre."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("centre", torch.zeros(8))
        if how == "a parameter":
            del self.centre
            self.centre = nn.Parameter(torch.zeros(8), requires_grad=False)

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        centre = self.centre.clone() if self.how == "in place" else self.centre
        loss = (output * (1 + centre) - targets).square().mean()
        mean = 0.5 * output.detach().mean(0)
        if self.how == "in place":
            self.centre.mul_(0.5).add_(mean)
        elif self.how == "anew":
            self.centre = 0.5 * self.centre + mean
        else:
            self.centre = nn.Parameter(0.5 * self.centre + mean, requires_grad=False)
        return loss


@pytest.mark.parametrize("how", ["in place", "anew", "a parameter"])
def test_a_loss_goes_on_with_its_buffer_while_stages_train(how: str) -> None:
    torch.manual_seed(0)
    model, loss_fn = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), Centred(how)
    x, y, batches = torch.randn(4, 8), torch.randn(4, 8), 3
    own, own_loss = copy.deepcopy((model, loss_fn))
    sgd = functools.partial(torch.optim.SGD, lr=0.1)

    pipe = pd2bw_fx.split(model, x, loss_fn=loss_fn, example_targets=y, cluster=2, costs="analytic")

    assert not loss_fn.centre.any()
    trained = pipe.train_local([(x, y)] * batches, optimizer=sgd, method="1f1b", microbatches_per_update=1)
    losses = alone(sgd(own.parameters()), [lambda: own_loss(own(x), y)] * batches)
    assert trained.losses == pytest.approx(losses, rel=1e-4)
    torch.testing.assert_close(pipe.tensors()["loss_fn.centre"], own_loss.centre)
    pipe.verify()  # the model with the buffer that its loss has by now
    assert not loss_fn.centre.any()


class Codebook(nn.Module):
    """Keeps a codebook as VQ-VAEs do, and beside it a centre, which a gradient reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.codes = nn.Linear(8, 4), nn.Embedding(6, 4)
        self.sums = nn.Parameter(torch.randn(6, 4))
        self.centre = nn.Parameter(torch.ones(4), requires_grad=False)
        self.last = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        chosen = nn.functional.one_hot(torch.cdist(hidden, self.codes.weight).argmin(1), 6).to(x.dtype)
        nearest = chosen @ self.codes.weight
        self.sums = nn.Parameter(self.sums * 0.9 + 0.1 * chosen.t() @ hidden)
        self.codes.weight = nn.Parameter(self.sums / (1 + chosen.sum(0)[:, None]))
        loss: Tensor = self.last((hidden + (nearest - hidden).detach()) * self.centre).square().mean()
        self.centre = nn.Parameter(0.9 * self.centre + 0.1 * hidden.mean(0), requires_grad=False)
        return loss


def test_parameters_that_are_made_anew_are_written_and_compared() -> None:
    torch.manual_seed(0)
    model, batches = Codebook(), [torch.randn(4, 8) for _ in range(3)]
    own, before = copy.deepcopy(model), dict(model.named_parameters())
    values = copy.deepcopy(model.state_dict())
    adamw = functools.partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5)

    pipe = pd2bw_fx.split(model, batches[0], cluster=1, costs="analytic", check="full", method="1f1b")

    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert all(torch.equal(tensor, values[name]) for name, tensor in model.state_dict().items())
    assert "parameter codes.weight" in {apart.name for apart in pipe.verify().differences}
    trained = pipe.train_local(batches, optimizer=adamw, microbatches_per_update=1)
    losses = alone(adamw(own.parameters()), [functools.partial(own, x) for x in batches])
    assert trained.losses == pytest.approx(losses, rel=1e-5)
    for name, tensor in own.state_dict().items():
        torch.testing.assert_close(pipe.state_dict()[name], tensor)
    pipe.verify()


class Remaking(nn.Module):
    def __init__(self, remake: Callable[[Any], None]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.last.weight
        self.remake = remake

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.tied(self.last(self.first(x))).square().mean()
        self.remake(self)
        return loss


def _trained(model: Any) -> None:
    model.first.weight = nn.Parameter(0.9 * model.first.weight)


def _other_shape(model: Any) -> None:
    model.first.weight = nn.Parameter(torch.cat([model.first.weight, model.first.weight]))


def _one_of_two(model: Any) -> None:
    model.tied.weight = nn.Parameter(0.9 * model.tied.weight)


@pytest.mark.parametrize(
    ("remake", "said"),
    [
        (_trained, r"'first\.weight' anew, and a gradient flows to it"),
        (_other_shape, r"'first\.weight' anew, float32 \(16, 8\) on cpu in place of float32 \(8, 8\)"),
        (_one_of_two, r"'tied\.weight' anew, and 'last\.weight', which was the same one"),
    ],
)
def test_parameters_that_are_no_more_what_was_trained_are_refused(
    remake: Callable[[Any], None], said: str
) -> None:
    with pytest.raises(TraceError, match=said):
        pd2bw_fx.split(Remaking(remake), torch.randn(4, 8), cluster=1, costs="analytic")


def test_a_parameter_that_the_stages_do_not_write_is_told() -> None:
    class Decaying(Layers):
        decays = False

        def forward(self, x: Tensor) -> Tensor:
            loss: Tensor = self.last(self.first(x)).square().mean()
            if self.decays:
                with torch.no_grad():
                    self.first.weight.mul_(0.9)
            return loss

    model = Decaying()
    pipe = pd2bw_fx.split(model, torch.randn(4, 8), cluster=1, costs="analytic")
    model.decays = True
    with pytest.raises(VerificationError, match=r"parameter first\.weight differs from the model's"):
        pipe.verify()
