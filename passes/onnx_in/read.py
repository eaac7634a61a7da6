"""Reads an ONNX file as an operator graph: an operator per node, with what control flow reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pd2bw_fx.errors import InputError
from pd2bw_fx.graph import ModelOutput, Operator, OperatorGraph, ParameterSpec, TensorSpec
from pd2bw_fx.onnx_model import OnnxModel, subgraphs
from pd2bw_fx.onnx_session import Array

from .load import load_onnx, reads
from .specs import specs_of
from .trial import made_up_examples, run_every_node

if TYPE_CHECKING:
    import onnx_ir as ir

# Computed in each stage that needs the result, where it reads only model inputs and small constants.
_CHEAP = frozenset({
    "Shape", "Size", "Cast", "CastLike", "Unsqueeze", "Squeeze", "Gather", "Concat", "Slice", "Reshape",
    "Range", "ConstantOfShape", "Expand", "Where", "Equal", "Less", "Greater", "LessOrEqual",
    "GreaterOrEqual", "Not", "And", "Or", "Add", "Sub", "Mul", "Div", "Mod", "Trilu", "Identity", "Flatten",
    "Transpose", "Min", "Max", "EyeLike", "Tile", "GatherElements", "CumSum", "Neg", "Abs",
})  # fmt: skip
_SMALL_BYTES = 4096

_RANDOM = frozenset({"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli",
                     "Multinomial"})  # fmt: skip


def read_onnx(path: str | Path, examples: Sequence[Mapping[str, Array]] | None = None) -> OnnxModel:
    """Returns the file's operator graph, with shapes as onnxruntime finds them on the examples.

    `examples` are inputs by name, one batch or two of different sizes, which tell dynamic axes. Without them
    they are made up from the shapes that the file declares.

    Raises InputError for a file that is no ONNX model or examples that are not its inputs, ExportError
    where onnxruntime does not run it.
    """
    path = Path(path)
    model = load_onnx(path)
    _check_draws(model)
    if examples is not None:
        _check_examples(model, examples)
    choices = made_up_examples(model) if examples is None else [[dict(example) for example in examples]]
    trial = run_every_node(model, choices)
    graph, node_of = _operator_graph(model, specs_of(trial, model), path.stem)
    outputs = [value.name or "" for value in model.graph.outputs]
    _check_outputs(graph, outputs)
    return OnnxModel(
        path=path,
        graph=graph,
        examples=tuple(trial.examples),
        results=tuple({name: run[name] for name in outputs} for run in trial.runs),
        node_of=node_of,
        ir=model,
    )


def _check_draws(model: ir.Model) -> None:
    for node in model.graph.all_nodes():
        if node.op_type in _RANDOM:
            raise InputError(
                f"node {node.name or node.outputs[0].name!r} draws random numbers ({node.op_type}), so the "
                "stages could not be compared with the file; make what it draws an input of the model"
            )


def _check_examples(model: ir.Model, batches: Sequence[Mapping[str, Array]]) -> None:
    inputs = {value.name or "" for value in model.graph.inputs}
    if not batches:
        raise InputError("examples is empty; give one batch or two of different sizes, or leave it out")
    for batch in batches:
        unlike = sorted(inputs ^ batch.keys())
        if unlike:
            what = "is missing from the examples" if unlike[0] in inputs else "is no input of the model"
            raise InputError(f"input {unlike[0]!r} {what}; it takes {', '.join(sorted(inputs)) or 'none'}")


def _check_outputs(graph: OperatorGraph, outputs: Sequence[str]) -> None:
    for name in outputs:
        if name not in graph.operators and name not in graph.inputs:
            raise InputError(
                f"the model returns {name!r}, which is a constant of the file; return a copy of it"
            )


def _operator_graph(
    model: ir.Model, specs: Mapping[str, TensorSpec | None], name: str
) -> tuple[OperatorGraph, dict[str, str]]:
    inputs = {value.name or "": _of_input(value, specs) for value in model.graph.inputs}
    held = {value.name or "": _held(value) for value in model.graph.initializers.values()}
    reader = _Reader(specs, inputs, held, leaving={value.name or "" for value in model.graph.outputs})
    for node in model.graph:
        reader.add(node)
    graph = OperatorGraph(
        operators=reader.operators,
        inputs=inputs,
        parameters=held,
        buffers={},
        outputs=tuple(ModelOutput(value.name or "", value.name or "") for value in model.graph.outputs),
        loss=None,
        model_name=name,
        batch_symbol=next(
            (s.shape[0] for s in inputs.values() if s.shape and isinstance(s.shape[0], str)), None
        ),
    )
    return graph, reader.node_of


class _Reader:
    """Makes operators of nodes, in their order."""

    def __init__(
        self,
        specs: Mapping[str, TensorSpec | None],
        inputs: Mapping[str, TensorSpec],
        held: Mapping[str, ParameterSpec],
        leaving: set[str],
    ) -> None:
        self.operators: dict[str, Operator] = {}
        self.node_of: dict[str, str] = {}
        self._specs, self._inputs, self._held, self._leaving = specs, inputs, held, leaving
        self._everywhere = set(inputs)  # values that every stage has without receiving them
        self._odd: set[str] = set()  # values that are no tensors, or whose rank varies

    def add(self, node: ir.Node) -> None:
        values = [value.name or "" for value in reads(node)]
        made = [value.name or "" for value in node.outputs if value.name]
        held = tuple(value for value in values if value in self._held)
        operands = tuple(value for value in values if value not in self._held)
        unsent = {value for value in made if (spec := self._specs.get(value)) is None or spec.shape is None}
        odd = bool(unsent) or any(value in self._odd for value in operands)
        self._odd |= unsent
        name = made[0] if len(made) == 1 else node.name or ""
        operator = Operator(
            name=name,
            target=f"{node.domain or 'onnx'}.{node.op_type}",
            module_path=_module_path(node),
            module_type="",
            reads=operands,
            parameters=held,
            outputs=tuple(spec for value in made if (spec := self._specs.get(value)) is not None),
            source_line=node.metadata_props.get("pd2bw_fx.source"),
            is_random=node.op_type in _RANDOM,
            is_replicable=self._is_replicable(node, operands, held, made) and not odd,
            memory_group="unsent" if odd else None,  # only tensors of fixed rank can be sent
        )
        self.operators[name] = operator
        self.node_of[name] = node.name or ""
        if operator.is_replicable:
            self._everywhere |= {name, *made}
        if len(made) > 1:
            for value in made:
                spec = self._specs.get(value)
                self.operators[value] = Operator(
                    name=value,
                    target="operator.getitem",
                    module_path=operator.module_path,
                    module_type="",
                    reads=(name,),
                    outputs=() if spec is None else (spec,),
                    is_view=True,
                    is_replicable=operator.is_replicable,
                    memory_group=operator.memory_group,
                )

    def _is_replicable(
        self, node: ir.Node, operands: Sequence[str], held: Sequence[str], made: Sequence[str]
    ) -> bool:
        return (
            node.domain in ("", "ai.onnx")
            and node.op_type in _CHEAP
            and not subgraphs(node)
            and not self._leaving & set(made)
            and all(value in self._everywhere for value in operands)
            and all(self._held[value].spec.num_bytes <= _SMALL_BYTES for value in held)
        )


def _of_input(value: ir.Value, specs: Mapping[str, TensorSpec | None]) -> TensorSpec:
    spec = specs[value.name or ""]
    if spec is None:
        raise InputError(f"input {value.name!r} is no tensor of numbers; stages cannot take it")
    return spec


def _held(value: ir.Value) -> ParameterSpec:
    """Returns the spec of an initialiser, as bytes where torch lacks its type (four bits, strings)."""
    tensor = value.const_value
    if tensor is None:
        raise InputError(f"initialiser {value.name!r} has no value; the file is damaged")
    shape = tuple(tensor.shape.numpy())
    dtype = getattr(torch, tensor.dtype.name.lower().replace("double", "float64"), None)
    dtype = {"FLOAT": torch.float32, "BFLOAT16": torch.bfloat16}.get(tensor.dtype.name, dtype)
    if isinstance(dtype, torch.dtype):
        return ParameterSpec(value.name or "", TensorSpec(shape, dtype, False, shape), trainable=False)
    size = (tensor.nbytes,)
    return ParameterSpec(value.name or "", TensorSpec(size, torch.uint8, False, size), trainable=False)


def _module_path(node: ir.Node) -> str:
    """Returns the path that our exporter notes, or that is in a name like /transformer/h.0/attn/MatMul."""
    noted = node.metadata_props.get("pd2bw_fx.module")
    if noted is not None:
        return noted
    parts = [part for part in (node.name or "").split("/")[:-1] if part]
    # In "/transformer/transformer.h.0/attn" a part repeats the path before it.
    return ".".join(part.removeprefix(".".join(parts[:depth]) + ".") for depth, part in enumerate(parts))
