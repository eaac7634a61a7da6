"""`tensor.data` in a forward: the memory without its gradients, read and written."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pd2bw_fx
from pd2bw_fx.errors import InputError, TraceError, VerificationError
from pd2bw_fx.runtime.reference import train_reference
from tests.plain_models import Plain
from tests.trained import assert_trained_by_the_rule

sgd = functools.partial(torch.optim.SGD, lr=0.1)


class Averaging(Plain):
    """Has an average of its second layer beside it, as teachers and momentum encoders do."""

    def __init__(self, writes: str) -> None:
        super().__init__()
        self.target = nn.Linear(8, 8).requires_grad_(False)
        self.writes = writes

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for own, target in zip(self.second.parameters(), self.target.parameters(), strict=True):
                if self.writes == "assigns":
                    target.data = 0.9 * target.data + 0.1 * own.data
                elif self.writes == "augmented":
                    target.data *= 0.9
                else:
                    target.data.mul_(0.9).add_(own.data, alpha=0.1)
        return super().forward(x) + self.target(x).square().mean()


class Counting(Plain):
    """Writes what gradients flow to into its buffers, as codebooks of vector quantization do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("last", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        self.mean.data.lerp_(hidden.mean(0), 0.1)
        self.last.data = 0.5 * self.last + hidden.mean(0)
        return (self.second(hidden) * (1 + self.mean) + self.last).square().mean()


class Clamping(Plain):
    """Writes what its backward keeps: gradients are those at the new values."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        waves = hidden.sin()
        hidden.data.clamp_(min=0)
        return self.second(hidden + waves).square().mean()


class StraightThrough(Plain):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.second(hidden + (hidden.sign() - hidden).data).square().mean()


def split(model: nn.Module, **options: Any) -> pd2bw_fx.Pipeline:
    x = torch.randn(4, 8, dtype=torch.float64)
    return pd2bw_fx.split(model.double(), x, cluster=2, num_stages=2, costs="analytic", **options)


WRITES = ("assigns", "augmented", "in place")


@pytest.mark.parametrize(
    "made",
    [*(functools.partial(Averaging, writes) for writes in WRITES), Counting, Clamping, StraightThrough],
)
def test_tensor_data_is_detached_in_the_stages(made: Any) -> None:
    torch.manual_seed(0)
    model = made()
    pipe = split(model)
    assert pipe.trace_report is not None
    assert pipe.trace_report.tracer == "export"
    batches = [torch.randn(6, 8, dtype=torch.float64) for _ in range(4)]
    assert_trained_by_the_rule(model, pipe, batches)


@pytest.mark.parametrize("writes", WRITES)
def test_what_torch_fx_does_not_see_written_is_refused_and_undone(writes: str) -> None:
    model = Averaging(writes).double()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    with pytest.raises(TraceError, match=r"the forward writes 'target\.weight' through \.data"):
        split(model, tracer="fx")

    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_write_that_autograd_sees_in_the_stages_alone_is_told() -> None:
    class Unseen(Plain):
        """No line that the trace knows has `.data`: lambdas have none."""

        def __init__(self) -> None:
            super().__init__()
            self.clamp = lambda hidden: hidden.data.clamp_(min=0)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            waves = hidden.sin()
            self.clamp(hidden)
            return self.second(hidden + waves).square().mean()

    with pytest.raises(
        VerificationError, match=r"through \.data, what its own backward has kept.*to a clone"
    ):
        split(Unseen())


def test_a_write_through_data_is_in_the_files_too(tmp_path: Path) -> None:
    pipe = split(Clamping())
    assert "hidden.data.clamp_(0)" in pipe.stages[0].source

    pipe.export_onnx(tmp_path)


def test_weights_that_the_forward_writes_have_no_two_versions() -> None:
    class Decaying(Plain):
        def forward(self, x: Tensor) -> Tensor:
            self.second.weight.data *= 0.9
            return super().forward(x)

    model, batches = Decaying().double(), [torch.randn(4, 8, dtype=torch.float64)]
    settings: dict[str, Any] = {"optimizer": sgd, "microbatches_per_update": 2}
    with pytest.raises(InputError, match=r"the forward writes parameter 'second\.weight', of which 2bw has"):
        train_reference(model, batches, **settings)
    with pytest.raises(InputError, match=r"writes the parameter 'second\.weight' in its forward.*'1f1b'"):
        split(model).train_local(batches, **settings)
    with pytest.raises(InputError, match=r"stage \d is recomputed, which would write it twice"):
        split(model, method="1f1b", recompute=True).train_local(batches, method="1f1b", **settings)


@pytest.mark.parametrize("method", ["1f1b", "gpipe"])
def test_weights_that_the_forward_writes_are_trained_by_one_version(method: str) -> None:
    class Normalised(Plain):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                for layer in (self.first, self.second):
                    layer.weight.copy_(nn.functional.normalize(layer.weight, dim=1))
            return super().forward(x)

    torch.manual_seed(0)
    model = Normalised().double()
    before, batches = copy.deepcopy(model), [torch.randn(6, 8, dtype=torch.float64) for _ in range(3)]
    pipe = split(model, method=method, microbatches_per_update=3, check="full")
    result = pipe.train_local(batches, optimizer=sgd, microbatches_per_update=3)

    optimizer = sgd(before.parameters())
    for batch, loss in zip(batches, result.losses, strict=True):
        optimizer.zero_grad()
        losses = []
        for part in batch.chunk(3):
            losses.append(before(part) / 3)
            losses[-1].backward()
        optimizer.step()
        assert loss == pytest.approx(sum(losses).item(), rel=1e-12)


def test_data_of_another_shape_is_no_values_for_what_is_there() -> None:
    class Growing(Plain):
        def forward(self, x: Tensor) -> Tensor:
            other = x.clone()
            other.data = x.repeat(2, 1)
            return super().forward(x) + other.sum()

    with pytest.raises(TraceError, match=r"shape \(\d, 8\) is given another of shape \(\d, 8\)"):
        split(Growing(), tracer="export")


class Adversarial(nn.Module):
    """Both players in one forward; the critic is not to learn from what the generator is told."""

    def __init__(self, *, by_attribute: bool) -> None:
        super().__init__()
        self.generator, self.critic, self.by_attribute = nn.Linear(4, 6), nn.Linear(6, 1), by_attribute

    def forward(self, real: Tensor, noise: Tensor) -> Tensor:
        made = self.generator(noise)
        loss = nn.functional.softplus(-self.critic(real)).mean()
        for weight in self.critic.parameters():
            if self.by_attribute:
                weight.requires_grad = False
            else:
                weight.requires_grad_(False)
        loss = loss + nn.functional.softplus(-self.critic(made)).mean()
        for weight in self.critic.parameters():
            weight.requires_grad_(True)
        return loss


@pytest.mark.parametrize("by_attribute", [False, True])
def test_weights_that_are_frozen_for_a_while_are_told(by_attribute: bool) -> None:
    told = (
        r"switches requires_grad of a tensor off \(test_detached_data\.py:\d+: .*torch\.func\.functional_call"
    )
    model = Adversarial(by_attribute=by_attribute)
    with pytest.raises(TraceError, match=told):
        pd2bw_fx.split(model, (torch.randn(4, 6), torch.randn(4, 4)), cluster=2, costs="analytic")
    assert all(parameter.requires_grad for parameter in model.parameters())


class Stopping(torch.autograd.Function):
    """Hands no gradient to what is in front of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, (gradient * ctx.saved_tensors[0]).sum(0)


class Stopped(nn.Module):
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.layer = nn.Parameter(torch.ones(4)), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.layer(Stopping.apply(x, self.scale))
            return result

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), self.Scaled()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.first(x)).square().mean()
        return result


def test_what_never_gets_a_gradient_behind_a_cut_is_left_alone_by_its_optimizer() -> None:
    """AdamW would let a weight decay whose gradient is zero, and skips one that has none."""
    torch.manual_seed(0)
    model, batches = Stopped().double(), [torch.randn(8, 4).double() for _ in range(3)]
    wished = pd2bw_fx.Constraints(stage_of={"first": 0, "second": 1})
    pipe = pd2bw_fx.split(model, batches[0][:4], cluster=2, costs="analytic", constraints=wished)
    before = model.first.weight.detach().clone()
    settings: dict[str, Any] = {"microbatches_per_update": 2}
    settings["optimizer"] = functools.partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5)

    expected = train_reference(model, batches, **settings)
    result = pipe.train_local(batches, **settings)

    assert result.losses == pytest.approx(expected.losses, rel=1e-12)
    assert torch.equal(pipe.state_dict()["first.weight"], before)
