"""Merges the stages into one model.

stage 0:  x -> [A] -> hidden        merged:  x -> [A][B] -> logits
stage 1:       hidden -> [B] -> logits

A value that crosses a cut has the same name on both sides, so stages are joined by names. A tensor that
several stages hold (a tied parameter, a mask) is kept once. Other values of the same name are renamed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pd2bw_fx.errors import ExportError
from pd2bw_fx.files import writing
from pd2bw_fx.names import free_name
from pd2bw_fx.onnx_model import subgraphs
from pd2bw_fx.onnx_session import first_line, require

from .origin import STAGE
from .run import onnx_manifest

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir

# One protobuf holds 2 GiB.
EXTERNAL_ABOVE_BYTES = 1_500_000_000


def merge_onnx(folder: str | Path, path: str | Path | None = None) -> onnx.ModelProto:
    """Returns one model that computes what the stages of an exported folder compute one after another.

    The result holds its weights in memory. With `path` it is written there too, with parameters of more than
    1.5 GB in a file beside it.
    Raises PlanMismatchError for a folder that is not whole, ExportError if the result is no valid model,
    InputError where it cannot be written.
    """
    for needed in ("onnx", "onnx_ir", "onnxruntime"):
        require(needed)
    import onnx_ir as ir

    folder = Path(folder)
    manifest = onnx_manifest(folder)
    if not manifest["stages"]:
        raise ExportError(f"{folder} holds no stages, only one annotated model; export with form='stages'")
    model = merged(manifest, {e["stage"]: ir.load(folder / e["file"]) for e in manifest["stages"]})
    if path is not None:
        with writing(path):
            save(model, Path(path), external_above_bytes=EXTERNAL_ABOVE_BYTES)
    ir.external_data.load_to_model(model)
    return ir.to_proto(model)


def merged(manifest: Mapping[str, Any], stages: Mapping[int, ir.Model]) -> ir.Model:
    """Moves the nodes of the stages' models into one. Every node notes its stage (STAGE)."""
    import onnx_ir as ir

    values: dict[str, ir.Value] = {}  # by their names in the files: what crosses, comes in and goes out
    held = _Initializers()
    promised = {entry["tensor"] for entry in _ports(manifest)}
    taken = {*promised}
    nodes: list[ir.Node] = []
    for entry in manifest["stages"]:
        graph = stages[entry["stage"]].graph
        _receive(graph, values)
        given = {value.name or "": value for value in graph.outputs}
        own = {id(value) for value in graph.outputs}
        for name, value in list(graph.initializers.items()):
            kept = held.add(value, entry["stage"], taken, is_promised=id(value) in own)
            given |= {name: kept} if id(value) in own else {}
        values |= given
        nodes += _taken_out(graph, entry["stage"], own, taken)
    inputs = [values[entry["tensor"]] for entry in manifest["inputs"]]
    outputs = _outputs(manifest, values, inputs, nodes, taken)
    graph = ir.Graph(
        inputs,
        outputs,
        nodes=nodes,
        initializers=held.values(),
        opset_imports=_opsets(stages.values()),
        name=str(manifest.get("model", "model")),
    )
    return _model_of(graph, list(stages.values()))


def _taken_out(graph: ir.Graph, stage: int, own: set[int], taken: set[str]) -> list[ir.Node]:
    """Empties a stage's graph, and returns its nodes, named apart from others and with their stage noted."""
    nodes = list(graph)
    graph.outputs.clear()
    graph.initializers.clear()
    graph.remove(nodes)
    for node in nodes:
        _rename(node, stage, own, taken)
        node.metadata_props[STAGE] = str(stage)
    return nodes


def _model_of(graph: ir.Graph, stages: Sequence[ir.Model]) -> ir.Model:
    """Returns the graph as a model with the stages' functions, and what they all say of the whole."""
    import onnx_ir as ir

    first = stages[0]
    functions = {key: function for model in stages for key, function in model.functions.items()}
    model = ir.Model(
        graph,
        ir_version=first.ir_version,
        producer_name="pd2bw_fx",
        domain=first.domain,
        model_version=first.model_version,
        doc_string=first.doc_string,
        functions=list(functions.values()),
    )
    notes = [stage.metadata_props for stage in stages]  # of the whole, where all have them alike
    model.metadata_props.update(
        {k: v for k, v in first.metadata_props.items() if all(n.get(k) == v for n in notes)}
    )
    return model


