"""Exported stages on microbatches: the batch is cut along its own axis, or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import parser

import pd2bw_fx
from pd2bw_fx.errors import InputError
from pd2bw_fx.passes.export_onnx.batched import batch_place, batch_symbol

RECURRENT = """<ir_version: 10, opset_import: ["" : 20]>
recurrent (float[time, batch, 2] x) => (float[time, batch, 4] y) <float[2, 4] w, float[4, 4] v> {
    h = MatMul(x, w)
    axis = Constant <value = int64 {0}> ()
    t = CumSum(h, axis)
    p = MatMul(t, v)
    y = Tanh(p)
}"""


def test_a_batch_that_stands_second_is_cut_there(tmp_path: Path) -> None:
    model = parser.parse_model(RECURRENT)
    draw = np.random.default_rng(0)
    for value in model.graph.value_info:
        shape = [size.dim_value for size in value.type.tensor_type.shape.dim]
        array = draw.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, value.name))
    del model.graph.value_info[:]
    onnx.save(model, tmp_path / "recurrent.onnx")
    pipe = pd2bw_fx.split(tmp_path / "recurrent.onnx", cluster=2, num_stages=2)
    x = draw.standard_normal((6, 5, 2)).astype(np.float32)

    found = pipe.run_processes({"x": x}, num_microbatches=2)

    np.testing.assert_allclose(found["y"], pipe.run({"x": x})["y"], rtol=1e-5, atol=1e-6)


def named(*shapes: list[int | str] | None) -> dict[str, Any]:
    return {"inputs": [{"name": "x", "shape": shape} for shape in shapes]}


@pytest.mark.parametrize(
    ("shapes", "symbol"),
    [
        ([["time", "batch_size", 8]], "batch_size"),
        ([["T", "N", 8]], "N"),
        ([["samples", 8], [4]], "samples"),
        ([["tokens_axis_0", "tokens_axis_1"]], "tokens_axis_0"),
        ([["length", 8]], "length"),
        ([["sequence", "rows", 8]], None),
        ([["memory", 2], ["target", 2]], None),
        ([["batch", 2], ["other_batch", 2]], None),
        ([[3, 4]], None),
        ([None], None),
    ],
)
def test_the_batch_is_the_axis_that_is_so_called_or_the_first_of_all_inputs(
    shapes: list[list[int | str] | None], symbol: str | None
) -> None:
    assert batch_symbol(named(*shapes)) == symbol


def test_what_no_microbatches_make_up_is_refused() -> None:
    assert batch_place({"name": "y", "shape": [4, "batch"]}, "batch") == 1
    assert batch_place({"name": "y", "shape": [4, "batches"]}, "batch") is None
    for shape, said in ((["batch", "batch"], "batch, batch"), (["2*batch"], "2[*]batch"), (None, "no fixed")):
        with pytest.raises(InputError, match=rf"{said}.*num_microbatches=1"):
            batch_place({"name": "y", "shape": shape}, "batch")
