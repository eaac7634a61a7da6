"""Cuts an ONNX file into stages along a plan: each has its nodes, its weights and what it receives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pd2bw_fx.errors import ExportError
from pd2bw_fx.files import whole_folder, write_manifest
from pd2bw_fx.graph import TensorSpec, dtype_name
from pd2bw_fx.onnx_model import OnnxModel, subgraphs
from pd2bw_fx.onnx_session import Array, require
from pd2bw_fx.plan import Plan

from .check import compare_arrays, largest
from .exactness import coarsest_behind
from .merge import EXTERNAL_ABOVE_BYTES, save
from .run import KIND, SCHEMA, run_files

if TYPE_CHECKING:
    import onnx_ir as ir

_QUANTISED = frozenset({"onnx.DequantizeLinear", "onnx.QuantizeLinear", "onnx.DynamicQuantizeLinear"})


def export_parts(
    model: OnnxModel,
    plan: Plan,
    folder: str | Path,
    *,
    tolerance: float | None = None,
    external_above_bytes: int = EXTERNAL_ABOVE_BYTES,
) -> dict[str, Any]:
    """Writes a file for each stage of the plan, checks them, and returns the manifest.

    Together they must compute what the whole file computes on its examples. Weights that several stages read
    are in each of them.

    Raises ExportError, and leaves no files, if a stage fails the ONNX checker or the results differ.
    """
    # For parts of such a file onnxruntime may choose other kernels than for the whole, which round otherwise.
    is_quantised = any(o.target in _QUANTISED for o in model.graph.operators.values())
    cuts, behind = _Cuts(model, plan), coarsest_behind(model.graph)
    with whole_folder(folder) as fresh:
        entries = []
        for stage in range(plan.num_stages):
            part = _part(model.ir.clone(), cuts, stage)
            entry = cuts.entry(stage, part)
            save(part, fresh / entry["file"], external_above_bytes=external_above_bytes)
            entries.append(entry)
        checks = []
        for example, results in zip(model.examples, model.results, strict=True):
            found = run_files(
                fresh, entries, {name: example[name] for name in cuts.fed}, optimise=not is_quantised
            )
            what = {name: f"{name} differs from what the whole file computes" for name in results}
            checks.append(compare_arrays(found, results, what=what, tolerance=tolerance, behind=behind))
        facts = {
            "kind": KIND,
            "schema": SCHEMA,
            "model": model.graph.model_name,
            "mode": "evaluation",
            "versions": {name: require(name).__version__ for name in ("onnx", "onnxruntime")},
            "compared_with": "the whole file",
            "inputs": [cuts.tensor(name) | {"name": name} for name in cuts.fed],
            "unread": [name for name in model.graph.inputs if name not in cuts.fed],
            "outputs": [
                cuts.tensor(output.value) | {"name": output.name, "stage": cuts.made_in(output.value)}
                for output in model.graph.outputs
            ],
            "batch_sizes_checked": [_batch_size(example) for example in model.examples],
            "stages": entries,
            "largest_differences_from_model": largest(checks),
        }
        return write_manifest(fresh, facts)


class _Cuts:
    """Which stage runs each node, and between which stages values go."""

    def __init__(self, model: OnnxModel, plan: Plan) -> None:
        self.graph = model.graph
        self.num_stages = plan.num_stages
        self._stage_of = placed = plan.stage_of
        self.nodes: list[set[str]] = []
        self.reads: list[list[str]] = []
        for stage in range(plan.num_stages):
            operators = self._with_replicas(name for name, own in placed.items() if own == stage)
            self.nodes.append({model.node_of[name] for name in operators if name in model.node_of})
            read = dict.fromkeys(value for name in operators for value in self.graph.operators[name].reads)
            self.reads.append([value for value in read if value not in operators])
        self.fed = [n for n in self.graph.inputs if any(n in read for read in self.reads)]
        self.fed += [
            o.value for o in self.graph.outputs if o.value in self.graph.inputs and o.value not in self.fed
        ]

    def _with_replicas(self, names: Iterable[str]) -> set[str]:
        """Returns the stage's operators, and those they need that every stage runs by itself."""
        found, waiting = set[str](), list(names)
        while waiting:
            name = waiting.pop()
            if name in found:
                continue
            found.add(name)
            waiting += [
                value
                for value in self.graph.operators[name].reads
                if value in self.graph.operators and self.graph.operators[value].is_replicable
            ]
        return found

    def made_in(self, value: str) -> int:
        return self._stage_of.get(value, 0)

    def targets(self, value: str) -> list[int]:
        return [stage for stage, read in enumerate(self.reads) if value in read]

    def leaving(self, stage: int) -> list[str]:
        """Returns the values of this stage that later stages read or the model returns."""
        returned = {output.value for output in self.graph.outputs}
        return [
            name
            for name, own in self._stage_of.items()
            if own == stage and (self.targets(name) or name in returned)
        ]

    def entry(self, stage: int, part: ir.Model) -> dict[str, Any]:
        returned = {output.value: output.name for output in self.graph.outputs}
        return {
            "stage": stage,
            "file": f"stage_{stage}.onnx",
            "inputs": [
                self.tensor(name) | {"source": None if name in self.graph.inputs else self.made_in(name)}
                for name in self.reads[stage]
            ],
            "outputs": [
                self.tensor(name) | {"targets": self.targets(name), "model_output": returned.get(name)}
                for name in self.leaving(stage)
            ],
            "parameters": sorted(part.graph.initializers),
        }

    def tensor(self, name: str) -> dict[str, Any]:
        spec = self.spec(name)
        shape = None if spec.shape is None else list(spec.shape)
        return {"tensor": name, "dtype": dtype_name(spec.dtype), "shape": shape}

    def spec(self, name: str) -> TensorSpec:
        """Returns the spec of a value. Raises ExportError for one that is no tensor, such as a sequence."""
        if name in self.graph.inputs:
            return self.graph.inputs[name]
        outputs = self.graph.operators[name].outputs
        if len(outputs) != 1:
            raise ExportError(
                f"{name!r} leaves a stage and is no tensor of numbers that numpy has a type for (but text, a "
                "sequence, or bfloat16); return numbers, by a Cast perhaps, or the labels' places"
            )
        return outputs[0]


