"""Training and evaluation in ONNX files, of models that compute something else in the other mode."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pd2bw_fx.errors import ExportError
from pd2bw_fx.passes.export_onnx import run_onnx
from tests.onnx_stages import cut


class Moody(nn.Module):
    """Computes another thing in evaluation than what its stages, traced in training, know of."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        scale = 1.0 if self.training else 2.0
        return self.second(self.first(x) * scale)


def test_stages_that_agree_with_their_files_but_not_with_the_model_are_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    moody = cut(Moody(), (torch.randn(3, 4),), {}, 2)

    with pytest.raises(
        ExportError, match=r"output, which stage 1 returns, differs from the original model's"
    ):
        moody.export(tmp_path / "onnx")

    assert list(tmp_path.iterdir()) == []
    assert moody.export(tmp_path / "onnx", training=True)["largest_differences_from_model"]["output"] < 1e-5


def test_training_form_normalises_by_the_batch_and_leaves_running_statistics(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3))
    two = cut(net, (torch.randn(3, 2, 8, 8),), {}, 2)

    manifest = two.export(tmp_path / "onnx", training=True)

    x = {"input": torch.randn(5, 2, 8, 8)}
    found = run_onnx(tmp_path / "onnx", x)
    assert manifest["mode"] == "training"
    assert int(two.modules[0].get_buffer("1.num_batches_tracked")) == 0
    np.testing.assert_allclose(found["output"], two.eager(x, training=True)["output"], rtol=1e-4, atol=1e-5)


def test_what_draws_random_numbers_has_no_training_form(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 4))

    with pytest.raises(ExportError, match="differs between two runs on the same inputs in training mode"):
        cut(net, (torch.randn(3, 4),), {}, 2).export(tmp_path / "onnx", training=True)

    assert list(tmp_path.iterdir()) == []


class DropPath(nn.Module):
    """Stochastic depth as many libraries write it: Python asks for the mode."""

    def forward(self, hidden: Tensor) -> Tensor:
        if not self.training:
            return hidden
        return hidden * torch.rand(hidden.shape[0], 1, device=hidden.device).add(0.5).floor()


class Thinned(nn.Module):
    """Something else in either mode."""

    def forward(self, hidden: Tensor) -> Tensor:
        if not self.training:
            return hidden * 0.5
        return hidden * torch.rand(hidden.shape[0], 1, device=hidden.device).add(0.5).floor()


def test_stochastic_depth_that_was_traced_in_training_is_not_in_the_files(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), DropPath(), nn.Linear(4, 4), nn.Dropout(0.1))
    x = torch.randn(3, 4)

    cut(net, (x,), {}, 2).export(tmp_path / "onnx")

    found = run_onnx(tmp_path / "onnx", {"input": x})["output"]
    np.testing.assert_allclose(found, net.eval()(x).detach(), rtol=1e-4, atol=1e-6)


def test_a_branch_of_training_that_was_traced_is_named_and_evaluation_exports(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), Thinned(), nn.Linear(4, 4), nn.Dropout(0.1))
    x = torch.randn(3, 4)

    with pytest.raises(ExportError, match=r"drawn by 1 \(Thinned, .*split `model.eval\(\)`"):
        cut(net, (x,), {}, 2).export(tmp_path / "onnx")

    cut(net.eval(), (x,), {}, 2).export(tmp_path / "onnx")
    found = run_onnx(tmp_path / "onnx", {"input": x})["output"]
    np.testing.assert_allclose(found, net(x).detach(), rtol=1e-4, atol=1e-6)
