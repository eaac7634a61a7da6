"""Operators that ONNX has no word for go there in others; a file is run beside its stage as it is written."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pd2bw_fx import split
from pd2bw_fx.passes.export_onnx.operators.translatable import TRANSLATABLE

ROWS = torch.linspace(-1, 1, 5)
PLACES = torch.tensor([[[0, 0, 1, 2, 3, 3, 3, 5]]])


class Between(nn.Module):
    def __init__(self, *functions: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)
        self.functions = functions
        self.scale = nn.Parameter(torch.ones(()))  # a name that the exporter has for a number of its own

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.first(x) * self.scale
        return tuple(self.last(h).mean() + function(h).sum() for function in self.functions)


def _bags(words: Tensor, **options: object) -> Tensor:
    table = torch.linspace(-1, 1, 12).reshape(4, 3)
    return F.embedding_bag(words, table, **options)  # type: ignore[arg-type]


def _put(base: Tensor, mask: Tensor, other: Tensor) -> Tensor:
    base[mask] = other[mask]
    return base


def _waves(h: Tensor) -> Tensor:
    """Complex numbers are put into parts, as the spectral layers of neural operators do."""
    waves, others = torch.fft.rfft(h).clone(), torch.fft.rfft(h * h)
    waves[..., 1:3] = others[..., :2].conj() * 2
    waves[:, 1:, -2:] = others[:, 1:, -2:].conj()
    return torch.view_as_real(waves).tanh()


def _mixed_waves(h: Tensor) -> Tensor:
    """Complex numbers are multiplied as matrices and put into zeros, as neural operators do."""
    waves = torch.fft.rfft2(h)
    weight = torch.complex(torch.arange(12.0).reshape(2, 6) / 6, torch.ones(2, 6))
    kept = torch.zeros(h.shape[0], 4, 5, dtype=waves.dtype)
    kept[:, :2] = torch.einsum("bix,oi->box", waves, weight)
    kept[:, -2:, 1:] = (weight.conj() @ waves)[..., 1:]
    others = torch.zeros_like(waves) + waves.new_zeros(6, 5)
    others[:, 2:] = torch.exp(waves[:, 2:] / 8)
    return torch.fft.irfft2(kept.bmm(others.mT), s=(4, 8)).square()


def _masked_waves(h: Tensor) -> Tensor:
    """A sound without its lowest waves, as those that separate sources make it."""
    spectrum = torch.stft(h.flatten(1), 16, 4, window=torch.hann_window(16), return_complex=True)
    spectrum = F.pad(spectrum * spectrum.abs().sigmoid(), (0, 0, 0, 0))
    spectrum = spectrum.index_fill(1, torch.tensor(0), 0.5)
    return torch.istft(spectrum, 16, 4, window=torch.hann_window(16), length=44)


def _products(h: Tensor) -> Tensor:
    waves = torch.fft.rfft(h[:, 0])
    outer = waves[:, None, 1:] * waves.unsqueeze(-1)
    return torch.view_as_real(outer + waves[:, :1, None].expand(-1, 5, 4)).tanh()


def _by_row(loss: Callable[..., Tensor], h: Tensor, **options: object) -> Tensor:
    """Weighed by a mask, as a loss of tokens is."""
    targets = (h[..., 0].detach() > 0).long() + (h[..., 1].detach() > 0).long()
    losses = loss(h.flatten(0, 1), targets.flatten(), reduction="none", **options)
    return losses.view_as(targets) * (h[..., 2] > 0)


def _of_selected(loss: Callable[..., Tensor], h: Tensor, **options: object) -> Tensor:
    """Of the tokens that a mask selects, as the loss of a masked language model is."""
    chosen = h[..., 2] > 0
    targets = (h[..., 0].detach() > 0).long() + (h[..., 1].detach() > 0).long()
    return loss(h[chosen], targets[chosen], **options)


FUNCTIONS: list[Callable[[Tensor], Tensor]] = [
    lambda h: torch.cdist(h, h * 2 + 1),
    lambda h: torch.cdist(h, h + 1, p=1.0),
    lambda h: torch.cdist(h, h + 1, p=float("inf")),
    lambda h: (torch.fft.rfft(h) / 4 + 0.5).abs(),
    lambda h: torch.view_as_real(1 - 3 * torch.fft.rfft(h).conj()).tanh(),
    lambda h: torch.view_as_real(h.exp() * (h.cos() + 1j * h.sin())).tanh(),
    lambda h: torch.view_as_real(torch.exp(h * 2j) * (h - (1 + 2j))).tanh(),
    _waves,
    _mixed_waves,
    _masked_waves,
    _products,
    lambda h: torch.view_as_real(torch.fft.rfft(h).mul(0.5).conj().sub(2, alpha=3)).tanh(),
    lambda h: torch.kthvalue(h, 3, dim=-1).values,
    lambda h: h.kthvalue(2, 1, True).indices.float() * h,
    lambda h: h.median(),
    lambda h: h.median(-1).values,
    lambda h: h.median(1, keepdim=True).indices.float() * h,
    lambda h: torch.searchsorted(ROWS, h.detach()).float() * h,
    lambda h: torch.searchsorted(h.detach().sort(-1).values, h.detach(), right=True).float() * h,
    lambda h: torch.isin(h.detach().round(), torch.tensor([0.0, 1.0])).float() * h,
    lambda h: torch.sort(h, dim=1, stable=False).values * h.argsort(descending=True, stable=False),
    lambda h: h.cumprod(-1),
    lambda h: h.detach().round().long().cumprod(1).float() * h,
    lambda h: h.cummax(-1).values,
    lambda h: h.detach().round().cummax(1).indices.float() * h,
    lambda h: h.cummin(1).values,
    lambda h: torch.hypot(h, h + 1),
    lambda h: torch.erfinv(h.tanh()),
    lambda h: torch.lgamma(h * 10),
    lambda h: torch.special.gammaln(h.abs() + 1e-3),
    lambda h: h.masked_select(h > 0),
    lambda h: torch.masked_select(h, h[0] > 0),
    lambda h: F.rrelu(h),
    lambda h: torch.stack((h > 0, h.detach().round().long(), h), dim=-1),
    lambda h: torch.hstack([h, (h > 0).int()]),
    lambda h: torch.concat((h.double(), h), -1).float(),
    lambda h: _put(torch.zeros_like(h), h > 0, h * 2),
    lambda h: _put(torch.zeros_like(h), h[..., 0] > 100, h * 2),
    lambda h: F.adaptive_max_pool2d(h, (4, None)),
    lambda h: F.adaptive_max_pool2d(h, (4, 3), return_indices=True)[1].float() * h.mean(),
    lambda h: F.adaptive_max_pool1d(h, 3),
    lambda h: _by_row(F.cross_entropy, h, weight=torch.arange(8.0)),
    lambda h: _by_row(F.nll_loss, h, ignore_index=1),
    lambda h: _of_selected(F.cross_entropy, h, weight=torch.arange(8.0)),
    lambda h: _of_selected(F.nll_loss, h, ignore_index=1, reduction="sum"),
    lambda h: _bags((h[:, 0] > 0).long()) * h.mean(),
    lambda h: _bags((h[:, 0] > 0).long(), mode="sum", per_sample_weights=h[:, 0]),
    lambda h: _bags((h[0, 0] > 0).long(), offsets=torch.tensor([0, 2, 2, 7]), mode="max") * h.mean(),
    lambda h: _bags((h[0, 0] > 0).long(), offsets=torch.tensor([0, 3, 8]), include_last_offset=True),
    lambda h: _bags((h[:, 0] > 0).long(), padding_idx=1) * h.mean(),
    lambda h: h.amax() - h.amin() + h.amax((0, 2), keepdim=True),
    lambda h: torch.fmax(h, h.flip(-1).log()) - torch.fmin(h.log(), h),
    lambda h: torch.copysign(h, (h > 0) * -0.0),
    lambda h: h.scatter_reduce(2, PLACES.expand(*h.shape[:2], -1), h, "mean"),
    lambda h: h.scatter_reduce(2, PLACES.expand(*h.shape[:2], -1), h, "mean", include_self=False),
    lambda h: h.index_reduce(2, PLACES[0, 0], h * 2, "mean"),
    lambda h: h.index_reduce(2, PLACES[0, 0], h * 2, "amax", include_self=False),
    lambda h: h.aminmax().min + torch.aminmax(h, dim=1).max,
    lambda h: h.chunk(2)[0].sum() - h.chunk(2)[1].mean(),
    lambda h: torch.histc(h, 5) + torch.histc(h * 0 + 2, 5) + torch.histc(h, 5, -1, 1),
    lambda h: h.round(decimals=2),
    lambda h: torch.digamma(h.abs() + 0.1) + torch.polygamma(0, -h.abs() - 0.3),
    lambda h: torch.polygamma(1, h.abs() + 0.5) + torch.mvlgamma(h.abs() + 2, 3),
    lambda h: F.adaptive_avg_pool3d(h.unsqueeze(1), (None, 4, 3)),
    lambda h: F.avg_pool2d(h, 3, 2, 1, ceil_mode=True, divisor_override=2),
    lambda h: F.avg_pool3d(h.unsqueeze(1), (1, 2, 3), divisor_override=5),
    lambda h: torch.fft.fft2(h, s=(7, 9)).abs() + torch.fft.fftn(h, s=(7, 9), dim=(-2, -1)).abs(),
    lambda h: torch.fft.irfft2(torch.fft.rfft2(h)[:, :4, :3], s=(6, 8)),
    lambda h: torch.fft.ifft(torch.fft.fft(h), 11).abs(),
]


def _density(h: Tensor) -> Tensor:
    """Its check of what it is given is a condition, which no file has beside sizes that depend on values."""
    return -torch.distributions.StudentT(h.exp()).log_prob(h)


@pytest.mark.parametrize(
    "functions", [*(FUNCTIONS[at : at + 8] for at in range(0, len(FUNCTIONS), 8)), [_density]]
)
def test_the_file_computes_the_same(functions: list[Callable[[Tensor], Tensor]], tmp_path: Path) -> None:
    """Outputs of one file: the check of an export names the one that differs."""
    torch.manual_seed(0)
    model = Between(*functions).eval()
    pipe = split(model, (torch.randn(4, 6, 8),), cluster=2, num_stages=1, costs="analytic", check=False)
    pipe.export_onnx(tmp_path / "onnx")


def test_numbers_have_the_precision_of_the_model_in_its_file(tmp_path: Path) -> None:
    """The check of an export allows a double a billionth, less than a rounding to single precision."""
    model = Between(lambda x: x * math.sqrt(8) + 0.1).double()
    pipe = split(model, (torch.randn(4, 8, dtype=torch.float64),), cluster=2, num_stages=1, costs="analytic")

    pipe.export_onnx(tmp_path / "onnx")


class _Bags(nn.Module):
    """words: (batch, 5)"""

    def __init__(self, mode: str, padding_idx: int | None) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(9, 6, mode=mode, padding_idx=padding_idx)
        self.head = nn.Linear(6, 1)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.bags(words)).sum()


@pytest.mark.parametrize(("mode", "padding_idx"), [("sum", None), ("mean", 2), ("max", None)])
def test_a_layer_of_bags_is_in_the_file(mode: str, padding_idx: int | None, tmp_path: Path) -> None:
    words = torch.arange(40).reshape(8, 5) % 9
    pipe = split(_Bags(mode, padding_idx), (words,), cluster=2, costs="analytic")
    assert "nn.EmbeddingBag(" in pipe.stages[0].source

    pipe.export_onnx(tmp_path / "onnx")


@pytest.mark.parametrize("seed", range(3))
def test_translated_operators_compute_what_torchs_do(seed: int) -> None:
    torch.manual_seed(seed)
    x, y = torch.randn(3, 5, 7), torch.randn(3, 4, 7)
    for function, args in (
        (torch.cdist, (x, y)),
        (torch.kthvalue, (x, 2, 1)),
        (torch.median, (x, 1, True)),
        (torch.cumprod, (x, -1)),
        (torch.cummax, (x.round(), 1)),
        (torch.cummin, (x.round(), 2)),
        (torch.searchsorted, (x.sort().values, x)),
        (torch.masked_select, (x, y[:, :1] > 0)),
        (torch.erfinv, (torch.linspace(-1, 1, 999),)),
        (F.adaptive_max_pool2d_with_indices, (x.round(), (3, 4))),
        (torch.digamma, (torch.arange(-49, 90, dtype=torch.float64) / 10 + 0.05,)),
        (torch.polygamma, (1, torch.arange(-49, 90, dtype=torch.float64) / 10 + 0.05)),
        *(
            (F.avg_pool2d, (x[None], side, step, margin, True, True, 2))
            for side in (2, 3)
            for step in (1, 2, 3)
            for margin in (0, 1)
        ),
        *((shift, (y,)) for shift in (torch.fft.fftshift, torch.fft.ifftshift)),
    ):
        expected, found = function(*args), TRANSLATABLE[function](*args)
        torch.testing.assert_close(tuple(found), tuple(expected), equal_nan=True)
