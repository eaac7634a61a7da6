"""The compiler for ONNX files on one screen: read, price, plan, cut, check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from pd2bw_fx.cluster import Cluster
from pd2bw_fx.costs import MemoryModel
from pd2bw_fx.onnx_pipeline import OnnxPipeline
from pd2bw_fx.onnx_session import Array

from .coarsen import coarsen
from .export_onnx import export_parts
from .onnx_in import onnx_costs, read_onnx
from .partition import partition

# Inference keeps the weights once, and nothing for a backward.
_INFERENCE = MemoryModel(weight_versions=1, gradient_copies=0, optimizer_copies=0)


def split_onnx(
    path: str | Path,
    folder: str | Path,
    *,
    examples: Sequence[Mapping[str, Array]] | None = None,
    cluster: Cluster | int | str | Path | None = None,
    num_stages: int | None = None,
    costs: Literal["analytic", "measured"] = "analytic",
    solver: str = "highs",
    max_gap: float = 1e-4,
    time_limit_s: float = 60.0,
    tolerance: float | None = None,
) -> OnnxPipeline:
    """Split an ONNX file into stages for inference, and write them to `folder` as ONNX files.

    `examples`: inputs by name, one batch or two of different sizes; left out, they are made up from the
    shapes that the file declares. `costs`: arithmetic and bytes over the device's rates, or "measured" by
    onnxruntime's profiler. The stages are run one after another on the examples and must give what the
    whole file gives.

    Raises InputError for a file or arguments that cannot be, InfeasibleError if no assignment fits in
    memory, ExportError if a stage cannot be written or the results differ; then nothing is left behind.
    """
    chosen = Cluster.of(cluster)
    model = read_onnx(path, examples)
    priced = onnx_costs(model, device=chosen.devices[0], method=costs)
    plan = partition(
        coarsen(model.graph, priced, chosen),
        chosen,
        num_stages=num_stages,
        memory_model=_INFERENCE,
        method="1f1b",  # holds the fewest microbatches; without a backward they come and go as in inference
        solver=solver,
        max_gap=max_gap,
        time_limit_s=time_limit_s,
    )
    plan = replace(plan, method="inference", costs_origin=priced.origin)
    manifest = export_parts(model, plan, folder, tolerance=tolerance)
    return OnnxPipeline(model.graph, priced, chosen, plan, Path(folder), manifest)
