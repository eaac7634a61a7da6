"""A model that asks for the batch size is traced for all sizes with the example's answer, and no others."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import pd2bw_fx
from pd2bw_fx.errors import InputError
from pd2bw_fx.size_range import ANY_SIZE, SizeRange
from tests.sized_batches import rows, split, whole_again


class Asking(nn.Module):
    """Does something else for `limit` samples or more, each counted `times` times."""

    def __init__(self, limit: int, times: int = 1) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.limit, self.times = limit, times

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x.repeat(self.times, 1))
        if hidden.shape[0] >= self.limit:
            hidden = hidden.relu()
        return self.second(hidden).square().mean()


class InParts(Asking):
    """Computes each part of up to `limit` samples by itself, as ghost batch norm does."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        numbers = (
            math.ceil(len(x) / self.limit),
            int(np.ceil(len(x) / self.limit)),
            -(-len(x) // self.limit),
        )
        for number in numbers[: self.times]:
            hidden = torch.cat([part - part.mean(0) for part in hidden.chunk(number)])
        return self.second(hidden).square().mean()


class Fixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.second(hidden * len(x) if len(x) % 3 else hidden).square().mean()


@pytest.mark.parametrize(
    ("model", "count", "sizes", "right", "wrong"),
    [
        (Asking(6), 4, SizeRange(1, 5), 3, 6),
        (Asking(6), 5, SizeRange(1, 5), 2, 6),
        (Asking(6), 8, SizeRange(6), 9, 5),
        (Asking(64, times=3), 4, SizeRange(1, 21), 21, 22),
        (InParts(16), 6, SizeRange(1, 16), 16, 17),
        (InParts(16, times=3), 6, SizeRange(1, 16), 9, 17),
    ],
)
def test_sizes_with_the_examples_answer_are_open_and_others_refused(
    model: Asking, count: int, sizes: SizeRange, right: int, wrong: int, tmp_path: Path
) -> None:
    split(model, count).save(tmp_path)
    pipe = pd2bw_fx.load(tmp_path)

    assert pipe.batch_layout is not None
    assert pipe.batch_layout.microbatch_sizes == pipe.graph.batch_sizes == sizes
    assert any(f"this program is for batches of {sizes}" in note for note in pipe.trace_report.notes)
    assert pipe.verify(model, example={"x": rows(right)}).worst.relative < 1e-6
    cut = pipe.batch_layout.cut({"x": rows(2 * right)}, 2)
    assert [piece["x"].shape[0] for piece in cut] == [right, right]
    nearest = 2 * (sizes.least if wrong < sizes.least else sizes.most or 0)
    with pytest.raises(InputError, match=f"traced for {sizes}: pass {nearest} samples"):
        pipe.batch_layout.cut({"x": rows(2 * wrong)}, 2)


class Standardising(nn.Module):
    """Divides by the deviation within the batch, which is nan for one sample; `largest` is a number."""

    def __init__(self, *, goes_another_way: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.goes_another_way = goes_another_way

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.first(x)
        largest = hidden.amax()
        if len(x) > 1:
            hidden = hidden.relu()
            largest = largest + self.goes_another_way
        hidden = (hidden - hidden.mean(0)) / (hidden.std(0) + 1e-3)
        return {"loss": self.second(hidden).square().mean(), "largest": largest}


@pytest.mark.parametrize("goes_another_way", [False, True])
@pytest.mark.filterwarnings("ignore:std")
def test_a_model_that_is_nan_for_one_sample_is_open_for_more(goes_another_way: bool) -> None:
    pipe = split(Standardising(goes_another_way=goes_another_way), 4)

    assert pipe.trace_report.tracer == "export"
    assert pipe.graph.batch_sizes == SizeRange(2 if goes_another_way else 1)


def test_a_size_that_cannot_be_left_open_is_the_only_one() -> None:
    pipe = split(Fixing(), 4)

    assert pipe.trace_report.tracer == "export-static"
    assert pipe.batch_layout is not None
    assert pipe.batch_layout.microbatch_sizes == SizeRange.only(4)


class Overwriting(nn.Module):
    """Writes four rows: all of the example's, not all of a larger batch's. And some that are none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).clone()
        hidden[:4] = 0.5
        hidden[:, 1:1] = 2.0
        for some in (slice(-2, None), slice(0, 0)):
            hidden[some, 2:4] *= 3
        return self.second(hidden).square().mean()


@pytest.mark.parametrize("count", [4, 6])
def test_what_is_written_is_a_part_of_other_batches(count: int) -> None:
    pipe = split(Overwriting(), count)

    assert pipe.graph.batch_sizes == SizeRange(4)
    for other in (4, 5, 9):
        assert pipe.verify(example={"x": rows(other)}).exact


class Encoder(nn.Module):
    """Modules without tensors, which an exported program does not have; draws, and returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor, targets: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"loss": (x - targets).square().mean(), "x": x}


