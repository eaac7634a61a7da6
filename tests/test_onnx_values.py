"""Stages whose sizes and numbers depend on values, as ONNX files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import pd2bw_fx
from pd2bw_fx.errors import ExportError
from pd2bw_fx.pipeline import Pipeline


def split(model: nn.Module, x: Tensor) -> Pipeline:
    return pd2bw_fx.split(model, x, cluster=2, costs="analytic")


class Experts(nn.Module):
    """Each multiplies its own rows; what is behind them all is zeros. From torchtitan's loop over experts."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(3, 4, 4) * 0.3)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        numbers: list[int] = counts.tolist()
        padding = rows.shape[0] - sum(numbers)
        parts = torch.split(rows[: sum(numbers)], numbers)
        done = torch.cat([part @ weight for part, weight in zip(parts, self.weights, strict=True)])
        return torch.vstack((done, done.new_zeros((padding, done.shape[-1]))))


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 3)
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.gate(x).argmax(-1)
        order = chosen.argsort(stable=True)
        counts = functional.one_hot(chosen, 3).sum(0)
        return x + torch.zeros_like(x).index_add(0, order, self.experts(x[order], counts))


def test_rows_that_are_split_by_values_are_exported(tmp_path: Path) -> None:
    torch.manual_seed(0)
    pipe = split(nn.Sequential(Routed(), Routed()), torch.randn(8, 4))

    manifest = pipe.export_onnx(tmp_path / "stages")

    assert manifest["largest_differences_from_model"]["output"] < 1e-6


class ByNumber(nn.Module):
    def __init__(self, function: Callable[[Tensor, float], Tensor]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.3))
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        number = self.scale.item()
        return self.last(self.function(self.first(x), number))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, number: (x.abs() + 1) ** number,
        lambda x, number: torch.pow(x.abs() + 1, exponent=number),
        lambda x, number: x % number,
        lambda x, number: x + x.detach() // number,
    ],
    ids=["**", "pow", "%", "//"],
)
def test_numbers_that_are_values_are_operands(
    tmp_path: Path, function: Callable[[Tensor, float], Tensor]
) -> None:
    torch.manual_seed(0)
    pipe = split(ByNumber(function), torch.randn(8, 4))

    manifest = pipe.export_onnx(tmp_path / "stages")

    assert manifest["largest_differences_from_model"]["output"] < 1e-6


def test_a_number_that_is_a_value_where_the_exporter_takes_none_is_told(tmp_path: Path) -> None:
    pipe = split(ByNumber(functional.leaky_relu), torch.randn(8, 4))

    with pytest.raises(ExportError, match=r"test_onnx_values.py:\d+; .*compute with tensors, without .item"):
        pipe.export_onnx(tmp_path / "stages")
    assert not (tmp_path / "stages").exists()
