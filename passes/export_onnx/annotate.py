"""Says which node runs in which stage by the multi-device annotation of IR version 11.

model.configuration = [{name: "pipeline", num_devices: 2, device: ["cuda:0", "cuda:1"]}]
node.device_configurations = [{configuration_id: "pipeline", pipeline_stage: 1}]     on every node

Runtimes that do not know the annotation ignore it. Most tools that rewrite a model lose it, so it is added
last. Our own validator reads it back from the file, because the ONNX checker accepts negative stages and ids
of configurations that do not exist.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pd2bw_fx.errors import ExportError
from pd2bw_fx.onnx_model import subgraphs
from pd2bw_fx.onnx_session import require

from .origin import STAGE

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir

CONFIGURATION = "pipeline"

# The first that has the annotation. onnxruntime refuses what onnx writes when nothing is said, 14.
IR_VERSION = 11


def annotate(model: ir.Model, devices: Sequence[str]) -> None:
    """Assigns every node of a merged model to its stage; `devices` are the names of the stages' devices."""
    model.ir_version = max(IR_VERSION, model.ir_version)
    configuration = model.add_device_configuration(CONFIGURATION, device_names=devices)
    stages: dict[ir.Graph, int] = {}
    for node in model.graph.all_nodes():
        # A node of a subgraph runs where the node runs that holds it.
        outer = node.graph
        stage = int(node.metadata_props[STAGE]) if STAGE in node.metadata_props else stages[_held(outer)]
        node.set_pipeline_stage(configuration, stage)
        stages |= dict.fromkeys(subgraphs(node), stage)


def check_annotation(path: str | Path) -> int:
    """Returns the number of stages of an annotated file.

    Raises ExportError naming the first node without a stage, with a stage below zero or beyond the devices,
    with an id that no configuration has, or that reads a value of a later stage.
    """
    onnx_module = require("onnx")
    model = onnx_module.load(str(path), load_external_data=False)
    return check_annotated_model(model, Path(path).name)


def check_annotated_model(model: onnx.ModelProto, where: str) -> int:
    """Checks a model in memory as `check_annotation` does a file; errors call it `where`."""
    if model.ir_version < IR_VERSION:
        raise ExportError(
            f"{where} has IR version {model.ir_version}; annotations exist from {IR_VERSION} on"
        )
    num_devices = _configurations(model, where)
    made_in: dict[str, int] = {}
    for node, outer in _nodes(model.graph, None):
        stage = _stage(node, num_devices, where)
        if outer is not None and stage != outer:
            raise ExportError(
                f"{where}: node {node.name!r} is in stage {stage}, and the node whose subgraph it stands in "
                f"is in stage {outer}; a node runs in one stage with all that is inside"
            )
        for read in node.input:
            if made_in.get(read, 0) > stage:
                raise ExportError(
                    f"{where}: node {node.name!r} of stage {stage} reads {read!r}, which stage "
                    f"{made_in[read]} makes; values flow to later stages only"
                )
        made_in |= dict.fromkeys(node.output, stage)
    stages = {*made_in.values()}
    return max(stages, default=-1) + 1


def _configurations(model: onnx.ModelProto, where: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for configuration in model.configuration:
        name, count = configuration.name, configuration.num_devices
        if name in found:
            raise ExportError(f"{where} has two configurations named {name!r}; each needs a name of its own")
        if count < 1 or (configuration.device and len(configuration.device) != count):
            raise ExportError(
                f"{where}: configuration {name!r} says {count} devices and names {len(configuration.device)}"
            )
        found[name] = count
    if not found:
        raise ExportError(f"{where} has no device configuration; export it with form='annotated'")
    return found


def _stage(node: onnx.NodeProto, num_devices: dict[str, int], where: str) -> int:
    stages = set()
    for entry in node.device_configurations:
        if entry.configuration_id not in num_devices:
            raise ExportError(
                f"{where}: node {node.name!r} names the configuration {entry.configuration_id!r}, which the "
                f"model does not have; it has {', '.join(num_devices)}"
            )
        if not entry.HasField("pipeline_stage"):
            continue
        if not 0 <= entry.pipeline_stage < num_devices[entry.configuration_id]:
            raise ExportError(
                f"{where}: node {node.name!r} is in stage {entry.pipeline_stage}, and the configuration has "
                f"stages 0 to {num_devices[entry.configuration_id] - 1}"
            )
        stages.add(entry.pipeline_stage)
    if len(stages) != 1:
        found = "no stage" if not stages else f"the stages {', '.join(map(str, sorted(stages)))}"
        raise ExportError(f"{where}: node {node.name!r} has {found}; every node has exactly one")
    return int(stages.pop())


def _nodes(graph: onnx.GraphProto, outer: int | None) -> Iterator[tuple[onnx.NodeProto, int | None]]:
    """Yields every node with its stage. A node of a subgraph has the stage of the node that holds it."""
    for node in graph.node:
        yield node, outer
        inner = [a.g for a in node.attribute if a.HasField("g")]
        inner += [g for a in node.attribute for g in a.graphs]
        for subgraph in inner:
            stage = next((e.pipeline_stage for e in node.device_configurations), None)
            yield from _nodes(subgraph, stage)


def _held(graph: object) -> ir.Graph:
    import onnx_ir as ir

    assert isinstance(graph, ir.Graph), "a node of no graph has no stage"
    return graph