def save(model: ir.Model, path: Path, *, external_above_bytes: int) -> str | None:
    """Writes and checks the model, and returns the name of the file beside it with parameters, or None."""
    import onnx
    import onnx_ir as ir

    num_bytes = sum(
        v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value is not None
    )
    external = f"{path.name}.data" if num_bytes > external_above_bytes else None
    if external is None:
        ir.external_data.load_to_model(model)  # weights that stand in a file beside the one it came from
    ir.save(model, path, external_data=external)
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except Exception as error:  # the checker's and the shape inference's errors have no common class
        raise ExportError(
            f"{path.name} fails the ONNX checker: {first_line(error)}; try another opset, or where types do "
            "not fit, a model that has one throughout, without autocast"
        ) from error
    return external


class _Initializers:
    """The initializers of all stages, one for each name and content."""

    def __init__(self) -> None:
        self._kept: dict[str, ir.Value] = {}

    def values(self) -> list[ir.Value]:
        return list(self._kept.values())

    def add(self, value: ir.Value, stage: int, taken: set[str], *, is_promised: bool) -> ir.Value:
        """Returns the initializer that is kept. One that a stage gives out keeps its name."""
        import onnx_ir as ir

        name = value.name or ""
        twin = self._kept.get(name)
        if twin is not None and _is_equal(twin, value):
            ir.convenience.replace_all_uses_with(value, twin)
            return twin
        if name in taken and not is_promised:
            value.name = free_name(f"{name}_stage_{stage}", taken)
        taken.add(value.name or "")
        self._kept[value.name or ""] = value
        return value


def _is_equal(a: ir.Value, b: ir.Value) -> bool:
    x, y = a.const_value, b.const_value
    assert x is not None, f"{a.name} is an initialiser without a value"
    assert y is not None, f"{b.name} is an initialiser without a value"
    return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()


def _receive(graph: ir.Graph, values: dict[str, ir.Value]) -> None:
    """Connects the inputs of a stage to values of earlier stages, or makes them inputs of the model."""
    import onnx_ir as ir

    received = list(graph.inputs)
    graph.inputs.clear()
    for value in received:
        name = value.name or ""
        if name in values:
            ir.convenience.replace_all_uses_with(value, values[name])
        else:
            values[name] = value


def _rename(node: ir.Node, stage: int, own: set[int], taken: set[str]) -> None:
    """Makes the names of nodes and of inner values unique in the whole.

    In subgraphs only values that would hide one of the whole are renamed.

    """
    node.name = f"stage_{stage}/{node.name}"
    for value in node.outputs:
        if id(value) in own or not value.name:
            continue
        if value.name in taken:
            value.name = free_name(f"{value.name}_stage_{stage}", taken)
        taken.add(value.name or "")
    for inner in subgraphs(node):
        for value in inner.inputs:
            if value.name in taken:
                value.name = free_name(f"{value.name}_stage_{stage}", taken)
            taken.add(value.name or "")
        for child in inner:
            _rename(child, stage, own, taken)


def _outputs(
    manifest: Mapping[str, Any],
    values: Mapping[str, ir.Value],
    inputs: Sequence[ir.Value],
    nodes: list[ir.Node],
    taken: set[str],
) -> list[ir.Value]:
    """Makes one value for each output, under the output's own name unless another value has it.

    An input that is returned as it is, or a value that is returned twice, goes through an Identity.
    """
    import onnx_ir as ir

    outputs: list[ir.Value] = []
    for entry in manifest["outputs"]:
        value = values[entry["tensor"]]
        if any(value is other for other in (*outputs, *inputs)):
            copy = ir.Node("", "Identity", [value], name=f"stage_{entry['stage']}/return_{entry['name']}")
            copy.metadata_props[STAGE] = str(entry["stage"])
            made = copy.outputs[0]
            made.name, made.shape, made.type = (
                f"{value.name}_returned_{len(outputs)}",
                value.shape,
                value.type,
            )
            nodes.append(copy)
            value = made
        if entry["name"] not in taken:
            value.name = entry["name"]
            taken.add(entry["name"])
        outputs.append(value)
    return outputs


def _opsets(models: Any) -> dict[str, int]:
    versions: dict[str, int] = {}
    for model in models:
        for domain, version in model.graph.opset_imports.items():
            if versions.setdefault(domain, version) != version:
                raise ExportError(
                    f"one stage uses version {versions[domain]} of the operators {domain or 'ai.onnx'!r}, "
                    f"another {version}; export all stages with one opset"
                )
    return versions


def _ports(manifest: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    inner = [port for entry in manifest["stages"] for port in (*entry["inputs"], *entry["outputs"])]
    return [*manifest["inputs"], *manifest["outputs"], *inner]