def test_a_program_that_was_exported_already_is_split_for_its_own_sizes() -> None:
    inputs = (torch.randn(4, 5, 8), torch.randn(4, 5, 8))
    sizes = {0: Dim("rows", min=2, max=7)}
    exported = torch.export.export(Encoder(), inputs, dynamic_shapes=(sizes, sizes))

    pipe = pd2bw_fx.split(exported, cluster=2, num_stages=2, costs="analytic", check="full")

    assert pipe.graph.model_name == "Encoder"
    assert pipe.graph.batch_sizes == SizeRange(1, 7)
    assert pipe.graph.loss == "loss"
    assert pipe.trace_report is not None
    assert "has one mode alone" in pipe.trace_report.evaluation
    with pytest.raises(InputError, match="example inputs that it was exported with"):
        pd2bw_fx.split(exported, inputs, cluster=2)


def test_an_exported_program_is_trained_as_its_module_is() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    exported = torch.export.export(model, (rows(4),), dynamic_shapes=({0: Dim("rows", min=2)},))
    constraints = pd2bw_fx.Constraints(stage_of={"0": 0, "2": 1})
    options = {"cluster": 2, "num_stages": 2, "costs": "analytic", "constraints": constraints}

    pipe = pd2bw_fx.split(exported, **options)

    assert pipe.batch_layout is not None
    assert pipe.batch_layout.flatten(rows(6)).keys() == {"input"} == set(pipe.graph.inputs)
    same = pd2bw_fx.split(model, rows(4), **options)
    for name, tensor in same.tensors().items():
        assert torch.equal(pipe.tensors()[name], tensor)


def test_a_size_that_depends_on_values_and_equals_the_batch_is_no_bound_of_it() -> None:
    class OneMarkEach(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor, classes: Tensor) -> Tensor:
            scores = self.second(self.first(x))
            marks = torch.zeros(classes.size(0), 3)
            marks[torch.arange(classes.size(0)), classes] = 1
            margins = marks * (0.5 * scores[marks == 1]).unsqueeze(1)
            return nn.functional.cross_entropy(scores - margins, classes)

    model, classes = OneMarkEach(), torch.randint(3, (4,))

    pipe = pd2bw_fx.split(model, (rows(4), classes), cluster=2, num_stages=2, costs="analytic")

    assert pipe.trace_report is not None
    assert pipe.trace_report.notes == ()


def test_a_range_says_what_it_is() -> None:
    ranges = [ANY_SIZE, SizeRange(1, 5), SizeRange(6), SizeRange(2, 5), SizeRange.only(3)]

    assert [str(found) for found in ranges[1:]] == ["5 or fewer", "6 or more", "2 to 5", "3 only"]
    assert [found.is_open for found in ranges] == [True, False, False, False, False]
    assert [[size for size in range(1, 8) if size in found] for found in ranges] == [
        [1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5], [6, 7], [2, 3, 4, 5], [3],
    ]  # fmt: skip


