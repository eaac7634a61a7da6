"""Split any PyTorch model into pipeline stages that can be read, and train them with PipeDream-2BW.

pipe = pd2bw_fx.split(model, example_args=(x,), cluster=2)
print(pipe)
pipe.train_local(batches, optimizer=lambda parameters: torch.optim.AdamW(parameters))
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pd2bw_fx.errors import (
    ClusterError,
    ExportError,
    InfeasibleError,
    InputError,
    Pd2bwError,
    PlanMismatchError,
    ScheduleError,
    SolverError,
    TraceError,
    VerificationError,
    WorkerError,
)

if TYPE_CHECKING:
    from pd2bw_fx.batch import Microbatches
    from pd2bw_fx.cluster import Cluster
    from pd2bw_fx.constraints import Constraints
    from pd2bw_fx.costs import MemoryModel
    from pd2bw_fx.device import Device
    from pd2bw_fx.metrics import Metrics
    from pd2bw_fx.onnx_pipeline import OnnxPipeline
    from pd2bw_fx.passes.export_onnx import merge_onnx
    from pd2bw_fx.passes.split import split
    from pd2bw_fx.passes.split_onnx import split_onnx
    from pd2bw_fx.passes.tune import tune
    from pd2bw_fx.pipeline import Pipeline, load
    from pd2bw_fx.plan import Plan
    from pd2bw_fx.runtime.engine import Engine
    from pd2bw_fx.untraced_call import untraced

__version__ = "0.1.0"

__all__ = [
    "Cluster",
    "ClusterError",
    "Constraints",
    "Device",
    "Engine",
    "ExportError",
    "InfeasibleError",
    "InputError",
    "MemoryModel",
    "Metrics",
    "Microbatches",
    "OnnxPipeline",
    "Pd2bwError",
    "Pipeline",
    "Plan",
    "PlanMismatchError",
    "ScheduleError",
    "SolverError",
    "TraceError",
    "VerificationError",
    "WorkerError",
    "load",
    "merge_onnx",
    "split",
    "split_onnx",
    "tune",
    "untraced",
]

# Imported on first use: the command line's help needs none of them, the planner no torch, and a process that
# trains a stage neither what traces nor what plans and draws.
_WHEN_ASKED_FOR = {
    "Cluster": "cluster",
    "Constraints": "constraints",
    "Device": "device",
    "Engine": "runtime.engine",
    "MemoryModel": "costs",
    "Metrics": "metrics",
    "Microbatches": "batch",
    "OnnxPipeline": "onnx_pipeline",
    "Pipeline": "pipeline",
    "Plan": "plan",
    "load": "pipeline",
    "merge_onnx": "passes.export_onnx",
    "split": "passes.split",
    "split_onnx": "passes.split_onnx",
    "tune": "passes.tune",
    "untraced": "untraced_call",
}
_MODULES = ("models", "optim", "passes", "runtime")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"pd2bw_fx.{name}")
    if name not in _WHEN_ASKED_FOR:
        raise AttributeError(f"module 'pd2bw_fx' has no attribute {name!r}")
    value = getattr(import_module(f"pd2bw_fx.{_WHEN_ASKED_FOR[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
