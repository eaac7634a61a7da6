"""Exported files where examples say nothing: far sizes, large and small numbers, rows that see nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pd2bw_fx
from pd2bw_fx.errors import ExportError
from pd2bw_fx.passes.export_onnx import run_onnx
from tests.onnx_exports import Counting, Ending, assert_alike, exported


def test_windows_on_transposed_memory_are_those_that_lie_there(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Ending(lambda h: h.t().as_strided((4, 3, 2), (1, 4, 4))).eval()
    folder = exported(model, tmp_path / "onnx", torch.randn(5, 4))

    for size in (4, 9):
        assert_alike(folder, model, x=torch.randn(size, 4))


@pytest.mark.parametrize(
    "function",
    [
        lambda h: h.sigmoid().cumprod(0),
        lambda h: h.cummax(0),
        lambda h: h.cummin(0),
        lambda h: h.logcumsumexp(0),
    ],
    ids=["cumprod", "cummax", "cummin", "logcumsumexp"],
)
def test_scans_over_the_batch_are_right_at_any_size(function: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Ending(function).eval()
    folder = exported(model, tmp_path / "onnx", torch.randn(5, 4))

    for size in (1, 2, 9, 40):
        assert_alike(folder, model, x=torch.randn(size, 4))


@pytest.mark.parametrize(
    "function",
    [
        F.logsigmoid,
        lambda h: torch.logaddexp(h, h.flip(1)),
        lambda h: torch.logaddexp2(h, h.flip(1)),
        lambda h: h.logcumsumexp(1),
        lambda h: F.binary_cross_entropy_with_logits(h, torch.ones_like(h)),
        lambda h: F.binary_cross_entropy_with_logits(
            h, (h > 0).to(h.dtype), pos_weight=torch.tensor([1.0, 2.0, 3.0, 4.0]), reduction="none"
        ),
        lambda h: F.multilabel_soft_margin_loss(h, (h < 0).to(h.dtype)),
        lambda h: F.multilabel_margin_loss(h, torch.tensor([[2, 0, -1, 1]]).repeat(h.shape[0], 1)),
        lambda h: torch.log1p(h.abs() * 1e-9) * 1e9,
        lambda h: torch.expm1(h * 1e-9) * 1e9,
        torch.expm1,
        lambda h: h.clamp(0.01, 10),
        lambda h: h.masked_fill(h < 0, -torch.inf).cummax(1),
        lambda h: torch.where(h > 0, 5, torch.iinfo(torch.int64).min).cummin(1),
    ],
)
def test_large_and_small_numbers_come_out_as_torchs(function: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Ending(function).eval()
    folder = exported(model, tmp_path / "onnx", torch.randn(5, 4))

    for scale in (1.0, 1e-3, 300.0):
        assert_alike(folder, model, x=scale * torch.randn(7, 4))


class Attending(nn.Module):
    """`adds`: the number for what is not seen, or none for a mask of truth values."""

    def __init__(self, adds: float | None) -> None:
        super().__init__()
        self.first, self.last, self.adds = nn.Linear(8, 8), nn.Linear(8, 8), adds

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        heads, mask = self.first(x)[:, None], ~hidden[:, None, None, :]
        if self.adds is not None:
            mask = torch.zeros_like(mask, dtype=x.dtype).masked_fill(~mask, self.adds)
        return self.last(F.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask)[:, 0])


@pytest.mark.parametrize(
    ("adds", "opset"), [(None, 20), (-torch.inf, 20), (None, 23), (-torch.inf, 23), (torch.finfo().min, 23)]
)
def test_a_sample_of_which_nothing_is_seen_gets_what_torch_gives(
    adds: float | None, opset: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = Attending(adds).eval()
    hidden = torch.zeros(3, 6, dtype=torch.bool)
    hidden[0, 4:] = True
    folder = exported(model, tmp_path / "onnx", torch.randn(3, 6, 8), hidden, opset=opset)

    none = torch.ones(2, 6, dtype=torch.bool)
    none[1] = False
    assert_alike(folder, model, x=torch.randn(2, 6, 8), hidden=none)


def test_an_encoder_with_padding_is_not_held_against_torchs_fast_path(tmp_path: Path) -> None:
    class Encoding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
            self.head = nn.Linear(8, 3)

        def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
            return self.head(self.encoder(x, src_key_padding_mask=hidden))

    hidden = torch.zeros(3, 6, dtype=torch.bool)
    hidden[0, 4:] = True
    exported(Encoding(), tmp_path / "onnx", torch.randn(3, 6, 8), hidden)
    assert torch.backends.mha.get_fastpath_enabled()


def test_equal_values_stay_in_order_where_a_sort_is_stable(tmp_path: Path) -> None:
    def order(h: Tensor) -> tuple[Tensor, ...]:
        coarse = h.repeat(1, 200).round()
        return *coarse.sort(dim=1, stable=True), coarse.argsort(dim=0, descending=True, stable=True)

    model = Ending(order).eval()
    folder = exported(model, tmp_path / "onnx", torch.randn(4, 4))
    assert_alike(folder, model, x=torch.randn(50, 4))


def test_one_bound_leaves_infinities_as_they_are(tmp_path: Path) -> None:
    def bounded(h: Tensor) -> tuple[Tensor, ...]:
        far = torch.where(h > 0, torch.inf, torch.where(h < -1, torch.nan, -torch.inf))
        return far.clamp(min=0.5), far.clamp(max=0.5), far.clamp_min(1), far.clamp_max(1), F.logsigmoid(far)

    model = Ending(bounded).eval()
    folder = exported(model, tmp_path / "onnx", torch.randn(4, 4))
    assert_alike(folder, model, x=4 * torch.randn(9, 4))


class Halving(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.norm, self.last, self.dtype = (
            nn.Linear(4, 4),
            nn.LayerNorm(4),
            nn.Linear(4, 4),
            dtype,
        )

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=self.dtype):
            hidden = self.last(self.norm(self.first(x)))
        return hidden.float()


def test_autocast_is_in_the_files_where_onnxruntime_has_the_type(tmp_path: Path) -> None:
    torch.manual_seed(0)
    pipe = pd2bw_fx.split(Halving(torch.float16).eval(), (torch.randn(3, 4),), cluster=2, costs="analytic")
    pipe.export_onnx(tmp_path / "onnx", tolerance=2e-3)

    for num_stages, reason in (
        (1, "cannot run stage 0: .* convert the model"),
        (2, "which goes out of a stage"),
    ):
        pipe = pd2bw_fx.split(
            Halving(torch.bfloat16).eval(),
            (torch.randn(3, 4),),
            cluster=2,
            num_stages=num_stages,
            costs="analytic",
        )
        with pytest.raises(ExportError, match=rf"{reason}.* without autocast"):
            pipe.export_onnx(tmp_path / "none")


class Pooling(nn.Module):
    """Which the exporter writes for the one length that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(50, 8), nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(F.adaptive_avg_pool1d(self.words(ids).mT, 3).mT)


