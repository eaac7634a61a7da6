"""Prints a stage's file in the ONNX text format."""

from __future__ import annotations

from pathlib import Path

from pd2bw_fx.onnx_session import require


def onnx_text(path: str | Path) -> str:
    """Returns inputs, outputs and nodes, and the name, type and shape of each weight."""
    onnx = require("onnx")
    model = onnx.load(path, load_external_data=False)
    graph = model.graph
    described = {value.name for value in graph.value_info}
    for weight in graph.initializer:
        if weight.name not in described:
            graph.value_info.append(
                onnx.helper.make_tensor_value_info(weight.name, weight.data_type, weight.dims)
            )
    graph.ClearField("initializer")
    text: str = onnx.printer.to_text(model)
    return text
