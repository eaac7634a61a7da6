"""Prices each node: arithmetic and bytes over the device's rates, or by onnxruntime's profiler."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from pd2bw_fx.costs import Costs, OperatorCost, Work
from pd2bw_fx.device import Device
from pd2bw_fx.errors import InputError
from pd2bw_fx.graph import OperatorGraph
from pd2bw_fx.onnx_model import OnnxModel

from .clock import measured_s

if TYPE_CHECKING:
    import onnx_ir as ir

_LAUNCH_S = 5e-6  # cost of calling any operator


def onnx_costs(
    model: OnnxModel, *, device: Device, method: Literal["analytic", "measured"] = "analytic"
) -> Costs:
    """Returns the seconds of each operator's forward on the first example; there is no backward.

    "measured": the median of five runs of onnxruntime's profiler on this machine, its graph not optimised.
    """
    if method not in ("analytic", "measured"):
        raise InputError(f"costs are {method!r}; 'analytic' or 'measured' was expected")
    work = {} if method == "measured" else _work(model)
    seconds = (
        {node: _LAUNCH_S + device.roof_s(*done) for node, done in work.items()} if work else measured_s(model)
    )
    operators = {}
    for name, operator in model.graph.operators.items():
        output_bytes = sum(spec.num_bytes for spec in operator.outputs)
        # An element of a tuple is memory that its node has made.
        working_bytes = 0 if operator.target == "operator.getitem" else output_bytes
        node = model.node_of.get(name, "")
        operators[name] = OperatorCost(
            seconds.get(node, 0.0), 0.0, output_bytes, 0, working_bytes, forward_work=work.get(node)
        )
    shapes = [spec.example_shape for spec in model.graph.inputs.values() if spec.example_shape]
    return Costs(
        operators=operators,
        device="this machine, onnxruntime" if method == "measured" else device.name,
        microbatch_size=shapes[0][0] if shapes else None,
        origin=method,
        note="inference: there is no backward",
    )


def _work(model: OnnxModel) -> dict[str, Work]:
    """Returns each node's arithmetic operations, and the bytes that it reads and writes."""
    graph = model.graph
    nodes = {node.name or "": node for node in model.ir.graph}
    work: dict[str, Work] = {}
    for name, node_name in model.node_of.items():
        operator = graph.operators[name]
        num_bytes = sum(spec.num_bytes for spec in operator.outputs)
        num_bytes += sum(_value_bytes(graph, value) for value in operator.reads)
        # A lookup reads its rows of the table only.
        if not operator.target.endswith(".Gather"):
            num_bytes += sum(graph.parameters[value].spec.num_bytes for value in operator.parameters)
        flops = _flops(nodes[node_name], model)
        work[node_name] = flops, num_bytes
    return work


def _value_bytes(graph: OperatorGraph, value: str) -> int:
    if value in graph.inputs:
        return graph.inputs[value].num_bytes
    return sum(spec.num_bytes for spec in graph.operators[value].outputs)


def _flops(node: ir.Node, model: OnnxModel) -> int:
    """Counts two operations for each multiply-add of matrix products and convolutions, and none else."""
    operands = [None if value is None else _shape(value.name or "", model.graph) for value in node.inputs]
    made = _shape(node.outputs[0].name or "", model.graph)
    if made is None or any(shape is None for shape in operands[:2]):
        return 0
    first, second = (shape or () for shape in [*operands, None, None][:2])
    kind = node.op_type
    if kind in ("MatMul", "MatMulInteger", "QLinearMatMul") and first:
        return 2 * math.prod(made) * first[-1]
    if kind == "Gemm" and len(first) == 2:
        transposed = node.attributes.get_int("transA", 0)
        return 2 * math.prod(made) * first[0 if transposed else 1]
    if kind in ("Conv", "ConvInteger"):
        return 2 * math.prod(made) * math.prod(second[1:])
    if kind == "ConvTranspose":
        return 2 * math.prod(first) * math.prod(second[1:])
    if kind in ("LSTM", "GRU", "RNN") and len(first) == 3 and len(operands) > 2:
        return 2 * first[0] * first[1] * (math.prod(second) + math.prod(operands[2] or ()))
    if kind == "Attention" and len(first) == 4 and len(second) == 4:
        return 2 * math.prod(first[:-1]) * second[-2] * (first[-1] + made[-1])
    return 0


def _shape(value: str, graph: OperatorGraph) -> tuple[int, ...] | None:
    for specs in (
        graph.inputs,
        {name: held.spec for name, held in graph.parameters.items() if name == value},
    ):
        if value in specs:
            return specs[value].example_shape
    operator = graph.operators.get(value)
    return operator.outputs[0].example_shape if operator is not None and operator.outputs else None
