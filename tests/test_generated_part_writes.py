"""Assignments to parts of a tensor are assignments again, where no one can tell the difference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from pd2bw_fx import split
from pd2bw_fx.passes.codegen import generate
from pd2bw_fx.runtime.split_backward import input_half
from tests.stages import case_of, compared, planned


def _source(model: nn.Module, *example: Tensor) -> str:
    """Returns the source of the one stage, without comments; it equals the model."""
    case = case_of(model.double(), example)
    (program,) = programs = generate(case.graph, planned(case, 1))
    assert compared(case, planned(case, 1), programs).exact
    return "\n".join(line.partition("  # ")[0] for line in program.source.split("\n"))


class _Shifted(nn.Module):
    """A decoder that is given what it is to predict, moved to the right."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, labels: Tensor) -> Tensor:
        shifted = labels.new_zeros(labels.shape)
        shifted[:, 1:] = labels[:, :-1].clone()
        shifted[:, 0] = 3
        return self.head(self.embedding(shifted)).square().mean()  # type: ignore[no-any-return]


def test_tokens_are_moved_to_the_right_by_assignments() -> None:
    assert """
        shifted = labels.new_zeros(labels.shape[0], 6)
        shifted[:, 1:] = labels[:, :-1].clone()
        shifted[:, 0] = 3
""" in _source(_Shifted(), torch.randint(0, 16, (4, 6)))


class _Padded(nn.Module):
    """Never masks the first token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)

    def forward(self, words: Tensor) -> Tensor:
        padding = words.eq(0)
        padding[:, 0] = False
        return self.embedding(words).masked_fill(padding[:, :, None], 0.5).square().mean()


def test_a_mask_of_a_comparison_is_assigned_to() -> None:
    assert "        padding[:, 0] = False\n" in _source(_Padded(), torch.randint(0, 3, (4, 6)))


class _Windows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        mask, count = x.new_zeros((8, 8)), 0
        for rows in (slice(0, -4), slice(-4, None)):
            for columns in (slice(0, -4), slice(-4, -2), slice(-2, None)):
                mask[rows, columns] = count
                count += 1
        return (x @ mask).square().mean()


def test_a_part_of_a_part_is_assigned_in_one_line() -> None:
    assert """
        mask = x.new_zeros(8, 8)
        mask[:-4, :-4] = 0.0
        mask[:-4, -4:-2] = 1.0
        mask[:-4, -2:] = 2.0
        mask[-4:, :-4] = 3.0
        mask[-4:, -4:-2] = 4.0
        mask[-4:, -2:] = 5.0
        return (x @ mask).square().mean()
