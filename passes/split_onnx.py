"""The compiler for ONNX files on one screen: read, price, plan, cut, check."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, ParamSpec, Protocol, overload

from pd2bw_fx.arguments import with_known_options
from pd2bw_fx.cluster import Cluster
from pd2bw_fx.constraints import Constraints
from pd2bw_fx.costs import MemoryModel
from pd2bw_fx.errors import InputError
from pd2bw_fx.onnx_pipeline import PLANNED_AS, OnnxPipeline
from pd2bw_fx.onnx_session import Array
from pd2bw_fx.pipeline import Pipeline
from pd2bw_fx.plan import INFERENCE, Progress

from .coarsen import coarsen
from .export_onnx import export_parts
from .onnx_in import onnx_costs, read_onnx
from .partition import partition

P = ParamSpec("P")

# Inference keeps the weights once, and nothing for a backward.
_INFERENCE = MemoryModel(weight_versions=1, gradient_copies=0, optimizer_copies=0)


@with_known_options
def split_onnx(
    path: str | Path,
    folder: str | Path | None = None,
    *,
    examples: Sequence[Mapping[str, Array]] | None = None,
    cluster: Cluster | int | str | Path | None = None,
    num_stages: int | None = None,
    costs: Literal["analytic", "measured"] = "analytic",
    solver: str = "highs",
    max_gap: float = 1e-4,
    time_limit_s: float = 60.0,
    constraints: Constraints | None = None,
    progress: Callable[[Progress], None] | None = None,
    tolerance: float | None = None,
) -> OnnxPipeline:
    """Splits an ONNX file into stages for inference, and writes them to `folder` as ONNX files.

    Without a folder they are in a temporary one until `save`. The stages are run one after another on the
    examples, and must give what the whole file gives.

    - `examples`: inputs by name, one batch or two of different sizes. By default they are made up from the
      shapes that the file declares.
    - `costs`: "analytic", from arithmetic and bytes over the device's rates, or "measured" by onnxruntime's
      profiler.
    - Other arguments are those of `split`.

    Raises InputError for an impossible file or argument, InfeasibleError if no assignment fits in memory, and
    ExportError if a stage cannot be written or results differ. Then nothing is left behind.
    """
    chosen = Cluster.of(cluster)
    model = read_onnx(path, examples)
    priced = onnx_costs(model, device=chosen.devices[0], method=costs)
    planning_options: dict[str, Any] = {"memory_model": _INFERENCE, "constraints": constraints}
    plan = partition(
        coarsen(model.graph, priced, chosen),
        chosen,
        num_stages=num_stages,
        method=PLANNED_AS,
        solver=solver,
        max_gap=max_gap,
        time_limit_s=time_limit_s,
        progress=progress,
        **planning_options,
    )
    plan = replace(plan, method=INFERENCE)
    held = TemporaryDirectory(prefix="pd2bw_fx_") if folder is None else None
    written = Path(held.name if held is not None else str(folder))
    manifest = export_parts(model, plan, written, tolerance=tolerance)
    return OnnxPipeline(model.graph, priced, chosen, plan, written, manifest, planning_options, held)


class Split(Protocol[P]):
    """The type of `split`: a model gives a Pipeline, an ONNX file an OnnxPipeline."""

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Pipeline: ...

    @overload
    def __call__(
        self,
        model: str | PathLike[str],
        *,
        folder: str | Path | None = None,
        examples: Sequence[Mapping[str, Array]] | None = None,
        cluster: Cluster | int | str | Path | None = None,
        num_stages: int | None = None,
        costs: Literal["analytic", "measured"] = "analytic",
        solver: str = "highs",
        max_gap: float = 1e-4,
        time_limit_s: float = 60.0,
        constraints: Constraints | None = None,
        progress: Callable[[Progress], None] | None = None,
        tolerance: float | None = None,
    ) -> OnnxPipeline: ...


def takes_onnx_too(split: Callable[P, Pipeline]) -> Split[P]:
    """Returns a `split` that hands the path of an ONNX file to `split_onnx`.

    Raises InputError for an option that says nothing about an ONNX file.
    """
    known = [name for name in inspect.signature(split_onnx).parameters if name != "path"]

    @functools.wraps(split)
    def dispatched(*args: Any, **kwargs: Any) -> Any:
        model = args[0] if args else kwargs.get("model")
        if not isinstance(model, str | PathLike):
            return split(*args, **kwargs)
        if not str(model).endswith(".onnx"):
            raise InputError(
                f"model is {str(model)!r}; an nn.Module or a file that ends with .onnx was expected"
                f"{_reader_of(Path(model))}"
            )
        if len(args) > 1:
            raise InputError("an ONNX file is run on examples=[{name: array}]; example_args are for a module")
        given = {name: value for name, value in kwargs.items() if name != "model"}
        for name in given:
            if name not in known:
                raise InputError(
                    f"{name} says nothing about an ONNX file, which is split for inference; what does: "
                    f"{', '.join(known)}"
                )
        return split_onnx(Path(model), **given)

    return dispatched


def _reader_of(path: Path) -> str:
    """Returns what reads a file or folder that `split` does not, for an error."""
    if path.suffix == ".pt2":
        return "; torch.export.load(path) gives the program, which split takes"
    return "; pd2bw_fx.load(path) gives a saved pipeline" if path.is_dir() else ""