class Windowed(nn.Module):
    """Swin's windows, put together again here or by a function of another file."""

    def __init__(self, *, is_elsewhere: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.is_elsewhere = is_elsewhere

    def forward(self, x: Tensor) -> Tensor:
        height, width, side = x.shape[1], x.shape[2], 2
        windows = self.first(x).unflatten(1, (-1, side)).unflatten(3, (-1, side)).transpose(2, 3)
        windows = windows.reshape(-1, side, side, 4)
        if self.is_elsewhere:
            return self.second(whole_again(windows, side, height, width)).square().mean()
        count = int(windows.shape[0] / (height * width / side / side))
        found = windows.view(count, height // side, width // side, side, side, -1)
        return self.second(found.transpose(2, 3).reshape(count, height, width, -1)).square().mean()


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_a_batch_that_is_told_from_a_multiple_stays_open(*, is_elsewhere: bool) -> None:
    model = Windowed(is_elsewhere=is_elsewhere)
    pipe = pd2bw_fx.split(model, (torch.randn(2, 4, 6, 4),), cluster=2, costs="analytic", check="full")

    assert pipe.graph.batch_sizes == ANY_SIZE
    pipe.verify(example={"x": torch.randn(5, 4, 6, 4)})


class Normed(nn.Module):
    """Takes the mean of a batch off where there is one: `kind` says how it asks."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.kind == "more" and x.shape[0] > 1:
            hidden = hidden - hidden.mean(0)
        if self.kind == "one" and len(x) == 1:
            hidden = hidden.square()
        if self.kind == "expanding":
            bias = torch.arange(8.0)[None]
            hidden = hidden + (bias if bias.shape[0] == x.shape[0] else bias.expand(x.shape[0], -1))
        return self.second(hidden).square().mean()


@pytest.mark.parametrize("kind", ["more", "one"])
def test_a_way_that_only_one_sample_goes_is_not_taken_for_the_others(kind: str) -> None:
    model = Normed(kind)
    pipe = split(model, 4)

    assert pipe.graph.batch_sizes == SizeRange(2)
    assert torch.allclose(pipe.run(rows(7))["loss"], model(rows(7)))
    with pytest.raises(InputError, match="'x' has 1 sample; the model was traced for 2 or more"):
        pipe.run(rows(1))
    alone = split(model, 1)
    assert alone.graph.batch_sizes.is_one_size or alone.graph.batch_symbol is None
    assert torch.allclose(alone.run(rows(1))["loss"], model(rows(1)))


def test_a_question_that_makes_no_difference_leaves_one_sample_open() -> None:
    model = Normed("expanding")
    pipe = split(model, 4)

    assert pipe.graph.batch_sizes == ANY_SIZE
    assert torch.allclose(pipe.run(rows(1))["loss"], model(rows(1)))


class Shifted(nn.Module):
    """A causal language model's loss: a slice of one row is contiguous, of several it is not."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 8), nn.Linear(8, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(torch.tanh(self.embedding(tokens)))[:, :-1].contiguous().view(-1, 50)
        return nn.functional.cross_entropy(logits, tokens[:, 1:].contiguous().view(-1))


def test_an_example_of_one_row_leaves_what_others_need() -> None:
    model, tokens = Shifted(), torch.randint(0, 50, (4, 9))

    pipe = pd2bw_fx.split(model, tokens[:1], cluster=2, costs="analytic", check="full")

    assert torch.equal(pipe.run(tokens)["loss"], model(tokens))


class Limited(nn.Module):
    def __init__(self, limit: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.limit = limit

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if x.shape[0] * x.shape[1] <= self.limit:
            hidden = hidden - hidden.mean()
        return self.second(hidden).square().mean()


@pytest.mark.parametrize(("limit", "most"), [(96, 12), (100, 12), (1003, 125)])
def test_a_limit_of_a_multiple_need_not_be_one(limit: int, most: int) -> None:
    model = Limited(limit)

    pipe = split(model, 4)

    assert pipe.graph.batch_sizes == SizeRange(1, most)
    assert torch.allclose(pipe.run(rows(most))["loss"], model(rows(most)))
