"""ONNX files whose sizes go by axes of several names, or by values: the stages take what the file takes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import parser

import pd2bw_fx
from pd2bw_fx.cluster import Cluster
from pd2bw_fx.errors import ExportError
from pd2bw_fx.onnx_pipeline import OnnxPipeline

HEADER = '<ir_version: 10, opset_import: ["" : 20]>\n'
ROOT_TWO = [[1.0, 1.0], [-1.0, 1.0]]

Arrays = dict[str, NDArray[np.generic]]


def written(text: str, path: Path) -> Path:
    """The text as a file, with a weight w: (2, 2)."""
    model = parser.parse_model(HEADER + text)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(ROOT_TWO, np.float32), "w"))
    del model.graph.value_info[:]
    onnx.save(model, path)
    return path


def stages_of(path: Path, num_stages: int = 2) -> OnnxPipeline:
    cluster = Cluster.uniform(num_stages, bytes_per_s=1e12, latency_s=1e-9, memory_bytes="1 GiB")
    return pd2bw_fx.split(path, cluster=cluster, num_stages=num_stages)


def shapes(pipe: OnnxPipeline) -> dict[str, list[int | str]]:
    ports = [port for stage in pipe.manifest["stages"] for port in (*stage["inputs"], *stage["outputs"])]
    return {port["tensor"]: port["shape"] for port in ports}


def assert_same(pipe: OnnxPipeline, path: Path, inputs: Arrays) -> None:
    """From the stages one after another, and put together again."""
    merged = path.with_name("merged.onnx")
    pipe.merge(merged)
    expected = onnxruntime.InferenceSession(path).run(None, inputs)
    for found in (pipe.run(inputs).values(), onnxruntime.InferenceSession(merged).run(None, inputs)):
        for array, result in zip(found, expected, strict=True):
            np.testing.assert_allclose(array, result, rtol=1e-5, atol=1e-6)


def rows(number: int) -> NDArray[np.float32]:
    return np.linspace(-1, 1, 2 * number, dtype=np.float32).reshape(number, 2)


TWO_NAMES = """two (float[memory, 2] a, float[time, 2] x) => (float[time, 2] y) <float[2, 2] w> {
    b = MatMul(a, w)
    c = Softmax(b)
    s = ReduceSum<keepdims = 0>(c)
    p = Mul(x, s)
    q = MatMul(p, w)
    y = Softmax(q)
}"""


def test_axes_of_two_names_stay_two(tmp_path: Path) -> None:
    path = written(TWO_NAMES, tmp_path / "two.onnx")
    pipe = stages_of(path)

    assert shapes(pipe)["a"] == ["memory", 2]
    assert shapes(pipe)["x"] == ["time", 2]
    for memory, time in ((3, 5), (9, 4), (1, 30)):
        assert_same(pipe, path, {"a": rows(memory), "x": rows(time)})


def test_axes_that_must_be_equal_may_have_two_names(tmp_path: Path) -> None:
    text = """sum (float[one, 2] a, float[other, 2] x) => (float[one, 2] y) <float[2, 2] w> {
        s = Add(a, x)
        p = MatMul(s, w)
        y = Softmax(p)
    }"""
    path = written(text, tmp_path / "sum.onnx")
    pipe = stages_of(path)

    assert shapes(pipe)["x"] == ["other", 2]
    assert_same(pipe, path, {"a": rows(7), "x": rows(7)})


COUNTED = """counted (float[b, 2] x, int64 n) => (float[rows, 2] y) <float[2, 2] w> {
    zero = Constant <value = int64 {0}> ()
    one = Constant <value = int64 {1}> ()
    r = Range(zero, n, one)
    f = Cast<to = 1>(r)
    axis = Constant <value = int64[1] {1}> ()
    u = Unsqueeze(f, axis)
    shape = Constant <value = int64[2] {1, 2}> ()
    e = Expand(u, shape)
    h = MatMul(e, w)
    s = ReduceSum<keepdims = 0>(x)
    k = Mul(h, s)
    y = MatMul(k, w)
}"""

CHOSEN = """chosen (float[b, 2] x, bool flag) => (float[rows, 2] y) <float[2, 2] w> {
    h = MatMul(x, w)
    i = If (flag) <
        then_branch = yes () => (float[b, 2] t) { t = Identity(h) },
        else_branch = no () => (float[c, 2] e) { e = Concat<axis = 0>(h, h) }
    >
    j = MatMul(i, w)
    y = MatMul(j, w)
}"""


@pytest.mark.parametrize(
    ("text", "name", "values"),
    [(COUNTED, "n", [np.array(1), np.array(5)]), (CHOSEN, "flag", [np.array(True), np.array(False)])],
)
def test_a_size_that_goes_by_values_stays_open(
    text: str, name: str, values: list[NDArray[np.generic]], tmp_path: Path
) -> None:
    path = written(text, tmp_path / "model.onnx")
    pipe = stages_of(path, 3)

    assert shapes(pipe)["y"] == ["y_axis_0", 2]
    for value in values:
        assert_same(pipe, path, {"x": rows(3), name: value})


def test_a_constant_that_the_file_returns_costs_nothing(tmp_path: Path) -> None:
    text = """constant (float[b, 2] x) => (float[b, 2] y, float[2] c) <float[2, 2] w> {
        h = MatMul(x, w)
        y = MatMul(h, w)
        c = Constant <value = float[2] {1.0, 2.0}> ()
    }"""
    path = written(text, tmp_path / "constant.onnx")
    assert_same(stages_of(path), path, {"x": rows(4)})


HALVES = """halves (float[b, 2] x) => (float[b, 2] y, {kind}[b, 2] c) <float[2, 2] w> {{
    h = MatMul(x, w)
    a = Cast<to = 16>(h)
    c = Cast<to = {code}>(a)
    y = MatMul(h, w)
}}"""


def test_a_type_that_numpy_has_not_stays_within_a_stage(tmp_path: Path) -> None:
    path = written(HALVES.format(kind="float", code=1), tmp_path / "halves.onnx")
    pipe = stages_of(path)
    assert "a" not in shapes(pipe)
    assert_same(pipe, path, {"x": rows(4)})

    leaving = written(HALVES.format(kind="bfloat16", code=16), tmp_path / "leaving.onnx")
    with pytest.raises(ExportError, match=r"'c' leaves a stage and is no tensor .* bfloat16"):
        stages_of(leaving)


def test_an_axis_is_not_the_batchs_for_having_its_sizes_twice(tmp_path: Path) -> None:
    """Made-up lengths are 5 and 12: frames of four are 2 and 3, as the batch is."""
    text = """frames (float[batch, 2, length] x) => (float[frames, batch, 2] y) <float[2, 2] w> {
        c = MaxPool<kernel_shape = [1], strides = [4]>(x)
        r = Relu(c)
        t = Transpose<perm = [2, 0, 1]>(r)
        h = MatMul(t, w)
        y = MatMul(h, w)
    }"""
    path = written(text, tmp_path / "frames.onnx")
    pipe = stages_of(path)

    assert pipe.manifest["outputs"][0]["shape"] == ["y_axis_0", "batch", 2]
    x = np.linspace(-1, 1, 3 * 2 * 8, dtype=np.float32).reshape(3, 2, 8)
    assert_same(pipe, path, {"x": x})
    assert_same(pipe, path, {"x": x[:1].repeat(9, axis=2)})


def test_what_has_not_always_as_many_axes_is_not_sent(tmp_path: Path) -> None:
    text = """squeezed (float[batch, heads, 2] x) => (float[rows, 2] y) <float[2, 2] w> {
        a = MatMul(x, w)
        r = Relu(a)
        s = Squeeze(r)
        t = Tanh(s)
        p = MatMul(t, w)
        y = MatMul(p, w)
    }"""
    path = written(text, tmp_path / "squeezed.onnx")
    pipe = stages_of(path)

    assert pipe.manifest["stages"][1]["inputs"][0]["tensor"] in ("a", "r")
    for batch, heads in ((3, 5), (3, 1), (1, 4)):
        assert_same(pipe, path, {"x": rows(batch * heads).reshape(batch, heads, 2)})
