"""A batch that the forward cuts in parts stays open, for the sizes that can be cut so."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, nn
from torch.utils._sympy.functions import FloorDiv, Mod

import pd2bw_fx
from pd2bw_fx.errors import InputError
from pd2bw_fx.graph import TensorSpec
from pd2bw_fx.passes.trace import trace
from pd2bw_fx.passes.trace.size_guards import (
    is_for_many_sizes,
    sizes_up_to_an_end,
    sizes_where_all_hold,
)
from pd2bw_fx.runtime.results import evaluation_pieces
from pd2bw_fx.size_range import SizeRange
from tests.sized_batches import rows, split


class Halves(nn.Module):
    """A reward model's batch: chosen samples first, then as many rejected ones; `kind` says how it is cut."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        half = x.shape[0] // 2
        if self.kind == "chunk":
            left, right = hidden.chunk(2)
        elif self.kind == "split":
            left, right = hidden.split(half)
        elif self.kind == "view":
            left, right = hidden.view(2, half, 8).unbind(0)
        elif self.kind == "stride":
            left, right = hidden[0::2], hidden[1::2]
        elif self.kind == "swapped":
            left, right = hidden, torch.cat([hidden[half:], hidden[:half]])
        else:
            left, right = hidden[:half], hidden[half:]
        if self.kind == "asked":
            left = left * (2 if x.shape[0] == 1000 else 3)
        return (left - self.second(right)).square().mean()


@pytest.mark.parametrize("kind", ["slice", "chunk", "split", "view", "stride"])
def test_a_batch_in_halves_may_have_any_even_size(kind: str, tmp_path: Path) -> None:
    model = Halves(kind)
    split(model, 6).save(tmp_path / "pipe")
    pipe = pd2bw_fx.load(tmp_path / "pipe")

    assert pipe.graph.batch_sizes == SizeRange(4, None, 2)
    for count in (4, 10):
        assert pipe.verify(model, example={"x": rows(count)}).exact
    with pytest.raises(InputError, match=r"traced for multiples of 2, 4 or more: pass 8 samples"):
        pipe.run(rows(7))
    if kind in ("slice", "split"):
        assert pipe.export_onnx(tmp_path / "onnx")["batch_sizes_checked"] == [6, 14]


def test_parts_of_unequal_sizes_are_right_for_odd_batches_too() -> None:
    model = Halves("swapped")
    pipe = split(model, 6)

    assert pipe.graph.batch_sizes == SizeRange(4)
    assert pipe.verify(model, example={"x": rows(7)}).exact


