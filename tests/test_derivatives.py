"""Models that differentiate in their forward: what autograd computes there is operators of the stages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad
from torch.nn import functional

import pd2bw_fx
from tests.trained import assert_trained_by_the_rule


def network(inputs: int, activation: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, 16), activation(), nn.Linear(16, 16), activation(), nn.Linear(16, 1)
    )


class Burgers(nn.Module):
    """u_t + u u_x = 0.01 u_xx at points (batch, 2) of place and time: a physics-informed network."""

    def __init__(self) -> None:
        super().__init__()
        self.field = network(2)

    def forward(self, points: Tensor) -> Tensor:
        points = points.requires_grad_(True)
        field = self.field(points)
        (slopes,) = torch.autograd.grad(field, points, torch.ones_like(field), create_graph=True)
        by_place, by_time = slopes[:, :1], slopes[:, 1:]
        (curves,) = torch.autograd.grad(by_place, points, torch.ones_like(by_place), create_graph=True)
        return (by_time + field * by_place - 0.01 * curves[:, :1]).square().mean()


class Forces(nn.Module):
    """Energies and forces of kinds (batch, atoms) at places (batch, atoms, 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = nn.Embedding(5, 8)
        self.pairs = network(17, nn.SiLU)

    def forward(self, kinds: Tensor, places: Tensor, energies: Tensor, forces: Tensor) -> Tensor:
        places = places.requires_grad_(True)
        count = places.shape[1]
        apart = (places[:, :, None] - places[:, None]).square().sum(-1)
        near = (-(apart + torch.eye(count, dtype=places.dtype)).sqrt()).exp()
        hidden = self.kinds(kinds)
        sides = (
            hidden[:, :, None].expand(-1, -1, count, -1),
            hidden[:, None].expand(-1, count, -1, -1),
            near[..., None],
        )
        energy = self.pairs(torch.cat(sides, -1)).sum((1, 2, 3))
        (slope,) = torch.autograd.grad(energy.sum(), places, create_graph=True)
        return functional.mse_loss(energy, energies) + functional.mse_loss(-slope, forces)


class Score(nn.Module):
    """Denoising score matching of an energy."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = network(4, nn.Softplus)

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        noisy = (x + 0.1 * noise).requires_grad_(True)
        (slope,) = torch.autograd.grad(self.energy(noisy).sum(), noisy, create_graph=True)
        return (noise / 0.1 - slope).square().mean()


class Attending(nn.Module):
    """An energy of (batch, time, 6) by attention and a norm, and how it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.parts, self.norm, self.last = nn.Linear(6, 24), nn.LayerNorm(8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_(True)
        query, key, value = self.parts(x).chunk(3, -1)
        mixed = torch.softmax(query @ key.mT / 8**0.5, -1) @ value
        energy = self.last(self.norm(mixed)).sum((1, 2))
        (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return slope.square().mean() + energy.mean()


class Penalty(nn.Module):
    """A critic of images whose slope is to have length 1 (arXiv 1704.00028)."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(
            nn.Conv2d(1, 4, 3),
            nn.GroupNorm(2, 4),
            nn.LeakyReLU(0.2),
            nn.Conv2d(4, 4, 3),
            nn.Flatten(),
            nn.Linear(64, 1),
        )

    def forward(self, real: Tensor, fake: Tensor) -> Tensor:
        between = (0.3 * real + 0.7 * fake).requires_grad_(True)
        (slope,) = torch.autograd.grad(self.critic(between).sum(), between, create_graph=True)
        penalty = (slope.flatten(1).norm(dim=1) - 1).square().mean()
        return self.critic(fake).mean() - self.critic(real).mean() + 10 * penalty


class Inner(nn.Module):
    """Two steps of gradient descent for its last weights, and the loss after them (arXiv 1703.03400)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden, weight = torch.tanh(self.first(x)), self.last.weight
        for _ in range(2):
            loss = functional.mse_loss(hidden @ weight.T, y)
            (slope,) = torch.autograd.grad(loss, weight, create_graph=True)
            weight = weight - 0.1 * slope
        return functional.mse_loss(hidden @ weight.T, y)


class OfFirstOrder(Inner):
    """The same with slopes that are constants to the loss after them."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden, weight = torch.tanh(self.first(x)), self.last.weight
        for _ in range(2):
            loss = functional.mse_loss(hidden @ weight.T, y)
            weight = weight - 0.1 * grad(loss, weight, retain_graph=True)[0]
        return functional.mse_loss(hidden @ weight.T, y)


def drawn(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes)


CASES: dict[type[nn.Module], tuple[Tensor, ...]] = {
    Burgers: drawn((8, 2)),
    Forces: (torch.arange(32).reshape(8, 4) % 5, *drawn((8, 4, 3), (8,), (8, 4, 3))),
    Score: drawn((8, 4), (8, 4)),
    Attending: drawn((8, 5, 6)),
    Penalty: drawn((8, 1, 8, 8), (8, 1, 8, 8)),
    Inner: drawn((8, 4), (8, 1)),
    OfFirstOrder: drawn((8, 4), (8, 1)),
}


def split(kind: type[nn.Module], dtype: torch.dtype = torch.float64) -> tuple[nn.Module, pd2bw_fx.Pipeline]:
    torch.manual_seed(0)
    model = kind().to(dtype)
    example = tuple(t.to(dtype) if t.is_floating_point() else t for t in CASES[kind])
    return model, pd2bw_fx.split(
        model, example, cluster=2, num_stages=2, costs="analytic", check="full", profile_cache=False
    )


@pytest.mark.parametrize("kind", CASES)
def test_a_model_that_differentiates_is_trained_by_the_rule(kind: type[nn.Module]) -> None:
    model, pipe = split(kind)
    batches = [tuple(tensor.flip(0) if turn else tensor for tensor in CASES[kind]) for turn in (0, 1, 0)]

    assert pipe.graph.batch_symbol == "batch"
    assert_trained_by_the_rule(model, pipe, batches)


@pytest.mark.parametrize("kind", [Burgers, Forces, Score, Attending, Inner])
def test_a_model_that_differentiates_is_exported_with_its_derivative(
    kind: type[nn.Module], tmp_path: Path
) -> None:
    _, pipe = split(kind, torch.float32)

    manifest = pipe.export_onnx(tmp_path / "onnx")

    assert manifest["compared_with"] == "the original model"
    assert manifest["largest_differences_from_model"]["loss"] < 1e-5


def test_the_network_is_called_part_by_part_where_its_derivative_reads_what_is_in_between() -> None:
    _, pipe = split(Score)

    source = "".join(program.source for program in pipe.programs)
    assert "torch.ops.aten.softplus_backward" in source
    assert "for block in self.energy" in source


def test_what_autograd_says_twice_or_by_default_is_not_printed() -> None:
    _, pipe = split(Burgers)

    source = "".join(program.source for program in pipe.programs)
    assert ".t().t()" not in source
    assert "memory_format" not in source
    assert source.count("slice_backward.default(") == 1  # of the column, and not of all rows


@pytest.mark.parametrize("draws_twice", [False, True])
def test_what_is_drawn_and_written_before_a_derivative_is_alike_in_evaluation(draws_twice: bool) -> None:
    class Penalty(nn.Module):
        """WGAN-GP's, on points between real and made ones, beside a count of calls."""

        def __init__(self) -> None:
            super().__init__()
            self.critic = network(6)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, real: Tensor, made: Tensor) -> Tensor:
            self.calls += 1
            share = torch.rand(real.shape[0], 1, device=real.device)
            between = (share * real + (1 - share) * made).requires_grad_(True)
            (slope,) = torch.autograd.grad(self.critic(between).sum(), between, create_graph=True)
            noise = torch.rand_like(slope) if draws_twice else 0
            return ((slope + noise).norm(dim=1) - 1).square().mean() * (1 + self.calls)

    pipe = pd2bw_fx.split(Penalty(), (torch.randn(4, 6), torch.randn(4, 6)), cluster=1, costs="analytic")
    assert pipe.trace_report is not None
    assert pipe.trace_report.evaluation == ""


def test_a_distribution_checks_its_values_beside_a_derivative_too() -> None:
    class Sampled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.energy, self.last = network(6), nn.Linear(6, 1)

        def forward(self, x: Tensor) -> Tensor:
            point = x.detach().requires_grad_(True)
            (force,) = torch.autograd.grad(self.energy(point).sum(), point, create_graph=True)
            drawn = torch.distributions.Normal(x + force, force.exp()).rsample()
            return self.last(drawn).square().mean()

    pipe = pd2bw_fx.split(Sampled(), torch.randn(4, 6), cluster=2, costs="analytic")

    assert pipe.verify().exact
