"""Parameters of complex numbers: trained as real ones are, wherever the model is cut."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import pd2bw_fx
from tests.trained import assert_trained_by_the_rule


class Rotating(nn.Module):
    """Reads its complex weight by way of what is made of it alone."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
        self.own = nn.Parameter(torch.randn(4, 4, dtype=torch.complex128))
        self.layer = nn.Linear(4, 4, dtype=torch.complex128)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        weight = self.own.T
        if self.kind == "detached":
            weight = self.own.detach()
        elif self.kind == "no_grad":
            with torch.no_grad():
                weight = self.own * 2
        hidden = torch.tanh(self.first(x)).to(self.own.dtype)
        turned = self.layer(hidden @ weight) + self.own.sum()
        return self.last(turned.real).square().mean()


def made(kind: str) -> tuple[nn.Module, nn.Module, pd2bw_fx.Pipeline]:
    """A model, the same one before, and in two stages."""
    torch.manual_seed(0)
    model = Rotating(kind)
    before = copy.deepcopy(model)
    x = torch.randn(4, 4, dtype=torch.float64)
    return model, before, pd2bw_fx.split(model, x, cluster=2, num_stages=2, costs="analytic", check="full")


@pytest.mark.parametrize("kind", ["detached", "no_grad"])
def test_what_stops_a_gradient_is_kept(kind: str) -> None:
    _, _, pipe = made(kind)
    assert pipe.verify().worst.relative < 1e-12


def test_a_gradient_flows_to_what_is_made_of_weights_alone() -> None:
    _, before, pipe = made("transposed")
    turned = next(o for o in pipe.graph.operators.values() if o.parameters == ("own",) and o.is_view)
    assert turned.outputs[0].requires_grad
    assert_trained_by_the_rule(before, pipe, [torch.randn(6, 4, dtype=torch.float64) for _ in range(3)])


def test_generated_layers_have_its_type() -> None:
    _, _, pipe = made("transposed")
    source = "".join(stage.source for stage in pipe.stages)
    assert "nn.Linear(4, 4, dtype=torch.complex128)" in source


class Shifted(nn.Module):
    def __init__(self, shift: Tensor) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)
        self.register_buffer("shift", shift)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x) + (self.shift * torch.ones_like(self.shift)).abs().float().sum()  # type: ignore[operator, arg-type]
        return self.last(hidden).square().mean()


@pytest.mark.parametrize(
    "shift",
    [torch.randn(3, dtype=torch.complex64).conj(), torch.randn(1).expand(3), torch.randn(2, 1).expand(2, 3)],
    ids=["conjugate", "expanded", "of two rows"],
)
def test_buffers_that_are_views_of_less_or_of_other_bits(shift: Tensor) -> None:
    pipe = pd2bw_fx.split(Shifted(shift), torch.randn(4, 4), cluster=2, costs="measured", profile_cache=False)

    pipe.verify()


@pytest.mark.usefixtures("one_rank")
def test_a_checkpoint_has_complex_numbers_of_any_precision(tmp_path: Path) -> None:
    given = torch.ones(4, 4, dtype=torch.float64)
    pipe = pd2bw_fx.split(Rotating("whole"), given, cluster=1, costs="analytic", check=False)
    for goes_on in (False, True):
        with pipe.engine(
            optimizer=lambda p: torch.optim.Adam(p), method="1f1b", microbatches_per_update=1
        ) as engine:
            if goes_on:
                assert engine.load_checkpoint(tmp_path) == 1
            else:
                engine.step(given)
                engine.save_checkpoint(tmp_path)
                expected = engine.state_dict()
            found = engine.state_dict()
    assert expected["own"].dtype is torch.complex128
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())
