"""Layers with a normed weight are built as their authors build them, if they compute what torch's own do."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import pd2bw_fx


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = spectral_norm(nn.Embedding(10, 8))
        self.conv = weight_norm(nn.Conv1d(8, 8, 3, padding=1, bias=False), dim=2)
        self.up = spectral_norm(nn.ConvTranspose1d(8, 8, 3, padding=1), n_power_iterations=3)
        self.up2 = weight_norm(nn.ConvTranspose1d(8, 8, 3, padding=1), dim=1)
        self.mix = weight_norm(nn.Linear(8, 8), dim=None)
        self.ends = nn.Sequential(
            weight_norm(nn.Linear(8, 8)), nn.ReLU(), spectral_norm(nn.Linear(8, 3), eps=1e-6)
        )

    def forward(self, words: Tensor) -> Tensor:
        x = self.table(words).transpose(1, 2)
        x = self.up2(torch.relu(self.up(self.conv(x)))).transpose(1, 2)
        return self.ends(self.mix(self.mix(x))).square().mean()


class Otherwise(nn.Module):
    """Layers that do something else than those with a norm do, each in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.both = spectral_norm(weight_norm(nn.Linear(8, 8)))
        self.kept = weight_norm(nn.Linear(8, 8))
        self.hooked = weight_norm(nn.Linear(8, 8))
        self.hooked.parametrizations["weight"].register_forward_hook(lambda _, __, weight: weight * 2)
        self.read = weight_norm(nn.Linear(8, 8))
        self.asleep = spectral_norm(nn.Linear(8, 8))
        self.asleep.parametrizations["weight"].eval()
        self.biased = weight_norm(nn.Linear(8, 8), "bias")

    def forward(self, x: Tensor) -> Tensor:
        x = self.both(x)
        with parametrize.cached():
            x = self.kept(self.kept(x))
        x = self.hooked(x)
        x = self.read(x) + self.read.weight.sum()
        return self.biased(self.asleep(x)).square().mean()


WORDS = torch.randint(10, (8, 6), generator=torch.Generator().manual_seed(0))


def test_norms_are_called_as_their_author_called_them() -> None:
    torch.manual_seed(0)
    pipe = pd2bw_fx.split(Normed(), WORDS, cluster=1, costs="analytic")
    source = pipe.stages[0].source
    for line in (
        "self.table = spectral_norm(nn.Embedding(10, 8))",
        "weight_norm(nn.Conv1d(8, 8, 3, padding=1, bias=False), dim=2)",
        "nn.ConvTranspose1d(8, 8, 3, padding=1), n_power_iterations=3",
        "self.up2 = weight_norm(nn.ConvTranspose1d(8, 8, 3, padding=1), dim=1)",
        "self.mix = weight_norm(nn.Linear(8, 8), dim=None)",
        "spectral_norm(nn.Linear(8, 3), eps=1e-6)",
    ):
        assert line in source
    assert source.count("class ") == 1

    assert pipe.verify().exact


@pytest.mark.parametrize("recompute", [False, True])  # a forward that is run again leaves the norms alone
def test_stages_with_norms_train_as_the_model_does(recompute: bool) -> None:
    torch.manual_seed(0)
    model, optimizer = Normed().double(), partial(torch.optim.SGD, lr=0.1)
    pipe = pd2bw_fx.split(model, WORDS[:4], cluster=2, costs="analytic", recompute=recompute)
    run = pipe.train_local([(WORDS,)] * 3, optimizer=optimizer, microbatches_per_update=2, method="1f1b")

    alone, found = optimizer(model.parameters()), []
    for _ in range(3):
        losses = torch.stack([model(part) / 2 for part in WORDS.chunk(2)])
        losses.sum().backward()
        alone.step()
        alone.zero_grad()
        found.append(losses.detach().sum())
    torch.testing.assert_close(
        torch.tensor(run.losses, dtype=torch.float64), torch.stack(found), rtol=1e-12, atol=0
    )
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(pipe.state_dict()[name], tensor, rtol=1e-12, atol=1e-14)


def test_a_norm_that_each_call_brings_nearer_rests_in_evaluation(tmp_path: Path) -> None:
    torch.manual_seed(0)
    pipe = pd2bw_fx.split(Normed(), WORDS, cluster=2, costs="analytic")
    assert pipe.trace_report is not None
    assert not pipe.trace_report.evaluation

    pipe.export_onnx(tmp_path)  # raises if onnxruntime finds something else than the model in evaluation


def test_a_model_in_evaluation_has_what_its_norms_compute_there() -> None:
    torch.manual_seed(0)
    pipe = pd2bw_fx.split(Normed().eval(), WORDS, cluster=1, costs="analytic")
    source = pipe.stages[0].source

    assert "weight_norm(nn.Linear(8, 8), dim=None)" in source
    assert "spectral_norm(" not in source
    assert pipe.verify().exact


def test_other_parametrisations_are_what_they_compute() -> None:
    torch.manual_seed(0)
    pipe = pd2bw_fx.split(Otherwise(), torch.randn(4, 8), cluster=1, costs="analytic")
    source = pipe.stages[0].source

    assert "nn.utils.parametrizations" not in source
    assert "torch._weight_norm(" in source
    assert pipe.verify().exact
