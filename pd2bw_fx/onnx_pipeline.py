"""An ONNX file split into stages for inference: the plan, and the folder that holds the stages."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from torch import Tensor

from pd2bw_fx.arguments import options_of, require_known_options
from pd2bw_fx.cluster import Cluster
from pd2bw_fx.costs import Costs
from pd2bw_fx.explanation import Explanation
from pd2bw_fx.files import whole_folder
from pd2bw_fx.graph import OperatorGraph
from pd2bw_fx.onnx_session import Array
from pd2bw_fx.passes.coarsen import coarsen
from pd2bw_fx.passes.export_onnx import merge_onnx, onnx_text, run_onnx, run_onnx_processes
from pd2bw_fx.passes.partition import explain
from pd2bw_fx.plan import Plan
from pd2bw_fx.report.notebook import pipeline_html
from pd2bw_fx.report.table import plan_table

if TYPE_CHECKING:
    import onnx


@dataclass(frozen=True, slots=True)
class OnnxPipeline:
    """The stages of an ONNX file; print it to see the plan.

    `folder` holds `stage_0.onnx` and so on, and `manifest.json`. Where no folder was named, it is a temporary
    one that is removed with this object; `save` keeps it.
    """

    graph: OperatorGraph
    costs: Costs
    cluster: Cluster
    plan: Plan
    folder: Path
    manifest: Mapping[str, Any]
    planning_options: Mapping[str, Any] = field(default_factory=dict, repr=False)  # what the planner was told
    _held: TemporaryDirectory[str] | None = field(default=None, repr=False, compare=False)

    def run(self, inputs: Mapping[str, Tensor | Array]) -> dict[str, Array]:
        """Returns the model's outputs by name; the stages run one after another in this process."""
        return run_onnx(self.folder, inputs)

    def run_processes(
        self, inputs: Mapping[str, Tensor | Array], *, num_microbatches: int = 1
    ) -> dict[str, Array]:
        """Returns the same from one process per stage, with microbatches in a pipeline."""
        return run_onnx_processes(self.folder, inputs, num_microbatches=num_microbatches)

    def merge(self, path: str | Path | None = None) -> onnx.ModelProto:
        """Returns the stages as one model; with `path`, it is written there too."""
        return merge_onnx(self.folder, path)

    def save(self, folder: str | Path) -> None:
        """Copies the stages and their manifest into a folder, which appears only when it is complete.

        Other files in it stay. Raises InputError if it is not a folder of ours, or was edited by hand.
        """
        with whole_folder(folder) as fresh:
            shutil.copytree(self.folder, fresh, dirs_exist_ok=True)

    def text(self, stage: int) -> str:
        """Returns a stage's file as text: its inputs, nodes and outputs, and weights by name and shape."""
        return onnx_text(self.folder / f"stage_{stage}.onnx")

    def explain(self, **options: Any) -> Explanation:
        """Explains the plan: each cut and the next best one, what binds, and what would help most.

        Options are those of `passes.partition.explain`. Raises InputError for another one.
        """
        require_known_options("explain", options, options_of(explain))
        problem = coarsen(self.graph, self.costs, self.cluster)
        planned = replace(self.plan, method=PLANNED_AS)
        return explain(planned, problem, self.cluster, **{**self.planning_options, **options})

    def __str__(self) -> str:
        return plan_table(self.graph, self.costs, self.plan)

    def _repr_html_(self) -> str:
        """Returns what a notebook shows: the plan, and each device's memory."""
        return pipeline_html(self.graph, self.costs, self.plan)


# Holds the fewest microbatches; without a backward they come and go as in inference.
PLANNED_AS = "1f1b"
