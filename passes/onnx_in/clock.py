"""Measures the seconds of each node by onnxruntime's profiler, also of nodes that it decomposes."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from pd2bw_fx.onnx_model import OnnxModel
from pd2bw_fx.onnx_session import Array, open_session

if TYPE_CHECKING:
    import onnx_ir as ir

_RUNS = 5  # timed runs, after one to warm up


def measured_s(model: OnnxModel) -> dict[str, float]:
    """Returns seconds by node name: the median of five runs on the first example, not optimised."""
    import onnx_ir as ir

    inputs = dict(model.examples[0])
    with tempfile.TemporaryDirectory() as folder:
        path, run_as = Path(folder) / "whole.onnx", Path(folder) / "run_as.onnx"
        ir.save(model.ir.clone(), path, external_data="whole.onnx.data")
        spent = _profiled(path, inputs, run_as)
        if all(node.name in spent for node in model.ir.graph):
            return spent
        # An operator that has no kernel is run as the nodes of its definition, which have no names.
        owners = _name_parts(run_as, model.ir)
        seconds: dict[str, float] = defaultdict(float)
        for name, part_s in _profiled(run_as, inputs).items():
            seconds[owners.get(name, name)] += part_s
    return dict(seconds)


def _profiled(path: Path, inputs: Mapping[str, Array], run_as: Path | None = None) -> dict[str, float]:
    profile = path.with_suffix(".profile")
    session = open_session(
        path, "the model", num_threads=torch.get_num_threads(), optimise=False, profile=profile, run_as=run_as
    )
    for _ in range(1 + _RUNS):
        session.run(None, inputs)
    events: list[dict[str, Any]] = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    spent_us: dict[str, list[float]] = defaultdict(list)
    for event in events:
        # "name_kernel_time" is the node's own work. The node that has a subgraph takes its nodes' time too.
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            spent_us[event["name"].removesuffix("_kernel_time")].append(float(event["dur"]))
    return {name: median(spent[1:]) * 1e-6 for name, spent in spent_us.items() if len(spent) > 1}


def _name_parts(path: Path, whole: ir.Model) -> dict[str, str]:
    """Names each node of the decomposed file, and maps it to the node of the whole model that it belongs to.

    That is the node that makes the same value, or whose parts read it.
    """
    import onnx_ir as ir

    made_by = {value.name: node.name or "" for node in whole.graph for value in node.outputs}
    known = {node.name for node in whole.graph}
    model = ir.load(path)
    owners: dict[str, str] = {}
    for number, node in enumerate(reversed(list(model.graph))):
        if node.name in known:
            owners[node.name or ""] = node.name or ""
            continue
        node.name = f"part {number}"
        owner = next((made_by[value.name] for value in node.outputs if value.name in made_by), None)
        readers = [reader for value in node.outputs for reader in value.consumers()]
        owner = owner or next((owners[r.name] for r in readers if r.name in owners), None)
        if owner is not None:
            owners[node.name] = owner
    ir.save(model, path)
    return owners
