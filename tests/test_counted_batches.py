"""Batches that a model, or helpers of its file, count in Python stay open."""

from __future__ import annotations

import importlib
import math
import types
from math import sqrt
from pathlib import Path

import opt_einsum
import pytest
import torch
from torch import Tensor, nn

import pd2bw_fx
from pd2bw_fx.passes.trace.patches.numbers_of_sizes import _only_called
from pd2bw_fx.size_range import ANY_SIZE
from tests.sized_batches import rows, split


class Counting(nn.Module):
    """Contrasts each sample with the others, and makes plain numbers of how many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).view(len(x), -1)
        likeness = self.second(hidden) @ hidden.t() / math.sqrt(x.shape[0]) * sqrt(int(x.size(0)))
        loss = nn.functional.cross_entropy(likeness, torch.arange(len(hidden))) * len(x) / len((1, 2))
        assert isinstance(x.shape[1], int)
        assert isinstance(loss, Tensor)
        loss = loss + 0 * torch.randn(x.shape, generator=None).mean()
        return loss / float(x.shape[0]) + x.shape[0] ** -0.5 + math.ceil(x.shape[0] / 3) + round(len(x) * 0.4)


def test_a_batch_that_is_counted_in_python_stays_open() -> None:
    model = Counting()
    pipe = split(model, 4)

    assert pipe.graph.batch_symbol == "batch"
    for count in (1, 3, 7):
        torch.testing.assert_close(pipe.run(rows(count))["loss"], model(rows(count)))
    assert not {"len", "int", "float"} & globals().keys()
    assert sqrt is math.sqrt
    assert math.sqrt(4) == int("2") == float("2")


@pytest.mark.parametrize(
    ("code", "called"),
    [
        (
            "def f(x: int) -> float:\n    y: int\n    return float(x) if isinstance(x, (int, str)) else 0",
            {"float"},
        ),
        ("torch.zeros(int(n), dtype=float)", {"int"}),
        ("float(n); list(map(float, n))", set()),
        ("type(n) is int and int(n)", set()),
    ],
)
def test_what_a_file_has_for_calls_alone(code: str, called: set[str], tmp_path: Path) -> None:
    """Elsewhere `float` must be the built-in itself."""
    (tmp_path / "file.py").write_text(code)
    file = types.ModuleType("file")
    file.__file__ = str(tmp_path / "file.py")

    assert _only_called(file) == called


class Contracting(nn.Module):
    """(batch, time, 6) -> (batch, time, 4), by three operands, for which there are several orders."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.down = nn.Parameter(torch.randn(6, 2))
        self.up = nn.Parameter(torch.randn(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        once = torch.einsum("bti,ij,jk->btk", self.first(x), self.down, self.up)
        by_shapes = opt_einsum.contract_expression("bti,ij,jk->btk", x.shape, (6, 2), (2, 4))
        again: Tensor = by_shapes(torch.tanh(x), self.down, self.up)
        return once + again + opt_einsum.contract("bti,ij,jk->btk", x, self.down, self.up)


def test_the_order_of_a_contraction_is_found_once_and_the_batch_stays_open(tmp_path: Path) -> None:
    pipe = pd2bw_fx.split(
        Contracting(), torch.randn(3, 5, 6), cluster=2, num_stages=2, costs="analytic", check="full"
    )

    assert pipe.graph.batch_symbol == "batch"
    assert pipe.trace_report is not None
    assert pipe.trace_report.tracer == "export"
    assert pipe.export_onnx(tmp_path / "onnx")["batch_sizes_checked"] == [3, 7]


def test_a_batch_that_helpers_of_the_models_file_count_stays_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "masks_of_lengths.py").write_text(
        "import torch\n"
        "def mask_of(lengths, longest):\n"
        "    return torch.arange(longest).expand(len(lengths), longest) < lengths.unsqueeze(1)\n"
    )
    (tmp_path / "masked_model.py").write_text(
        "from torch import nn\n"
        "from masks_of_lengths import mask_of\n"
        "class Masked(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = nn.Linear(6, 6)\n"
        "    def forward(self, x, lengths):\n"
        "        return (self.layer(x) * mask_of(lengths, x.shape[1])).square().mean()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    model = importlib.import_module("masked_model").Masked()

    example = (torch.randn(4, 6), torch.tensor([2, 3, 6, 1]))
    pipe = pd2bw_fx.split(model, example, cluster=1, costs="analytic")

    pipe.verify(example={"x": torch.randn(7, 6), "lengths": torch.arange(7)})


class Contrasting(nn.Module):
    """Two views of each sample go through in one batch, and are taken apart again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        both = self.second(self.first(torch.cat([x, y])).relu())
        left, right = both.chunk(chunks=2)
        one, other = both.split(x.shape[0])
        rest = torch.split(torch.cat([both, both[: x.shape[0]]]), 3 * len(x))[0]
        return (left - other).square().mean() + (one - right).abs().mean() + rest.sum()


def test_parts_of_as_many_as_there_are_samples_leave_the_batch_open(tmp_path: Path) -> None:
    example = (rows(4), -rows(4))
    pipe = pd2bw_fx.split(Contrasting(), example, cluster=2, num_stages=2, costs="analytic", check="full")

    assert pipe.graph.batch_sizes == ANY_SIZE
    source = "".join(stage.source for stage in pipe.stages)
    assert "left, right = both.split([batch, batch])" in source
    assert "torch.cat([both, both[:batch]])" in source
    pipe.verify(example={"x": rows(1), "y": rows(1)})
    pipe.export_onnx(tmp_path / "onnx")
