"""A model cut into stages, exported as ONNX, and run beside its original."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from torch import Tensor, nn

from pd2bw_fx.cluster import Cluster
from pd2bw_fx.passes.coarsen import coarsen
from pd2bw_fx.passes.codegen import generate
from pd2bw_fx.passes.export_onnx import Original, export_onnx
from pd2bw_fx.passes.normalise import normalise
from pd2bw_fx.passes.partition import partition
from pd2bw_fx.passes.profile import profile
from pd2bw_fx.passes.trace import trace
from pd2bw_fx.program import tensors
from pd2bw_fx.stage import StageProgram, build_module


@dataclass(frozen=True)
class Cut:
    """A model and the stages that it was cut into."""

    model: nn.Module
    original: Original
    programs: tuple[StageProgram, ...]
    modules: list[nn.Module]
    example: dict[str, Tensor]

    def export(self, folder: Path, **options: Any) -> dict[str, Any]:
        return export_onnx(
            self.programs, self.modules, self.example, folder, original=self.original, **options
        )

    def eager(self, inputs: dict[str, Tensor], *, training: bool = False) -> dict[str, np.ndarray]:
        """Returns the outputs of the original model as its author wrote it."""
        assert self.original.forward is not None
        before = self.model.training
        self.model.train(training)
        with torch.no_grad():
            outputs = {name: value.numpy() for name, value in self.original.forward(inputs).items()}
        self.model.train(before)
        return outputs

    def batch(self, size: int) -> dict[str, Tensor]:
        """The example's samples over and over, in another order."""
        index = torch.arange(size, 0, -1)
        return {name: value[index % value.shape[0]] for name, value in self.example.items()}


def cut(model: nn.Module, args: Any, kwargs: Any, num_stages: int) -> Cut:
    cluster = Cluster.uniform(num_stages, memory_bytes="4 GiB")
    traced = trace(model, args, kwargs)
    graph = normalise(traced)
    costs = profile(graph, traced.examples, device=cluster.devices[0], method="analytic", whole=traced.call)
    plan = partition(coarsen(graph, costs, cluster), cluster, num_stages=num_stages)
    stages = tuple(generate(graph, plan))
    modules = [build_module(program, tensors(graph)) for program in stages]
    return Cut(model, Original(graph, plan, model, traced.call), stages, modules, dict(traced.examples))


def run(
    model: onnx.ModelProto | Path, inputs: dict[str, Tensor], outputs: list[str]
) -> dict[str, np.ndarray]:
    file = model.SerializeToString() if isinstance(model, onnx.ModelProto) else str(model)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    fed = {name: value.numpy() for name, value in inputs.items()}
    return dict(zip(outputs, session.run(outputs, fed), strict=True))
