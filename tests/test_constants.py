"""Numbers of tensors that are made of nothing but constants, in a trace: whoever asks for them has them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import pd2bw_fx


class Levels(nn.Module):
    """Feature maps of several sizes in a row, as Deformable DETR has them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        sizes = torch.as_tensor([(4, 4), (2, 2)], device=x.device)
        assert (sizes[:, 0] * sizes[:, 1]).sum() == x.shape[1]
        maps = x.split([height * width for height, width in sizes], dim=1)
        total = torch.zeros((), dtype=x.dtype)
        for (height, width), part in zip(sizes, maps, strict=True):
            total = total + part.transpose(1, 2).reshape(len(part), 8, height, width).mean((2, 3))
        return self.last(total).square().mean()


class Crops(nn.Module):
    """DINO's MultiCropWrapper: crops of one size go through the backbone together."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(8, 4)

    def forward(self, crops: list[Tensor]) -> Tensor:
        sizes = torch.tensor([crop.shape[-1] for crop in crops])
        ends = torch.cumsum(torch.unique_consecutive(sizes, return_counts=True)[1], 0)
        start, output = 0, torch.empty(0).to(crops[0].device)
        for end in ends:
            output = torch.cat((output, self.backbone(torch.cat(crops[start:end]))))
            start = end
        return self.head(output).square().mean()


class Images(nn.Module):
    """Patches of images in a row, those of each frame by themselves, as Qwen-VL has them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.grid = torch.tensor([[1, 2, 4], [2, 2, 2]])  # frames, rows, columns

    def forward(self, x: Tensor) -> Tensor:
        frames, rows, columns = self.grid.unbind(1)
        ends = torch.repeat_interleave(rows * columns, frames).cumsum(0)
        ends = functional.pad(ends, (1, 0))
        lengths = ends[1:] - ends[:-1]
        parts = torch.split(self.first(x), lengths.tolist(), dim=1)
        return self.last(torch.cat([part.softmax(1) for part in parts], 1)).square().mean()


@pytest.mark.parametrize(
    ("kind", "inputs"),
    [
        (Images, (torch.randn(3, 16, 8),)),
        (Levels, (torch.randn(3, 20, 8),)),
        (Crops, ([torch.randn(2, 3, size, size) for size in (8, 8, 4)],)),
    ],
)
def test_sizes_of_constants_are_numbers_in_the_stages(kind: type[nn.Module], inputs: tuple[object]) -> None:
    pipe = pd2bw_fx.split(kind(), inputs, cluster=2, num_stages=2, costs="analytic", check="full")

    assert pipe.trace_report is not None
    assert pipe.trace_report.tracer == "export"
    assert pipe.trace_report.notes == ()
    sources = "".join(stage.source for stage in pipe.stages)
    assert not any(word in sources for word in (".item()", "u0", "assert", "constant_"))


def test_what_is_asked_of_constants_is_in_no_onnx_file(tmp_path: Path) -> None:
    pipe = pd2bw_fx.split(Levels(), torch.randn(3, 20, 8), cluster=1, costs="analytic")
    assert pipe.export_onnx(tmp_path / "onnx")["asserts"] == []


