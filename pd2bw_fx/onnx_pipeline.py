"""An ONNX file split into stages for inference: the plan, and the folder that holds the stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from pd2bw_fx.cluster import Cluster
from pd2bw_fx.costs import Costs
from pd2bw_fx.graph import OperatorGraph
from pd2bw_fx.onnx_session import Array
from pd2bw_fx.passes.export_onnx import merge_onnx, run_onnx, run_onnx_processes
from pd2bw_fx.plan import Plan
from pd2bw_fx.report.table import plan_table

if TYPE_CHECKING:
    import onnx


@dataclass(frozen=True, slots=True)
class OnnxPipeline:
    """Print it to see the plan. `folder` holds `stage_0.onnx` and so on and `manifest.json`."""

    graph: OperatorGraph
    costs: Costs
    cluster: Cluster
    plan: Plan
    folder: Path
    manifest: Mapping[str, Any]

    def run(self, inputs: Mapping[str, Tensor | Array]) -> dict[str, Array]:
        """The model's outputs by name, the stages one after another in this process."""
        return run_onnx(self.folder, inputs)

    def run_processes(
        self, inputs: Mapping[str, Tensor | Array], *, num_microbatches: int = 1
    ) -> dict[str, Array]:
        """The same from one process a stage, microbatches following one another."""
        return run_onnx_processes(self.folder, inputs, num_microbatches=num_microbatches)

    def merge(self, path: str | Path | None = None) -> onnx.ModelProto:
        """The stages put back into one model; with `path`, written there too."""
        return merge_onnx(self.folder, path)

    def __str__(self) -> str:
        return plan_table(self.graph, self.costs, self.plan)
