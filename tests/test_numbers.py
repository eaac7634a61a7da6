"""Numbers of the model's that a tracer makes constant tensors of: they read as numbers again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from pd2bw_fx import split


class Calling(nn.Module):
    """Two layers with a function between them, of what the first one gives and of a mask of its rows."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.function = function

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.last(self.function(self.first(x), mask)).square().mean()


def row(h: Tensor, mask: Tensor) -> Tensor:
    h[:, 0] = 1.0
    return h


def part_of_a_part(h: Tensor, mask: Tensor) -> Tensor:
    h[:, 1:3, 2] = 0.1
    return h


def masked_rows(h: Tensor, mask: Tensor) -> Tensor:
    h[mask] = -1e9
    return h * 1e-9


def masked_columns(h: Tensor, mask: Tensor) -> Tensor:
    h[:, torch.tensor([True, False, True, False, True, False])] = 2
    return h


def masked_values(h: Tensor, mask: Tensor) -> Tensor:
    h = h * 1
    h[h > 0.5] = float("inf")
    return h.exp().reciprocal()


def chosen_rows(h: Tensor, mask: Tensor) -> Tensor:
    h[:, [0, 2]] = 3.0
    return h


def either(h: Tensor, mask: Tensor) -> Tensor:
    low = torch.tensor(-0.5)
    h = torch.where(mask[:, :, None], low, h)
    return torch.where(h > 0, h, torch.tensor(0.25))


def arithmetic(h: Tensor, mask: Tensor) -> Tensor:
    h = h * torch.tensor(0.3) + torch.tensor(2)
    return h * (h > torch.tensor(1.9))


@pytest.mark.parametrize(
    ("function", "lines"),
    [
        (row, ["torch.full_like(first[:, 0], 1.0)"]),
        (part_of_a_part, [", 0.1)"]),
        (masked_rows, [".masked_fill(mask.unsqueeze(-1), -1e9)"]),
        (
            masked_columns,
            ["torch.tensor([True, False, True, False, True, False])", ".masked_fill(widened, 2.0)"],
        ),
        (masked_values, [".masked_fill(", ' > 0.5, float("inf"))']),
        (chosen_rows, [".index_fill(1, torch.tensor([0, 2]).to(", ", 3.0)"]),
        (either, [", -0.5, ", ", 0.25)"]),
        (arithmetic, [" * 0.3 + 2", " > 1.9"]),
    ],
)
def test_numbers_are_read_as_such(
    function: Callable[[Tensor, Tensor], Tensor], lines: list[str], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    batch = torch.randn(4, 6, 8), torch.rand(4, 6) > 0.5
    pipe = split(Calling(function), batch, cluster=2, costs="analytic", check="full")
    source = "".join(stage.source for stage in pipe.stages)
    for line in lines:
        assert line in source
    assert "self.constant_0" not in source
    pipe.export_onnx(tmp_path / "onnx")


def test_a_float32_beside_float64_is_that_number() -> None:
    torch.manual_seed(0)
    batch = torch.randn(4, 6, 8).double(), torch.rand(4, 6) > 0.5
    pipe = split(Calling(arithmetic).double(), batch, cluster=1, costs="analytic", check="full")
    assert " * 0.30000001192092896 + 2" in pipe.stages[0].source


class Counting(nn.Module):
    """Constants that are more than their number: written to, or the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.scale = torch.tensor(2.0)

    def forward(self, x: Tensor) -> Tensor:
        total = torch.tensor(1.5)
        total += self.layer(x).detach().sum()
        return (self.layer(x) * self.scale + total).mean()


def test_other_constants_stay_tensors() -> None:
    torch.manual_seed(0)
    pipe = split(Counting(), (torch.randn(4, 8),), cluster=2, num_stages=1, costs="analytic", check="full")
    assert " * self.scale" in pipe.stages[0].source
    assert "self.constant_0" in pipe.stages[0].source
