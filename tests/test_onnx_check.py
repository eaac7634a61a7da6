"""How far files may be off: by the types that a value was computed of, without what stands for infinity."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import DTypeLike
from onnx import TensorProto, numpy_helper, parser, save
from torch import Tensor, nn

import pd2bw_fx
from pd2bw_fx.errors import ExportError
from pd2bw_fx.passes.export_onnx.check import compare_arrays


@pytest.mark.parametrize(
    ("far", "dtype"),
    [
        (torch.finfo(torch.float32).min, "float32"),
        (torch.finfo(torch.float16).min, "float16"),
        (torch.finfo(torch.float16).min, "float32"),
        (-1e9, "float32"),
        (-1e4, "float16"),
        (torch.finfo(torch.float32).max, "float64"),
        (-torch.inf, "float32"),
    ],
)
@pytest.mark.parametrize(
    ("found", "is_right"), [((1.0, 0.5), True), ((1.0, 0.4), False), ((0.0, 0.5), False)]
)
def test_what_stands_for_infinity_does_not_hide_other_entries(
    far: float, dtype: DTypeLike, found: tuple[float, float], *, is_right: bool
) -> None:
    expected = np.array([far, 0.5, -2.0], dtype)
    arrays = {"scores": np.array([far * found[0] if found[0] else -3.0, found[1], -2.0], dtype)}

    with nullcontext() if is_right else pytest.raises(ExportError, match="scores differ"):
        compare_arrays(arrays, {"scores": expected}, what={"scores": "scores differ"}, tolerance=None)


class Halved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.last = nn.Linear(64, 64), nn.Linear(64, 8)
        self.narrow = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).half()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.wide(x), self.last(self.narrow(x.half()).float())


def test_what_is_float32_behind_float16_is_held_to_float16(tmp_path: Path) -> None:
    torch.manual_seed(0)
    pipe = pd2bw_fx.split(Halved().eval(), (torch.randn(16, 64),), cluster=2, costs="analytic")

    manifest = pipe.export_onnx(tmp_path / "onnx")

    assert manifest["largest_differences_from_model"]["output_0"] < 1e-6
    assert 1e-5 < manifest["largest_differences_from_model"]["output_1"] < 2e-2


def test_a_file_of_halves_with_float32_around_it_is_split(tmp_path: Path) -> None:
    lines = [f"m{i} = MatMul(h{i}, w{i})\n h{i + 1} = Relu(m{i})" for i in range(4)]
    text = """<ir_version: 9, opset_import: ["" : 20]>
    halves (float[N, 64] x) => (float[N, 64] y) <%s> { h0 = Cast<to = 10>(x)\n %s\n y = Cast<to = 1>(h4) }"""
    model = parser.parse_model(
        text % (", ".join(f"float16[64, 64] w{i}" for i in range(4)), "\n".join(lines))
    )
    draw = np.random.default_rng(0)
    for value in model.graph.value_info:
        array = (draw.standard_normal((64, 64)) / 8).astype(np.float16)
        model.graph.initializer.add(name=value.name, dims=[64, 64], data_type=10, raw_data=array.tobytes())
    del model.graph.value_info[:]
    save(model, tmp_path / "halves.onnx")

    pipe = pd2bw_fx.split(tmp_path / "halves.onnx", cluster=2, num_stages=2)

    assert pipe.manifest["largest_differences_from_model"]["y"] < 2e-2


def test_quantised_weights_are_compared_as_the_whole_file_is_run(tmp_path: Path) -> None:
    """For a MatMul alone onnxruntime takes a kernel of four bits, behind which a Relu or not."""
    text = """<ir_version: 10, opset_import: ["" : 21]>
    quantised (float[N, 64] x) => (float[N, 4] y) {
        w = DequantizeLinear<axis = 0, block_size = 32>(q, scale)
        h = MatMul(x, w)
        r = Relu(h)
        y = MatMul(r, v)
    }"""
    model = parser.parse_model(text)
    draw = np.random.default_rng(0)
    bits = draw.integers(0, 256, 64 * 32).astype(np.uint8).tobytes()
    model.graph.initializer.add(name="q", dims=[64, 64], data_type=TensorProto.INT4, raw_data=bits)
    scale, v = np.full((2, 64), 0.02, np.float32), draw.standard_normal((64, 4)).astype(np.float32)
    model.graph.initializer.extend([numpy_helper.from_array(scale, "scale"), numpy_helper.from_array(v, "v")])
    save(model, tmp_path / "quantised.onnx")

    pipe = pd2bw_fx.split(tmp_path / "quantised.onnx", cluster=2, num_stages=2)

    assert pipe.manifest["largest_differences_from_model"]["y"] < 1e-6


class Cancelling(nn.Module):
    """Returns the logarithm of a determinant that is 1 but for rounding, as an untrained flow does."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.rand(8) + 0.5), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scaled = x * self.scale
        logarithms = scaled.abs().log() - x.abs().log() - self.scale.log()
        return self.layer(scaled), logarithms.sum(-1)


def test_what_is_rounding_alone_may_be_another_rounding(tmp_path: Path) -> None:
    torch.manual_seed(0)
    pipe = pd2bw_fx.split(Cancelling(), torch.randn(6, 8), cluster=2, costs="analytic")

    manifest = pipe.export_onnx(tmp_path / "onnx")

    assert manifest["largest_differences_from_model"]["output_1"] > 1e-2


@pytest.mark.parametrize(
    ("found", "moved", "is_right"), [(1.002, 4e-3, True), (1.002, 1e-3, False), (1.02, 1.0, False)]
)
def test_a_difference_is_rounding_if_it_is_small_and_a_rounding_makes_as_much(
    found: float, moved: float, *, is_right: bool
) -> None:
    expected = {"output": np.array([1.0], np.float32)}

    with nullcontext() if is_right else pytest.raises(ExportError, match="output differs"):
        compare_arrays(
            {"output": np.array([found], np.float32)},
            expected,
            what={"output": "output differs"},
            tolerance=None,
            rounding=lambda: {"output": moved},
        )


@pytest.mark.parametrize(
    ("found", "moved", "is_right"), [(3e-7, 4.0, True), (3e-7, 0.5, False), (3e-3, 4e4, False)]
)
def test_a_difference_is_rounding_if_it_is_faint_and_a_rounding_makes_as_much(
    found: float, moved: float, *, is_right: bool
) -> None:
    expected = {"hidden": np.array([1.0], np.float32), "determinant": np.array([1e-7], np.float32)}

    with nullcontext() if is_right else pytest.raises(ExportError, match="determinant differs"):
        compare_arrays(
            expected | {"determinant": np.array([found], np.float32)},
            expected,
            what={"determinant": "determinant differs", "hidden": "hidden differs"},
            tolerance=None,
            rounding=lambda: {"determinant": moved},
        )