class Shifted(nn.Module):
    """Compares each sample with the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, other: Tensor, weights: Tensor) -> Tensor:
        before = torch.cat([other[-1:], other[:-1]])
        return ((self.first(x) - self.second(before)).square().mean(1) * weights).mean()


def test_several_inputs_have_one_batch() -> None:
    def batch(count: int) -> tuple[Tensor, Tensor, Tensor]:
        return rows(count), rows(count) + 1, rows(count)[:, 0]

    model = Shifted()
    pipe = pd2bw_fx.split(model, batch(6), cluster=2, num_stages=2, costs="analytic")

    assert pipe.graph.batch_sizes == SizeRange(3)
    assert pipe.verify(model, example=dict(zip(pipe.graph.inputs, batch(5), strict=True))).exact


@pytest.mark.parametrize(("count", "sizes"), [(16, [4, 4, 4, 4]), (12, [12])])
def test_a_batch_whose_microbatches_would_have_a_wrong_size_is_evaluated_whole(
    count: int, sizes: list[int]
) -> None:
    pipe = split(Halves("slice"), 6)
    job: Any = SimpleNamespace(
        layout=pipe.batch_layout, microbatches_per_update=4, outputs={"loss": TensorSpec((), torch.float32)}
    )

    pieces = evaluation_pieces(job, rows(count), ["loss"])

    assert [piece["x"].shape[0] for piece in pieces] == sizes


def test_a_line_that_leaves_many_sizes_is_not_said_to_fix_the_batch() -> None:
    notes = trace(Halves("asked"), (rows(6),)).report.notes

    fixing = [note for note in notes if "fixes it" in note]
    assert len(fixing) == 1
    assert "x.shape[0] == 1000" in fixing[0]


n = sympy.Symbol("n", integer=True, positive=True)


@pytest.mark.parametrize(
    ("guards", "sizes"),
    [
        ([sympy.Ne(sympy.floor(n / 2), 1)], SizeRange(4)),
        ([sympy.Eq(2 * sympy.floor(n / 2), n), sympy.Ne(n, 2)], SizeRange(4, None, 2)),
        ([sympy.Eq(sympy.Mod(n, 3), 0)], SizeRange(3, None, 3)),
        ([sympy.Le(n, 100000)], None),
        ([sympy.Ne(8 * n, 80000)], None),
        ([sympy.Eq(n, 6)], None),
        ([sympy.Ne(sympy.Mod(n, 97), 1)], None),
    ],
)
def test_guards_hold_for_all_sizes_from_some_on_or_are_not_taken_to(
    guards: list[sympy.Basic], sizes: SizeRange | None
) -> None:
    assert sizes_where_all_hold(guards, 6) == sizes


def test_a_guard_is_read_as_torch_prints_it() -> None:
    assert is_for_many_sizes("Ne((s77//2), 1)", 6)
    assert is_for_many_sizes("Eq(s87, s95)", 6)
    assert not is_for_many_sizes("Eq(24*s87, 144)", 6)
    assert not is_for_many_sizes("Eq(unknown(s87), 3, 4)", 6)


def test_multiples_say_what_they_are() -> None:
    ranges = [SizeRange(2, None, 2), SizeRange(6, None, 3), SizeRange(2, 8, 2)]

    assert [str(found) for found in ranges] == [
        "multiples of 2", "multiples of 3, 6 or more", "multiples of 2, 2 to 8",
    ]  # fmt: skip
    assert [[size for size in range(1, 10) if size in found] for found in ranges] == [
        [2, 4, 6, 8], [6, 9], [2, 4, 6, 8],
    ]  # fmt: skip
    assert [found.nearest(5) for found in ranges] == [6, 6, 6]
    assert not any(found.is_open or found.is_one_size for found in ranges)
    assert [SizeRange(*found.to_json()) for found in ranges] == ranges  # type: ignore[arg-type]


_SIZE = sympy.Symbol("s", positive=True, integer=True)


@pytest.mark.parametrize(
    ("guards", "sizes"),
    [
        ([_SIZE <= 12, 96 - 8 * _SIZE >= 2, sympy.Ne(12 - _SIZE, 1)], SizeRange(1, 10)),
        ([sympy.Ne(_SIZE, 2), sympy.Lt(3 * _SIZE, 20)], SizeRange(3, 6)),
        ([sympy.Ne(2 * _SIZE, 9)], None),  # holds for all
        ([sympy.Ne(_SIZE, 4)], None),  # not even for the example's
        ([FloorDiv(_SIZE, 3) <= 4, FloorDiv(_SIZE, 2) <= _SIZE], SizeRange(1, 14)),
        ([FloorDiv(_SIZE, 3) >= 1, sympy.Eq(Mod(_SIZE, 2), 0)], SizeRange(4, 4)),
        ([FloorDiv(_SIZE, 70) <= 10**6, _SIZE <= 9], None),  # ends far away, if it does
        ([_SIZE * _SIZE <= 30], SizeRange(1, 5)),
    ],
)
def test_guards_that_end_give_the_sizes_up_to_there(guards: list[Any], sizes: SizeRange | None) -> None:
    assert sizes_up_to_an_end(guards, 4) == sizes


class Queue(nn.Module):
    """Keys of earlier batches, from which this one's take a place each."""

    def __init__(self, is_written: bool) -> None:
        super().__init__()
        self.first, self.second, self.is_written = nn.Linear(8, 8), nn.Linear(8, 8), is_written
        self.register_buffer("queue", torch.linspace(-1, 1, 96).view(8, 12))

    def forward(self, x: Tensor) -> Tensor:
        keys = self.second(self.first(x).relu())
        queue: Tensor = self.queue
        loss = (keys @ queue.clone()).logsumexp(1).mean()
        with torch.no_grad():
            if self.is_written:
                queue[:, -len(x) :] = keys.T
            else:
                self.queue = torch.cat([queue[:, len(x) :], keys.T], dim=1)
        return loss


@pytest.mark.parametrize(("is_written", "most"), [(False, 10), (True, 11)])
def test_a_batch_that_takes_places_of_a_queue_has_an_end(is_written: bool, most: int) -> None:
    model = Queue(is_written)
    pipe = split(model, 4)

    assert pipe.graph.batch_sizes == SizeRange(1, most)
    for count in (3, most):
        assert pipe.verify(model, example={"x": rows(count)}).exact
