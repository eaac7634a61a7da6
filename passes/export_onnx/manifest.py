"""What manifest.json says of the files: where each value comes from and goes to, by its name in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pd2bw_fx.graph import dtype_name
from pd2bw_fx.names import free_name
from pd2bw_fx.onnx_session import require
from pd2bw_fx.stage import Port, StageProgram

from .examples import model_inputs
from .graph import produced
from .original import Original
from .run import KIND, SCHEMA

if TYPE_CHECKING:
    import onnx_ir as ir


def tensor_names(programs: Sequence[StageProgram]) -> dict[str, str]:
    """Returns the name in the files of every value that enters or leaves a stage.

    It is the value's own name, or the output's for a value that only leaves the model. A name that a
    parameter or another value has already gets a number.
    """
    taken = {name for program in programs for name in (*program.parameters, *program.buffers)}
    ports = [port for program in programs for port in (*program.inputs, *program.outputs)]
    only_leaving = {p.value: p.model_output for p in ports if p.model_output is not None and not p.targets}
    only_leaving = {v: name for v, name in only_leaving.items() if v not in model_inputs(programs)}
    values = dict.fromkeys(port.value for port in ports)
    names: dict[str, str] = {}
    for value in sorted(values, key=lambda value: value in only_leaving):
        names[value] = free_name(only_leaving.get(value) or value, taken, first=1)
        taken.add(names[value])
    return names


def described(
    programs: Sequence[StageProgram],
    names: Mapping[str, str],
    original: Original | None,
    *,
    opset: int,
    training: bool,
) -> dict[str, Any]:
    """Returns what is said of the files as a whole: what they were made of, and what goes in and out.

    `names` are those of `tensor_names`.
    """
    live = original is not None and original.model is not None
    inputs = [_tensor(port, names) | {"name": port.value} for port in model_inputs(programs).values()]
    outputs = [
        _tensor(port, names) | {"name": port.model_output, "stage": program.stage}
        for program in programs
        for port in program.outputs
        if port.model_output is not None
    ]
    unread: list[str] = []
    if original is not None:  # in the model's order, which its callers know
        graph = original.graph
        inputs.sort(key=lambda entry: list(graph.inputs).index(entry["name"]))
        outputs.sort(key=lambda entry: [output.name for output in graph.outputs].index(entry["name"]))
        unread = [name for name in graph.inputs if name not in {entry["name"] for entry in inputs}]
    return {
        "kind": KIND,
        "schema": SCHEMA,
        "model": "model" if original is None else original.graph.model_name,
        "mode": "training" if training else "evaluation",
        "opset": opset,
        "versions": {"torch": torch.__version__}
        | {name: require(name).__version__ for name in ("onnx", "onnxscript", "onnxruntime")},
        "compared_with": "the original model" if live else "the stages in torch",
        "inputs": inputs,
        "unread": unread,
        "outputs": outputs,
    }


def stage_entry(program: StageProgram, names: Mapping[str, str], model: ir.Model) -> dict[str, Any]:
    """Returns what is said of a stage: its file, its parameters, and where its values come from and go."""
    held = {*program.parameters, *program.buffers, *program.ties}
    return {
        "stage": program.stage,
        "file": f"stage_{program.stage}.onnx",
        "inputs": [_tensor(port, names) | {"source": port.source} for port in program.inputs],
        "outputs": [
            _tensor(port, names) | {"targets": list(port.targets), "model_output": port.model_output}
            for port in produced(program)
        ],
        "parameters": sorted(held & set(model.graph.initializers)),
    }


def _tensor(port: Port, names: Mapping[str, str]) -> dict[str, Any]:
    shape = port.spec.shape
    return {
        "tensor": names[port.value],
        "dtype": dtype_name(port.spec.dtype),
        "shape": None if shape is None else list(shape),
    }
