"""Complex numbers in ONNX files, where they are pairs: whatever a model does with spectra is written so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pd2bw_fx import split
from pd2bw_fx.constraints import Constraints
from pd2bw_fx.errors import InputError
from pd2bw_fx.passes.export_onnx import run_onnx, run_onnx_processes
from pd2bw_fx.passes.export_onnx.operators.translatable import TRANSLATABLE

PLACES = torch.tensor([3, 0])
WEIGHT = torch.complex(torch.linspace(-1, 1, 15).reshape(3, 5), torch.linspace(1, 0, 15).reshape(3, 5))


class Spectral(nn.Module):
    def __init__(self, *functions: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.functions = nn.Linear(8, 8), functions

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        z = torch.fft.rfft(self.first(x))  # (batch, 4, 5)
        found = [function(z) for function in self.functions]
        return tuple(torch.view_as_real(each) if each.is_complex() else each for each in found)


def _filled(z: Tensor) -> Tensor:
    made = torch.ones_like(z) + z.new_ones(5) - torch.full((4, 5), 1 + 2j, dtype=z.dtype)
    made[:, 0] = z[:, 1]
    made[..., -1] = z[..., 0]
    return made


TAKEN_APART: list[Callable[[Tensor], Tensor]] = [
    lambda z: z[:, 1] + z[..., -1:, 0],
    lambda z: z[:, None, 1, ::2],
    lambda z: z.select(1, 0) * z.unbind(1)[1],
    lambda z: z.chunk(2, 1)[0] + z.split([1, 2, 1], 1)[1] + z.tensor_split(4, 1)[3],
    lambda z: z.narrow(1, 0, 2).repeat(1, 2, 1) + z.tile(1, 1),
    lambda z: torch.where(z.real > 0, z, z * 2) + torch.where(z.real > 1, 0.0, z) + z.where(z.real > 0.5, 1j),
    lambda z: torch.where(z.real > 0, z, z.real.detach()) + z.masked_fill(z.real > 0, 0.5),
    lambda z: z.gather(1, (z.real > 0).long()),
    lambda z: z.index_select(1, PLACES) + z[:, PLACES] + torch.take_along_dim(z, PLACES[None, :, None], 1),
    lambda z: z[z.real > 0].sum() + torch.masked_select(z, z.real > 0.5).sum(),
    lambda z: z.diagonal(dim1=1, dim2=2) + z.unfold(2, 2, 3)[..., 0].mT[..., 0, :],
    lambda z: torch.hstack([z, z * 2]).cumsum(1) + z.repeat_interleave(2, 1).tril(),
    lambda z: z.unsqueeze(1).broadcast_to(z.shape[0], 2, 4, 5) + z[:, :1].expand_as(z).unsqueeze(1),
    lambda z: torch.fft.ifftshift(torch.fft.fftshift(z, dim=(1, 2)), dim=2),
    lambda z: torch.conj(z).imag * z.imag + z.conj().real,
    _filled,
]
COMPUTED: list[Callable[[Tensor], Tensor]] = [
    lambda z: z**2 + z.pow(3) + z.square(),
    lambda z: (z + 4) ** 0.5 + (z + 4) ** -1,
    lambda z: (z * z).sqrt() + (z + 4).log(),
    lambda z: (z + 4).angle() * z.abs(),
    lambda z: z.sin() * z.cos(),
    lambda z: z.tanh() * torch.sigmoid(z),
    lambda z: z.sgn() * 2,
    lambda z: (z == z * 1).float() + (z != z + 1).float() + (z == 5).float(),
    lambda z: z.norm(dim=1) + torch.linalg.vector_norm(z, ord=1, dim=1),
    lambda z: z.var(1) + z.std(1),
    lambda z: F.linear(z, WEIGHT, WEIGHT[:, 0]),
    lambda z: torch.einsum("bij->bi", z) + torch.einsum("bij,kj->bi", z, WEIGHT),
]


@pytest.mark.parametrize("functions", [TAKEN_APART[:8], TAKEN_APART[8:], COMPUTED])
def test_the_file_computes_the_same(functions: list[Callable[[Tensor], Tensor]], tmp_path: Path) -> None:
    """Outputs of one file: the check of an export names the one that differs."""
    torch.manual_seed(0)
    model = Spectral(*functions).eval()
    pipe = split(model, (torch.randn(4, 4, 8),), cluster=2, num_stages=1, costs="analytic", check=False)

    pipe.export_onnx(tmp_path / "onnx")


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_functions_of_complex_numbers_are_torchs(scale: float) -> None:
    torch.manual_seed(0)
    z = torch.randn(500, dtype=torch.complex128) * scale
    z[0] = 0
    for name, args in (
        ("angle", ()),
        ("cos", ()),
        ("log", ()),
        ("pow", (2.5,)),
        ("pow", (5,)),
        ("sgn", ()),
        ("sigmoid", ()),
        ("sin", ()),
        ("sqrt", ()),
        ("std", (0,)),
        ("tanh", ()),
    ):
        function: Any = getattr(torch, name)

        torch.testing.assert_close(
            TRANSLATABLE[function](z, *args), function(z, *args), rtol=1e-9, atol=1e-12
        )


def test_real_tensors_are_left_to_the_exporter() -> None:
    x = torch.randn(3, 4)

    for function, args in ((torch.tanh, ()), (torch.where, (x > 0, x)), (Tensor.select, (0, 1))):
        given = (args[0], x, x) if function is torch.where else (x, *args)
        assert TRANSLATABLE[function](*given) is NotImplemented
    assert TRANSLATABLE[torch.where](x > 0) is NotImplemented  # the places


class Turning(nn.Module):
    """x: (batch, 8), turned: (batch, 5), complex -> a spectrum, what it sounds like, and its strength"""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, turned: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        spectrum = torch.fft.rfft(self.first(x)) * turned
        doubled = spectrum * 2
        return doubled.conj(), self.last(torch.fft.irfft(doubled, n=8)), doubled.abs().mean(-1)


@pytest.fixture(scope="module")
def turning(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, tuple[Tensor, Tensor], Path]:
    """A model, its example, and the folder of its files, between which the spectrum crosses."""
    torch.manual_seed(0)
    model, example = Turning().eval(), (torch.randn(4, 8), torch.randn(4, 5, dtype=torch.complex64))
    apart = Constraints(stage_of={"first": 0, "fft_rfft": 0, "mul": 0, "mul_1": 1, "last": 1})
    pipe = split(model, example, cluster=2, costs="analytic", constraints=apart)
    folder = tmp_path_factory.mktemp("turning") / "onnx"
    manifest = pipe.export_onnx(folder, form="both")
    (crossing,) = manifest["stages"][1]["inputs"]
    assert (crossing["dtype"], crossing["shape"]) == ("float32", ["batch", 5, 2])
    return model, example, folder


def assert_the_models(found: dict[str, Any], model: nn.Module, example: tuple[Tensor, Tensor]) -> None:
    expected = model(*example)
    for name, tensor in zip(("output_0", "output_1", "output_2"), expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(found[name]), tensor.detach().resolve_conj())


def test_complex_tensors_enter_cross_and_leave_as_pairs(
    turning: tuple[nn.Module, tuple[Tensor, Tensor], Path],
) -> None:
    model, (x, turned), folder = turning

    for given in (turned, torch.view_as_real(turned)):
        assert_the_models(run_onnx(folder, {"x": x, "turned": given}), model, (x, turned))
    assert_the_models(
        run_onnx_processes(folder, {"x": x, "turned": turned}, num_microbatches=2), model, (x, turned)
    )
    with pytest.raises(
        InputError, match=r"is float32 \(4, 8\); .* complex64 \(batch, 5\), or both parts as float32"
    ):
        run_onnx(folder, {"x": x, "turned": x})


def test_a_file_of_all_stages_has_pairs_too(tmp_path: Path) -> None:
    model, example = Turning().eval(), (torch.randn(4, 8), torch.randn(4, 5, dtype=torch.complex64))
    pipe = split(model, example, cluster=2, costs="analytic")
    pipe.export_onnx(tmp_path / "onnx", form="annotated")

    found = run_onnx(tmp_path / "onnx", {"x": example[0], "turned": example[1]})

    assert_the_models(found, model, example)
