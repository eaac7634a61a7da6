"""Models as ONNX files whose operators the exporter alone would not translate, or not rightly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import pd2bw_fx
from pd2bw_fx.errors import ExportError
from pd2bw_fx.pipeline import Pipeline


def pipeline(model: nn.Module, x: Tensor, num_stages: int = 2) -> Pipeline:
    return pd2bw_fx.split(model, x, cluster=num_stages, num_stages=num_stages, costs="analytic")


class Attention(nn.Module):
    """x: (batch, time, 8). Attention with two to five dimensions; of that with four a view of how the kernel
    lays it out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x = self.first(x)
        size, time, width = x.shape
        mask = torch.ones(size, time, time, dtype=torch.bool, device=x.device).tril()
        flat = functional.scaled_dot_product_attention(x[0], x[0], x[0])
        masked = functional.scaled_dot_product_attention(x, x, x, mask)
        heads = x.view(size, time, 2, width // 2).transpose(1, 2)
        causal = functional.scaled_dot_product_attention(heads, heads, heads, None, 0.0, True)
        windows = torch.stack([heads, 2 * heads], dim=1)
        deep = functional.scaled_dot_product_attention(
            windows, windows, heads.unsqueeze(1) + windows, mask[:, None, None]
        )
        return (
            x + flat,
            masked,
            causal.transpose(1, 2).view(size, time, width),
            torch.cat([*deep.mean(1).unbind(1)], -1),
        )


def test_attention_of_any_number_of_dimensions_is_exported(tmp_path: Path) -> None:
    manifest = pipeline(Attention(), torch.randn(3, 5, 8), 1).export_onnx(tmp_path / "onnx")

    differences = manifest["largest_differences_from_model"]
    assert len(differences) == 4
    assert max(differences.values()) < 1e-5


def test_convolutions_over_three_dimensions_without_a_bias_are_exported(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv3d(2, 4, 3, bias=False), nn.ReLU(), nn.Conv3d(4, 2, 1, bias=False, groups=2))

    manifest = pipeline(model, torch.randn(2, 2, 5, 5, 5)).export_onnx(tmp_path / "onnx")

    assert max(manifest["largest_differences_from_model"].values()) < 1e-5


class Turning(nn.Module):
    """hidden: (batch, 4, 6), a view of which is handed on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 24), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        turned = self.first(x).view(-1, 4, 6).transpose(1, 2)
        return self.last(turned).contiguous().square() + turned.contiguous()


def test_a_view_is_handed_on_and_its_batch_is_dynamic(tmp_path: Path) -> None:
    pipe = pipeline(Turning(), torch.randn(3, 4))

    manifest = pipe.export_onnx(tmp_path / "onnx")

    assert manifest["batch_sizes_checked"] == [3, 4]


class Vanishing(nn.Module):
    """Numbers that have lost digits for being so small, some of them taken for 0 by other kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x * 1e-38)) * 1e-6


def test_numbers_next_to_zero_do_not_count_as_wrong(tmp_path: Path) -> None:
    torch.manual_seed(0)

    manifest = pipeline(Vanishing(), torch.randn(3, 8)).export_onnx(tmp_path / "onnx")

    assert max(manifest["largest_differences_from_model"].values()) < 1e-5


def test_a_buffer_that_the_forward_writes_in_evaluation_too_is_named(tmp_path: Path) -> None:
    normed = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
    model = nn.Sequential(normed, nn.ReLU(), nn.Linear(8, 4))

    with pytest.raises(ExportError, match=r"the forward writes the buffer 0\.parametrizations\.weight\.0\._"):
        pipeline(model, torch.randn(3, 8)).export_onnx(tmp_path / "onnx")

    pipeline(model.eval(), torch.randn(3, 8)).export_onnx(tmp_path / "onnx")
