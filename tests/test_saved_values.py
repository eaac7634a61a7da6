"""Models that differentiate in their forward, through layers that save more than operands and results."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import pd2bw_fx
from pd2bw_fx.errors import InputError
from tests.trained import assert_trained_by_the_rule


class Score(nn.Module):
    """The slope of an energy of x, a batch."""

    def energy(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        noisy = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(self.energy(noisy).sum(), noisy, create_graph=True)
        return (slope - x).square().mean()


class Normed(Score):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), layer, nn.Softplus(), nn.Linear(8, 1))

    def energy(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x)
        return result


class Recurrent(Score):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(1, 3, batch_first=True)
        self.last = nn.Linear(3, 1)

    def energy(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.cells(x.unsqueeze(-1))[0][:, -1])
        return result


class Heads(Score):
    """torch.nn's own attention, by the kernel that can be differentiated twice."""

    def __init__(self, kernel: SDPBackend = SDPBackend.MATH) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.kernel = kernel

    def energy(self, x: Tensor) -> Tensor:
        with sdpa_kernel(self.kernel):
            result: Tensor = self.layer(torch.stack([x, 2 * x], 1))
        return result


class Pictures(Score):
    """Takes rows of 16 as pictures of four by four."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.Tanh(),
            nn.MaxPool2d(2, 1),
            nn.Upsample(size=(6, 6), mode="bilinear"),
            nn.InstanceNorm2d(4, affine=True),
            nn.Flatten(),
            nn.Linear(144, 1),
        )

    def energy(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x.view(-1, 1, 4, 4))
        return result


CASES: dict[str, tuple[Callable[[], Score], int]] = {
    "BatchNorm": (lambda: Normed(nn.BatchNorm1d(8)), 4),
    "BatchNorm without statistics": (lambda: Normed(nn.BatchNorm1d(8, track_running_stats=False)), 4),
    "RMSNorm": (lambda: Normed(nn.RMSNorm(8)), 4),
    "PReLU": (lambda: Normed(nn.PReLU()), 4),
    "LSTM": (Recurrent, 4),
    "attention": (Heads, 4),
    "pictures": (Pictures, 16),
}


@pytest.mark.parametrize("name", CASES)
def test_a_derivative_through_a_layer_that_saves_values_is_trained_by_the_rule(name: str) -> None:
    make, width = CASES[name]
    torch.manual_seed(0)
    model = make().double()
    batches = [torch.randn(6, width, dtype=torch.float64) for _ in range(3)]
    pipe = pd2bw_fx.split(
        model, batches[0], cluster=2, num_stages=2, costs="analytic", check="full", profile_cache=False
    )

    assert pipe.graph.batch_symbol == "batch"
    assert_trained_by_the_rule(model, pipe, batches)


def test_running_statistics_are_written_where_the_backward_is_elsewhere() -> None:
    model = Normed(nn.BatchNorm1d(8)).double()
    apart = pd2bw_fx.Constraints(stage_of={"layers.1": 0, "layers.2": 1})
    example = torch.randn(6, 4, dtype=torch.float64)

    pipe = pd2bw_fx.split(model, example, cluster=2, costs="analytic", check="full", constraints=apart)

    module = pipe.stages[0].module
    pipe.run(example + 1)
    before = {name: tensor.clone() for name, tensor in module.named_buffers()}
    pipe.run(example + 2)
    assert sum(not torch.equal(before[name], tensor) for name, tensor in module.named_buffers()) >= 2


def test_what_cannot_be_differentiated_twice_is_the_models_own_error() -> None:
    model = Heads(SDPBackend.FLASH_ATTENTION).double()

    with pytest.raises(InputError, match=r"model's own backward raises .*flash_attention.*not implemented"):
        pd2bw_fx.split(model, torch.randn(6, 4, dtype=torch.float64), cluster=2, costs="analytic")
