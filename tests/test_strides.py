"""Tensors lie in memory as they did in the model: behind a cut, on disk, and where weights are replaced."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import pd2bw_fx
from pd2bw_fx.strides import laid_as, order_of, packed, unpacked
from pd2bw_fx.tensor_files import read_tensors, save_tensors
from tests.trained import assert_trained_by_the_rule

DRAWN = torch.randn(4, 3, 5, 6)


@pytest.mark.parametrize(
    ("tensor", "order"),
    [
        (DRAWN, ()),
        (DRAWN.to(memory_format=torch.channels_last), (0, 2, 3, 1)),
        (DRAWN.permute(3, 1, 0, 2), (2, 1, 3, 0)),
        (torch.randn(4, 3, 1, 1).to(memory_format=torch.channels_last), (0, 2, 3, 1)),
        (torch.randn(1, 3).expand(4, 3), ()),  # these two do not fill their memory
        (DRAWN[:, ::2].transpose(2, 3), ()),
        (torch.tensor(1.0), ()),
        (torch.empty(0, 3), ()),
    ],
)
def test_the_order_of_dimensions_in_memory(tensor: Tensor, order: tuple[int, ...]) -> None:
    assert order_of(tensor) == order
    assert unpacked(packed(tensor, order), order).stride() == tensor.stride()
    assert packed(tensor, order).is_contiguous() or not order
    if order:
        laid = laid_as(tensor.contiguous(), tensor)
        assert laid.stride() == tensor.stride()
        assert torch.equal(laid, tensor)


class Mixer(nn.Module):
    """Its channels stand together from the first layer on, which `view` relies on; so it does on a transposed
    buffer, and `as_strided` on both."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.bend, self.mixed, self.last = nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 1)
        self.register_buffer("table", torch.arange(32.0).view(4, 8).t())

    def forward(self, x: Tensor) -> Tensor:
        x = self.bend(self.first(x))
        b, c, h, w = x.shape
        rows = x.permute(0, 2, 3, 1).view(b * h * w, c)
        whole = x.as_strided((b, h * w * c), (h * w * c, 1))
        table = self.table.t().view(-1)  # type: ignore[operator]
        shift = table[:8] + self.table.as_strided((8,), (1,))  # type: ignore[operator]
        return self.last(self.mixed(rows + shift)).square().mean() + whole[:, 0].mean()


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Mixer().double().to(memory_format=torch.channels_last)


def images(size: int) -> Tensor:
    return torch.randn(size, 3, 4, 4, dtype=torch.float64).to(memory_format=torch.channels_last)


def test_a_value_lies_behind_a_cut_as_before_it(model: nn.Module) -> None:
    constraints = pd2bw_fx.Constraints(stage_of={"first": 0, "bend": 1})
    pipe = pd2bw_fx.split(model, images(2), cluster=2, costs="analytic", constraints=constraints)
    assert [port.value for port in pipe.programs[1].inputs if port.source == 0] == ["conv2d"]

    assert_trained_by_the_rule(model, pipe, [images(4) for _ in range(3)])


def test_what_is_saved_or_replaced_lies_as_it_did(model: nn.Module, tmp_path: Path) -> None:
    x = images(2)
    pipe = pd2bw_fx.split(model, x, cluster=1, costs="analytic")
    pipe.save(tmp_path / "saved")
    loaded = pd2bw_fx.load(tmp_path / "saved")
    pipe.load_state_dict({name: tensor.contiguous() for name, tensor in model.state_dict().items()})

    for one in (pipe, loaded):
        assert {name: t.stride() for name, t in one.tensors().items()} == {
            name: t.stride() for name, t in model.state_dict().items()
        }
        assert one.run(x)["loss"].item() == pytest.approx(model(x).item(), rel=1e-12)


def test_a_file_is_as_any_other_beside_what_it_tells_of_memory(tmp_path: Path) -> None:
    tensors = {"turned": torch.randn(3, 4).t(), "plain": torch.randn(3)}
    save_tensors(tensors, tmp_path / "file")
    save_tensors({"plain": tensors["plain"]}, tmp_path / "plain")

    assert load_file(tmp_path / "file")["turned"].is_contiguous()
    assert all(torch.equal(load_file(tmp_path / "file")[name], tensors[name]) for name in tensors)
    assert read_tensors(tmp_path / "file")["turned"].stride() == (1, 4)
    assert b"orders" not in (tmp_path / "plain").read_bytes()
