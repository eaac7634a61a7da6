"""What a forward reads before it writes it, a stage reads before it writes it, in every batch."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pd2bw_fx


class _Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 6)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("largest", torch.tensor(4.0))
        self.register_buffer("queue", torch.zeros(4, 6))
        self.register_buffer("mean", torch.zeros(8))
        self.kept: dict[str, Tensor] = {}


class MeanTeacher(nn.Module):
    """A teacher that follows the student, after it has been asked; a fresh one equals it."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        with torch.no_grad():
            self.student[0].weight.mul_(1.5)

    def targets(self, x: Tensor) -> Tensor:
        out = self.teacher(x)
        with torch.no_grad():
            for old, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                old.lerp_(new, 0.5)
        return out

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.student(x + 0.1), self.targets(x))


class Pool(_Parts):
    def replayed(self, x: Tensor) -> Tensor:
        old = self.queue[:2].clone()
        self.queue[:2] = x[:2].detach()
        return torch.cat([x, old])

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(self.replayed(x)))).square().mean()


class StatisticsBefore(_Parts):
    def normed(self, h: Tensor) -> Tensor:
        count, old = self.norm.num_batches_tracked + 1, self.norm.running_mean.clone()
        y = self.norm(h)
        return (y - old) * count

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.normed(self.first(x))).square().mean()


class InADict(_Parts):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        self.kept["mean"] = self.mean.clone()
        self.mean.mul_(0.9).add_(0.1 * h.detach().mean(0))
        return self.second(h - self.kept["mean"]).square().mean()


class NumberBefore(_Parts):
    def forward(self, x: Tensor) -> Tensor:
        scale = self.largest.item()
        self.largest.copy_(torch.maximum(self.largest, x.abs().max()))
        h = self.first(x / scale)
        return self.second(torch.tanh(h)).square().mean()


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, h: Tensor, by: float) -> Tensor:
        return torch.tanh(self.inner(h)) * by


class NumberForAPart(_Parts):
    def __init__(self) -> None:
        super().__init__()
        self.scaled = Scaled()

    def forward(self, x: Tensor) -> Tensor:
        scale = self.largest.item()
        h = self.first(x)
        self.largest.mul_(1.5)
        return self.second(self.scaled(h, scale)).square().mean() + self.largest.item()


class NumberOfAnActivation(_Parts):
    def forward(self, x: Tensor) -> Tensor:
        h = 2 * self.first(x)
        largest = h.max().item()
        h.mul_(0.5)
        return self.second(h / largest).square().mean() + h.sum().item()


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize(
    "kind",
    [
        MeanTeacher,
        Pool,
        StatisticsBefore,
        InADict,
        NumberBefore,
        NumberForAPart,
        NumberOfAnActivation,
    ],
)
def test_a_stage_reads_a_buffer_before_it_writes_it(kind: type[nn.Module], num_stages: int) -> None:
    torch.manual_seed(0)
    model = kind()
    alone = copy.deepcopy(model)
    pipe = pd2bw_fx.split(model, torch.rand(4, 6), num_stages=num_stages, cluster=2, costs="analytic")

    for number in range(4):
        x = 10.0**number * torch.randn(4 + number, 6)
        (found,) = pipe.run(x).values()
        assert torch.equal(found, alone(x)), number


def test_a_number_that_a_part_is_given_is_one_in_its_code() -> None:
    pipe = pd2bw_fx.split(NumberForAPart(), torch.rand(4, 6), cluster=2, costs="analytic")
    code = "\n".join(stage.source for stage in pipe.stages)
    assert "scale = self.largest.item()" in code
    assert "scale: float" in code


def test_bits_written_as_other_numbers_are_written_in_place() -> None:
    class Magnitudes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            positive = x.clone()
            positive.view(torch.int32).bitwise_and_(0x7FFFFFFF)  # without the sign's bit
            return self.last(self.first(x) * positive).square().mean()

    pipe = pd2bw_fx.split(Magnitudes(), torch.randn(4, 6), cluster=2, costs="analytic", check=False)
    assert pipe.verify().exact
