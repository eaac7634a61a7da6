"""Models as people have them, trained in a pipeline as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pd2bw_fx
from pd2bw_fx.errors import InputError
from pd2bw_fx.runtime.reference import train_reference
from tests.plain_models import Normed, Plain, rows


class Counting(Plain):
    """Divides by a buffer that each forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("spread", torch.ones(8))
        self.spread: Tensor

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        with torch.no_grad():
            self.spread.mul_(0.9).add_(hidden.abs().mean(dim=0), alpha=0.1)
        result: Tensor = self.second(hidden / self.spread).square().mean()
        return result


class Recurrent(Plain):
    """A layer that could drop, and does not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.RNN(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.inner(self.first(x).unsqueeze(1))[1]).square().mean()
        return result


class Answering(Plain):
    """Returns what it found before the loss."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        found = self.second(self.first(x))
        return found, found.square().mean()


@pytest.mark.parametrize("kind", [Counting, Recurrent, Normed, Answering])
def test_a_users_model_trains_as_in_one_process(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = kind().double()
    batches = [(torch.randn(8, 8, dtype=torch.float64),) for _ in range(4)]
    pipe = pd2bw_fx.split(model, batches[0], cluster=2, num_stages=2, costs="analytic")
    assert not any(operator.is_random for operator in pipe.graph.operators.values())

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.05)

    found = pipe.train_local(batches, optimizer=sgd, microbatches_per_update=4)

    expected = train_reference(model, batches, optimizer=sgd, microbatches_per_update=4, method="2bw")
    assert found.losses == pytest.approx(expected.losses, rel=1e-12)


def test_the_gradient_of_a_single_number_is_clipped_with_the_others() -> None:
    class Scaled(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.logit_scale = nn.Parameter(torch.tensor(2.0))  # as CLIP has it

        def forward(self, x: Tensor) -> Tensor:
            return self.logit_scale.exp() * super().forward(x)

    torch.manual_seed(0)
    model = Scaled().double()
    batches = [(torch.randn(8, 8, dtype=torch.float64),) for _ in range(4)]
    pipe = pd2bw_fx.split(model, batches[0], cluster=2, num_stages=2, costs="analytic")

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.05)

    options: dict[str, Any] = {"optimizer": sgd, "microbatches_per_update": 4, "max_gradient_norm": 0.1}
    found = pipe.train_local(batches, **options)

    expected = train_reference(model, batches, **options, method="2bw")
    assert found.losses == pytest.approx(expected.losses, rel=1e-12)


def test_a_parameter_that_a_forward_writes_is_trained_by_synchronous_methods_alone() -> None:
    class Renorming(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(20, 8, max_norm=1.0)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.table(x))

    torch.manual_seed(0)
    model, batches = Renorming(), [(torch.randint(0, 20, (8, 3)),) for _ in range(3)]
    pipe = pd2bw_fx.split(model, batches[0], cluster=2, num_stages=2, costs="analytic")

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.5)

    settings: dict[str, Any] = {"optimizer": sgd, "microbatches_per_update": 2}
    with pytest.raises(InputError, match=r"the forward writes parameter 'table\.weight', of which 2bw has"):
        train_reference(model, batches, method="2bw", **settings)
    reference = train_reference(model, batches, method="synchronous", **settings)
    with pytest.raises(InputError, match=r"writes the parameter 'table\.weight' in its forward.*'1f1b'"):
        pipe.train_local(batches, optimizer=sgd, microbatches_per_update=2)
    found = pipe.train_local(batches, optimizer=sgd, microbatches_per_update=2, method="1f1b")

    expected, plain = [], sgd(model.parameters())
    for (batch,) in batches:
        loss = torch.stack([model(microbatch) for microbatch in batch.split(4)]).mean()
        loss.backward()
        plain.step()
        plain.zero_grad()
        expected.append(loss.item())
    assert found.losses == pytest.approx(expected, rel=1e-6)
    assert reference.losses == pytest.approx(expected, rel=1e-6)
    for name, trained in model.state_dict().items():
        torch.testing.assert_close(reference.state_dict[name], trained)


def test_what_has_no_gradient_is_not_trained() -> None:
    class Detached(Plain):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).detach()

    for model, error in (
        (Plain().requires_grad_(False), "Plain has no parameter that requires a gradient"),
        (Detached(), "no gradient flows from the loss of Detached"),
    ):
        pipe = pd2bw_fx.split(model, rows(), cluster=2, num_stages=2, costs="analytic")
        with pytest.raises(InputError, match=error):
            pipe.train_local([], optimizer=torch.optim.SGD)


@pytest.mark.parametrize("trains", [True, False])
def test_what_is_frozen_or_not_after_the_split_is_told(*, trains: bool) -> None:
    model = Plain()
    changed = next(iter(dict(model.named_parameters())))
    model.get_parameter(changed).requires_grad_(trains)
    pipe = pd2bw_fx.split(model, rows(), cluster=2, num_stages=2, costs="analytic")
    model.get_parameter(changed).requires_grad_(not trains)

    told = f"the parameter {changed!r} was {'frozen' if trains else 'made trainable'} after the split.*before"
    with pytest.raises(InputError, match=told):
        pipe.train_local([], optimizer=torch.optim.SGD)

    model.get_parameter(changed).requires_grad_(trains)
    with pytest.raises(InputError, match="batches gave none"):
        pipe.train_local([], optimizer=torch.optim.SGD)