def test_a_length_that_is_open_is_tried_at_another(tmp_path: Path) -> None:
    example = torch.randint(0, 50, (3, 6))
    with pytest.raises(ExportError, match=r"differs from .* by inf"):
        exported(Pooling().eval(), tmp_path / "onnx", example, tracer="export-sequence")
    assert not (tmp_path / "onnx").exists()


class Binning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        steps = torch.tensor([0.1, -0.1, 0.3, -0.7, 0.2, 0.6, -0.2, 0.0])
        rounded = (x // 0.1, x // steps, torch.div(x, -0.1, rounding_mode="floor"), 1.0 // (x + 0.05))
        left = (torch.remainder(x, 0.1), x % steps[:7].repeat(2)[:8], torch.fmod(x, 0.1), 1.0 % (x + 0.05))
        return (self.last(self.first(x)), *rounded, *left, (x.double() // 0.1).float())


def test_floats_are_rounded_down_where_they_are_multiples_too(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Binning().eval()
    folder = exported(model, tmp_path / "onnx", torch.rand(4, 8))

    assert_alike(folder, model, x=torch.arange(-40, 40).reshape(10, 8) / 10)


def _of_no_numbers(x: Tensor) -> tuple[Tensor, ...]:
    """x: (rows, 4), NaN and infinities among them."""
    return (
        torch.hypot(x, 2 * x),
        torch.hypot(1e-25 * x, -3e-25 * x) * 1e25,
        torch.hypot(x.half(), x.half()),
        torch.lgamma(x),
        torch.logit(x, 1e-6),
        x.logcumsumexp(1),
        *x.cummax(1),
        *x.cummin(0),
        *x.median(1),
        x.median(),
    )


def _of_halves(x: Tensor) -> tuple[Tensor, ...]:
    half = x.half()
    return half // 0.1, half % 0.1, half // torch.full_like(half, -0.3), 1.0 // (half + 0.05)


def _of_few_bits(whole: Tensor) -> tuple[Tensor, ...]:
    bag = F.embedding_bag(whole, torch.arange(30.0).reshape(10, 3), padding_idx=-1, mode="mean")
    return (
        bag,
        torch.isin(whole, 5),
        torch.isin(5, whole),
        torch.searchsorted(whole.sort(1)[0][0], 5),
        (whole > 3).cumprod(1),
        whole.to(torch.int32).cumprod(0),
        whole.to(torch.uint8).cumprod(1),
        *(whole > 5).cummax(1),
        1.5 - whole,
        torch.rsub(whole, 0.5),
    )


_NONE, _FAR = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("function", "example", "values"),
    [
        (
            _of_no_numbers,
            torch.rand(2, 4),
            torch.tensor(
                [[1, _FAR, 2, -_FAR], [1, _NONE, 3, _NONE], [0, -1, -2.5, 1e25], [1e-25, 0.5, 3, 1]]
            ),
        ),
        # Not drawn: onnxruntime leaves out roundings to half, which matters close to a whole number.
        (
            _of_halves,
            torch.arange(0.1, 0.9, 0.1).reshape(2, 4),
            torch.arange(-40, 40).reshape(10, 8)[:, :4] / 10,
        ),
        (_of_few_bits, torch.randint(1, 8, (2, 4)), torch.tensor([[9, 5, 2, 9], [9, 9, 9, 9], [1, 5, 7, 0]])),
    ],
)
def test_what_no_example_shows_is_torchs_too(
    function: Any, example: Tensor, values: Tensor, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    folder = exported(Counting(function).eval(), tmp_path / "onnx", torch.randn(2, 4), example)

    rows = torch.randn(values.shape[0], 4)
    found = list(run_onnx(folder, {"x": rows, "whole": values}).values())
    for array, result in zip(found[1:], function(values), strict=True):
        assert array.dtype == result.numpy().dtype
        np.testing.assert_allclose(array, result.numpy(), rtol=1e-5, atol=1e-7)


class Projecting(nn.Module):
    """In words of torch, a projected LSTM is no layer any more."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.LSTM(4, 4, proj_size=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).unsqueeze(1))[0]


def test_a_projected_lstm_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"an LSTM with a projection \('last.weight_hr_l0'\)"):
        exported(Projecting().eval(), tmp_path / "onnx", torch.randn(5, 4))


class Precise(nn.Module):
    """Its last layer is no more exact than what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).double())


def test_what_is_precise_behind_float32_is_held_to_float32(tmp_path: Path) -> None:
    torch.manual_seed(0)
    exported(Precise().eval(), tmp_path / "onnx", torch.randn(5, 64))