""" in _source(_Windows(), torch.randn(4, 8, dtype=torch.float64))


class _ReadBefore(_Windows):
    def forward(self, x: Tensor) -> Tensor:
        mask = x.new_ones((8, 8))
        mask[0] = 2.0
        before = mask * 3.0
        mask[:, 1:] = 5.0
        return (self.linear(x) @ (mask + before)).square().mean()  # type: ignore[no-any-return]


class _OfGradients(_Windows):
    def forward(self, x: Tensor) -> Tensor:
        out = x.new_zeros((8, 8))
        out[:, :4] = self.linear(x)[:8, :4]
        return out.square().mean()


class _SeenThroughAView(_Windows):
    def forward(self, x: Tensor) -> Tensor:
        mask = x.detach()[:8].clone()
        rows = mask[:, :2]
        rows[0] = 5.0
        mask[:, 1:] = 7.0
        return (self.linear(x)[:8] * mask * rows.sum()).square().mean()  # type: ignore[no-any-return]


def test_what_is_read_as_it_was_before_stays_another_tensor() -> None:
    x = torch.randn(8, 8, dtype=torch.float64)

    assert "mask[0] = 2.0" in (source := _source(_ReadBefore(), x))
    assert "mask = mask.slice_scatter(" in source
    assert "rows.select_scatter(" in _source(_SeenThroughAView(), x)


def test_what_is_assigned_may_have_gradients() -> None:
    source = _source(_OfGradients(), torch.randn(8, 8, dtype=torch.float64))
    assert "out[:, :4] = self.linear(x)[:8, :4]" in source


class _Spectral(nn.Module):
    """A layer of a neural operator, which keeps the lowest waves of both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = (nn.Parameter(torch.randn(2, 2, dtype=torch.complex128)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        waves = torch.fft.rfft2(x)
        kept = torch.zeros(x.shape[0], 8, 5, dtype=waves.dtype)
        kept[:, :2, :2] = waves[:, :2, :2] * self.low
        kept[:, -2:, :2] = waves[:, -2:, :2] * self.high
        return torch.fft.irfft2(kept, s=(8, 8)).square().mean()  # type: ignore[no-any-return]


def test_complex_numbers_are_assigned_as_others_are() -> None:
    assert """
        kept[:, :2, :2] = waves[:, :2, :2] * self.low
        kept[:, -2:, :2] = waves[:, -2:, :2] * self.high
        return torch.fft.irfft2(kept, (8, 8)).square().mean()
""" in _source(_Spectral(), torch.randn(4, 8, 8, dtype=torch.float64))


class _Real(nn.Module):
    """Puts pairs of numbers where the real parts are: no dimension of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        kept, others = (torch.zeros(2, 2, dtype=torch.complex128) for _ in range(2))
        own = torch.view_as_real(self.weight)
        kept[:2] = torch.view_as_complex(torch.view_as_real(others).select_scatter(own, 2, 0)) * 2
        return torch.view_as_real(torch.fft.fft(x) @ kept).square().mean()  # type: ignore[no-any-return]


def test_real_parts_are_not_taken_for_a_dimension_of_complex_numbers() -> None:
    assert "select_scatter(" in _source(_Real(), torch.randn(4, 2, dtype=torch.float64))


class _Decoder(nn.Module):
    """Puts its outputs into a tensor, step by step, as seq2seq models do."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.cell, self.head = nn.GRU(4, 8, batch_first=True), nn.GRUCell(4, 8), nn.Linear(8, 4)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        outputs = source.new_zeros(target.shape)
        _, hidden = self.encoder(source)
        hidden = hidden[-1]
        for t in range(1, target.shape[1]):
            hidden = self.cell(target[:, t], hidden)
            outputs[:, t] = self.head(hidden)
        return (outputs[:, 1:] - target[:, 1:]).square().mean()


def test_steps_of_time_are_put_into_their_places_in_a_loop() -> None:
    x = torch.randn(3, 5, 4, dtype=torch.float64)
    source = _source(_Decoder(), x, torch.randn(3, 6, 4, dtype=torch.float64))
    assert (
        """
        for t in range(1, 6):
            hidden = self.cell(target[:, t], hidden)
            outputs[:, t] = self.head(hidden)
"""
        in source
    )


def test_such_a_stage_has_its_backward_in_two_halves(tmp_path_factory: pytest.TempPathFactory) -> None:
    x, target = torch.randn(3, 5, 4), torch.randn(3, 6, 4)
    pipe = split(_Decoder(), (x, target), cluster=1, costs="analytic")
    pipe.export_onnx(tmp_path_factory.mktemp("onnx") / "files")

    halves, whole = (pipe.stages[0].module for _ in range(2))
    loss = halves(x, target)
    half = input_half([get_gradient_edge(loss)], [torch.ones(())], ())
    half.run()
    found = [parameter.grad.clone() for parameter in halves.parameters()]
    for parameter in whole.parameters():
        parameter.grad = None
    whole(x, target).backward()
    assert all(torch.equal(a, b.grad) for a, b in zip(found, whole.parameters(), strict=True))


def test_such_a_stage_is_exported_and_compiled(tmp_path_factory: pytest.TempPathFactory) -> None:
    labels = torch.randint(0, 16, (4, 6))
    pipe = split(_Shifted(), labels, cluster=1, costs="analytic")

    pipe.export_onnx(tmp_path_factory.mktemp("onnx") / "files")  # compares the files with the stages
    stage = pipe.stages[0].module.eval()
    compiled = torch.compile(stage, backend="eager", fullgraph=True)
    assert torch.equal(compiled(labels), stage(labels))


class _Queue(nn.Module):
    """The keys of a momentum encoder go into a buffer, in a place that moves on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("queue", torch.randn(4, 12))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))
        self.queue: Tensor
        self.place: Tensor

    def forward(self, x: Tensor) -> Tensor:
        keys = self.layer(x)
        loss = (keys @ self.queue.clone().detach()).square().mean()
        with torch.no_grad():
            index = (self.place + torch.arange(len(x))) % 12
            self.queue[:, index] = keys.T.detach()
            self.place.copy_((self.place + len(x)) % 12)
        return loss


def test_what_is_put_into_a_buffer_by_an_index_is_an_assignment() -> None:
    assert "            self.queue[:, index] = keys.T" in _source(_Queue(), torch.randn(3, 4).double())
