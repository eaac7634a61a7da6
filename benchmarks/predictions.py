"""Do the planned times of stages come true on this machine?

    python benchmarks/predictions.py               # large enough models of every kind, two stages each
    python benchmarks/predictions.py gpt resnet    # small ones by name

Each model is profiled and split for two devices; its stages then run here one after another, forward
and backward, and the median over repetitions is held against the plan's forward_s + backward_s. Links are not
measured here. Exits with 1 if the median error over all stages is more than 5%.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence

import torch
from profiler import LARGE, MICROBATCH_SIZE
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from pd2bw_fx import split
from pd2bw_fx.models import MODELS, build
from pd2bw_fx.pipeline import Pipeline

TOLERANCE = 0.05
REPEATS = 15


def measured_s(pipe: Pipeline) -> list[float]:
    """Seconds of forward and backward of each stage, the median over repetitions."""
    assert pipe.example is not None
    samples: list[list[float]] = [[] for _ in pipe.stages]
    for repeat in range(REPEATS + 2):
        for stage, seconds in enumerate(_run_once(pipe)):
            if repeat >= 2:  # the first ones meet cold allocators
                samples[stage].append(seconds)
    return [statistics.median(times) for times in samples]


def _run_once(pipe: Pipeline) -> list[float]:
    assert pipe.example is not None
    values: dict[str, Tensor] = dict(pipe.example)
    seconds = [0.0] * len(pipe.stages)
    inputs: list[Sequence[Tensor]] = []
    outputs: list[dict[str, Tensor]] = []
    for at, stage in enumerate(pipe.stages):
        taken = [
            values[port.value].detach().requires_grad_(port.source is not None and port.needs_gradient)
            for port in stage.program.inputs
        ]
        began = time.perf_counter()
        result = stage.module(*taken)
        seconds[at] += time.perf_counter() - began
        results = result if isinstance(result, tuple) else (result,)
        made = {port.value: made for port, made in zip(stage.program.outputs, results, strict=True)}
        values |= made
        inputs.append(taken)
        outputs.append(made)
    gradients: dict[str, Tensor] = {}
    for at in reversed(range(len(pipe.stages))):
        stage = pipe.stages[at]
        wanted = [
            (tensor, gradients.get(name))
            for name, tensor in outputs[at].items()
            if tensor.requires_grad and (name in gradients or tensor.dim() == 0)
        ]
        began = time.perf_counter()
        torch.autograd.backward([tensor for tensor, _ in wanted], [seed for _, seed in wanted])
        seconds[at] += time.perf_counter() - began
        for port, tensor in zip(stage.program.inputs, inputs[at], strict=True):
            if tensor.grad is not None:
                known = gradients.get(port.value)
                gradients[port.value] = tensor.grad if known is None else known + tensor.grad
        stage.module.zero_grad(set_to_none=True)
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", choices=[*MODELS, []], help="small models; none: the large ones")
    chosen = parser.parse_args().models
    table = Table("model", "stage", "predicted ms", "measured ms", "error")
    errors = []
    for name in chosen or LARGE:
        model: nn.Module = build(name) if chosen else LARGE[name]()
        pipe = split(model, model.example_inputs(MICROBATCH_SIZE), num_stages=2, cluster=2, check=False)  # type: ignore[operator]
        for planned, seconds in zip(pipe.plan.stages, measured_s(pipe), strict=True):
            predicted_s = planned.forward_s + planned.backward_s
            error = predicted_s / seconds - 1
            errors.append(abs(error))
            row = [f"{predicted_s * 1e3:.2f}", f"{seconds * 1e3:.2f}", f"{error:+.1%}"]
            table.add_row(name, str(planned.stage), *row)
    console = Console()
    console.print(table)
    median = statistics.median(errors)
    console.print(f"median error {median:.1%} (allowed {TOLERANCE:.0%})")
    return int(median > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
