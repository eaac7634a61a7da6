"""ONNX files written as text, with weights drawn for them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import parser

HEADER = '<ir_version: 10, opset_import: ["" : 20]>\n'


CHAIN = (
    HEADER
    + """chain (float[batch, 4] x) => (float[batch, 4] y, float[batch, 2] z)
<float[4, 4] w, float[4, 4] v> {
    a = MatMul(x, w)
    b = Relu(a)
    c = MatMul(b, w)
    left, right = Split<axis = 1, num_outputs = 2>(c)
    z = Neg(left)
    joined = Concat<axis = 1>(right, left)
    d = MatMul(joined, v)
    y = MatMul(d, w)
}"""
)


BRANCHES = (
    HEADER
    + """branches (float[batch, 4] x, bool flag, int64 times) => (float[batch, 4] y)
<float[4, 4] w, float[4, 4] v> {
    a = MatMul(x, w)
    b = Tanh(a)
    chosen = If (flag) <
        then_branch = yes () => (float[batch, 4] t) { p = MatMul(a, v)  t = Add(p, b) },
        else_branch = no () => (float[batch, 4] e) { q = MatMul(b, w)  e = Sub(q, a) }
    >
    d = MatMul(chosen, w)
    always = Constant <value = bool {1}> ()
    y = Loop (times, always, d) <
        body = body (int64 i, bool on, float[batch, 4] state) => (bool still, float[batch, 4] next) {
            still = Identity(on)
            r = MatMul(state, v)
            s = Add(r, b)
            next = Tanh(s)
        }
    >
}"""
)


def written(text: str, path: Path, *, external: bool = False) -> Path:
    """The text as a file, with weights drawn for its initialisers."""
    model = parser.parse_model(text)
    draw = np.random.default_rng(0)
    for value in model.graph.value_info:  # what stands in <> without a value
        shape = [size.dim_value for size in value.type.tensor_type.shape.dim]
        array = draw.standard_normal(shape).astype(np.float32) * 0.5
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, value.name))
    del model.graph.value_info[:]
    onnx.save(model, path, save_as_external_data=external, size_threshold=0, location=f"{path.stem}.weights")
    return path


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
