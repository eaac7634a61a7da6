"""Runs the model that the stages were cut from, which the files are compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pd2bw_fx.attributes import keep_model
from pd2bw_fx.errors import ExportError
from pd2bw_fx.graph import OperatorGraph
from pd2bw_fx.onnx_session import first_line
from pd2bw_fx.plan import Plan
from pd2bw_fx.program import as_written, without_gradients

from .run import turn


@dataclass(frozen=True, slots=True)
class Original:
    """`forward` runs `model` on flat inputs and names its flat outputs.

    Without a model (a pipeline that was loaded from a folder) files are compared with the stages alone.
    """

    graph: OperatorGraph
    plan: Plan
    model: nn.Module | None = None
    forward: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] | None = None

    def run(
        self, inputs: Mapping[str, Tensor], weights: Mapping[str, Tensor], *, training: bool
    ) -> dict[str, Tensor] | None:
        """Returns the model's outputs by name under these weights, or None without a model.

        `weights` have their names in the graph. The model has its own weights and modes back afterwards.

        Raises ExportError if the model does not take these inputs in this mode.
        """
        if self.model is None or self.forward is None:
            return None
        with keep_model(self.model), as_written():
            live: dict[str, Tensor] = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
            with torch.no_grad():
                for name in live.keys() & weights.keys():
                    live[name].copy_(weights[name])
            turn(self.model, training=training)  # now, because LoRA merges weights at a change of mode
            try:
                beside = {name: weights[name] for name in weights.keys() - live.keys()}  # a loss_fn's
                outputs = without_gradients(self.forward, {**beside, **inputs})
            except Exception as error:  # anything that the model's code raises
                mode = "training" if training else "evaluation"
                raise ExportError(
                    f"{self.graph.model_name} fails in {mode} mode on the inputs that its stages are to be "
                    f"compared on: {first_line(error)}"
                ) from error
            return outputs