def _part(model: ir.Model, cuts: _Cuts, stage: int) -> ir.Model:
    """Cuts a copy of the whole model down to what one stage needs."""
    graph = model.graph
    values = {value.name or "": value for node in graph for value in node.outputs}
    values |= {value.name or "": value for value in graph.inputs}
    dropped = [node for node in graph if node.name not in cuts.nodes[stage]]
    graph.outputs.clear()
    received = [_received(values[name], cuts.spec(name)) for name in cuts.reads[stage]]
    leaving = cuts.leaving(stage)
    graph.inputs.clear()
    graph.inputs.extend(received)
    graph.outputs.extend(values[name] for name in leaving)
    for name in leaving:
        _describe(values[name], cuts.spec(name))
    for node in reversed(dropped):
        graph.remove(node, safe=False)
    used = {id(value) for node in graph for value in _used(node)}
    for name, value in list(graph.initializers.items()):
        if id(value) not in used:
            del graph.initializers[name]
    return model


def _received(value: ir.Value, spec: TensorSpec) -> ir.Value:
    """Replaces a value that another stage makes by an input."""
    import onnx_ir as ir

    made = ir.Value(name=value.name, type=value.type)
    _describe(made, spec)
    value.name = f"{value.name}_elsewhere"
    ir.convenience.replace_all_uses_with(value, made)
    return made


def _describe(value: ir.Value, spec: TensorSpec) -> None:
    import onnx_ir as ir

    if spec.shape is not None:
        value.shape = ir.Shape(spec.shape)
    elif value.shape is None:  # its rank varies, and the output of a stage has to declare one
        value.shape = ir.Shape([None] * len(spec.example_shape or ()))
    if value.type is None:
        value.type = ir.TensorType(getattr(ir.DataType, _ONNX_TYPES.get(str(spec.dtype), _plain(spec))))


_ONNX_TYPES = {"torch.float32": "FLOAT", "torch.float64": "DOUBLE"}


def _plain(spec: TensorSpec) -> str:
    return dtype_name(spec.dtype).upper()


def _used(node: ir.Node) -> Iterable[ir.Value]:
    yield from (value for value in node.inputs if value is not None)
    for graph in subgraphs(node):
        yield from graph.outputs
        for child in graph:
            yield from _used(child)


def _batch_size(example: Mapping[str, Array]) -> int | None:
    sizes: Sequence[int] = [array.shape[0] for array in example.values() if np.ndim(array)]
    return sizes[0] if sizes else None