class Asking(nn.Module):
    def __init__(self, ask: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.ask = nn.Linear(6, 6), ask

    def forward(self, x: Tensor) -> Tensor:
        return self.ask(self.layer(x), torch.tensor([3, 0, 2, 2])).square().mean()


def _written(x: Tensor, numbers: Tensor) -> Tensor:
    numbers[1] = numbers[0]
    return x[:, : numbers[1]]


def _written_by_an_input(x: Tensor, numbers: Tensor) -> Tensor:
    numbers[1] = (x > 0).sum()
    return x.roll(int(numbers[1]), 1)


@pytest.mark.parametrize(
    ("ask", "line"),
    [
        (lambda x, numbers: x.narrow(1, *numbers[1:3].tolist()), ".narrow(1, 0, 2)"),
        (lambda x, numbers: x.tanh() if (numbers > 2).any() else x, ".tanh()"),
        (lambda x, numbers: x if torch.equal(numbers, numbers + 1) else x.relu(), "relu("),
        (lambda x, numbers: sum(x[:, at] for at in numbers.nonzero()[:, 0]), "[:, 3]"),
        (lambda x, numbers: sum(x[:, at] for at in torch.where(numbers == 0)[0]), "[:, 1]"),
        (lambda x, numbers: sum(x[:, at] for at in (numbers == 0).nonzero(as_tuple=True)[0]), "[:, 1]"),
        (lambda x, numbers: x.narrow(1, *torch.combinations(numbers)[1].tolist()), ".narrow(1, 3, 2)"),
        (lambda x, numbers: x.expand(numbers.max(), -1, -1) + 1, "expand(3, "),
        (_written, "[:, :3]"),
    ],
)
def test_whoever_asks_has_the_number(ask: Callable[[Tensor, Tensor], Tensor], line: str) -> None:
    pipe = pd2bw_fx.split(Asking(ask), torch.randn(4, 6), cluster=1, costs="analytic", check="full")

    assert pipe.trace_report is not None
    assert pipe.trace_report.tracer == "export"
    assert line in pipe.stages[0].source


def test_what_an_input_has_written_is_no_constant() -> None:
    pipe = pd2bw_fx.split(
        Asking(_written_by_an_input), torch.randn(4, 6), cluster=1, costs="analytic", check="full"
    )

    assert ".item()" in pipe.stages[0].source


def test_what_follows_from_the_batch_size_is_constant_at_that_size_alone() -> None:
    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).mean() if torch.ones(x.shape[0]).sum() > 5 else self.layer(x).sum()

    pipe = pd2bw_fx.split(Sized(), torch.randn(4, 6), cluster=1, costs="analytic", check="full")
    assert pipe.trace_report is not None
    assert pipe.trace_report.notes[-1] == "traced at batch size 4 alone: no other one can be run"


def test_int_of_a_whole_number_is_what_item_gives() -> None:
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            return self.layer(x[:, : int(lengths.max())]).square().mean()

    x, lengths = torch.randn(3, 7, 4), torch.tensor([2, 5, 3])
    pipe = pd2bw_fx.split(Padded(), (x, lengths), cluster=1, costs="analytic")

    assert pipe.trace_report is not None
    assert pipe.trace_report.tracer == "export"
    assert pipe.verify(example={"x": torch.randn(4, 7, 4), "lengths": torch.tensor([1, 3, 2, 2])}).exact


class Framed(nn.Module):
    """Keeps numbers of its convolution as EnCodec does, beside a count of its calls and a saved number."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 3, 4, 2)
        self.register_buffer("calls", torch.tensor(0), persistent=False)
        self.register_buffer("stride", torch.tensor(2), persistent=False)
        self.register_buffer("saved", torch.tensor(3))
        self.register_buffer("overlap", torch.tensor(4) - self.stride, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        frames = torch.ceil((x.shape[-1] - self.overlap) / self.stride).to(torch.int64)
        missing = frames * self.stride + self.overlap - x.shape[-1]
        if missing > 0:
            x = nn.functional.pad(x, (0, missing))
        return (self.conv(x) * self.calls + self.saved).square().mean()


def test_a_number_in_a_buffer_that_nothing_changes_is_constant() -> None:
    model = Framed()
    pipe = pd2bw_fx.split(model, torch.randn(4, 3, 9), cluster=1, costs="analytic", check="full")

    assert pipe.trace_report is not None
    assert pipe.trace_report.tracer == "export"
    assert "F.pad(x, (0, 1))" in pipe.stages[0].source
    assert [name for name, _ in model.named_buffers()] == ["calls", "stride", "saved", "overlap"]
    assert model.calls == 0
    assert "self.calls.add_(1)" in pipe.stages[0].source
    assert "* self.calls.clone() + self.saved)" in pipe.stages[0].source
