"""What nodes of an ONNX file cost: counted, or by onnxruntime's own clock."""

from __future__ import annotations

from pathlib import Path

import pytest

from pd2bw_fx.device import Device
from pd2bw_fx.passes.onnx_in import onnx_costs, read_onnx
from tests.onnx_texts import HEADER, written


def test_analytic_costs_count_two_operations_for_each_multiplication(tmp_path: Path) -> None:
    text = (
        HEADER
        + """products (float[2, 64] x, float[1, 8, 10, 10] image) => (float[2, 32] y, float[1, 4, 8, 8] z)
    <float[64, 32] w, float[4, 8, 3, 3] kernel> {
        y = MatMul(x, w)
        z = Conv(image, kernel)
    }"""
    )
    model = read_onnx(written(text, tmp_path / "products.onnx"))
    slow = Device("slow", 2**30, flops_per_s=1e6, memory_bytes_per_s=1e15)

    costs = onnx_costs(model, device=slow)

    assert costs.operators["y"].forward_s == pytest.approx(2 * 2 * 64 * 32 / 1e6, rel=1e-2)
    assert costs.operators["z"].forward_s == pytest.approx(2 * 4 * 8 * 8 * 8 * 9 / 1e6, rel=1e-2)
    assert costs.backward_s == 0


def test_measured_costs_are_onnxruntimes_own_clock(tmp_path: Path) -> None:
    text = (
        HEADER
        + """uneven (float[256, 512] x) => (float[256, 512] y)
    <float[512, 512] w> { a = Neg(x)  b = MatMul(a, w)  y = Neg(b) }"""
    )
    model = read_onnx(written(text, tmp_path / "uneven.onnx"))

    costs = onnx_costs(model, device=Device("cpu", 2**30), method="measured")

    assert costs.origin == "measured"
    assert all(cost.forward_s > 0 for cost in costs.operators.values())
    assert costs.operators["b"].forward_s > 3 * costs.operators["a"].forward_s


def test_what_onnxruntime_takes_apart_has_the_seconds_of_its_parts(tmp_path: Path) -> None:
    text = (
        HEADER
        + """apart (float[64, 512] x) => (float[64, 512] y)
    <float[512, 512] w> { a = Neg(x)  b = HardSwish(a)  c = MatMul(b, w)  d = HardSwish(c)  y = Neg(d) }"""
    )
    model = read_onnx(written(text, tmp_path / "apart.onnx"))

    costs = onnx_costs(model, device=Device("cpu", 2**30), method="measured")

    assert costs.operators.keys() == {"a", "b", "c", "d", "y"}
    assert all(cost.forward_s > 0 for cost in costs.operators.values())
