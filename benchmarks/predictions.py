"""Do the planned times and peak memory of stages come true on this machine?

    python benchmarks/predictions.py               # large enough models of every kind, two stages each
    python benchmarks/predictions.py gpt resnet    # small ones by name
    python benchmarks/predictions.py --device cuda --samples 32

Each model is split for two devices. In every round it is profiled again and its stages are run, forward and
backward with gradients added up, so that both see the machine in the same minute; the median over rounds of
predicted over measured counts. Memory is torch's own count of what its allocator gives out while a stage
trains as 2BW has it: two versions, AdamW, as many microbatches in flight as the schedule keeps. Links are not
measured here. On a CPU each stage has one thread, and what counts is the time that it had a core: what other
processes take of the wall clock is no stage's. Exits with 1 if the median error of time or of memory is more
than 5%.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from profiler import LARGE, MICROBATCH_SIZE
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from pd2bw_fx import Cluster, split
from pd2bw_fx.models import MODELS, build
from pd2bw_fx.passes.profile import clock_for, profile
from pd2bw_fx.passes.trace import trace
from pd2bw_fx.pipeline import Pipeline
from pd2bw_fx.stage import Port

TOLERANCE = 0.05
ROUNDS, REPEATS = 7, 5


@dataclass(slots=True)
class StageInputs:
    """What one microbatch brings to a stage: its arguments, and gradients of what later stages read."""

    module: nn.Module
    inputs: Sequence[Port]
    arguments: list[Tensor]
    gradients: dict[int, Tensor | None] = field(default_factory=dict)  # by position of the output

    def forward(self) -> list[tuple[GradientEdge, Tensor | None]]:
        """The edges that the backward begins at; the outputs themselves are sent away."""
        taken = [
            argument.clone().requires_grad_(port.source is not None and port.needs_gradient)
            for port, argument in zip(self.inputs, self.arguments, strict=True)
        ]
        results = _as_tuple(self.module(*taken))
        return [(get_gradient_edge(results[at]), gradient) for at, gradient in self.gradients.items()]


def _as_tuple(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def _backward(edges: list[tuple[GradientEdge, Tensor | None]], device: torch.device) -> None:
    received = [torch.ones((), device=device) if g is None else g.clone() for _, g in edges]
    torch.autograd.backward([edge for edge, _ in edges], received)


def stage_inputs(pipe: Pipeline) -> list[StageInputs]:
    """One microbatch through all stages and back."""
    assert pipe.example is not None
    values: dict[str, Tensor] = dict(pipe.example)
    found, outputs = [], []
    for stage in pipe.stages:
        program = stage.program
        arguments = [
            values[port.value].detach().requires_grad_(port.source is not None and port.needs_gradient)
            for port in program.inputs
        ]
        found.append(StageInputs(stage.module, program.inputs, arguments))
        outputs.append(_as_tuple(stage.module(*arguments)))
        values |= {port.value: made for port, made in zip(program.outputs, outputs[-1], strict=True)}
    gradients: dict[str, Tensor] = {}
    for stage, own, made in zip(reversed(pipe.stages), reversed(found), reversed(outputs), strict=True):
        for at, (port, tensor) in enumerate(zip(stage.program.outputs, made, strict=True)):
            if tensor.requires_grad and (port.value in gradients or tensor.dim() == 0):
                own.gradients[at] = gradients.get(port.value)
        roots = [made[at] for at in own.gradients]
        torch.autograd.backward(roots, list(own.gradients.values()))
        for port, argument in zip(own.inputs, own.arguments, strict=True):
            if argument.grad is not None:
                known = gradients.get(port.value)
                gradients[port.value] = argument.grad if known is None else known + argument.grad
        stage.module.zero_grad(set_to_none=True)
        own.arguments = [argument.detach() for argument in own.arguments]
    return found


def quartile(samples: Sequence[float]) -> float:
    return statistics.quantiles(samples, n=4)[0]


def measured_s(stages: Sequence[StageInputs], device: torch.device) -> list[float]:
    """Seconds of forward and backward of each stage, the stages in turns."""
    samples: list[list[float]] = [[] for _ in stages]
    clock_s = clock_for(device)

    def now_s() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return clock_s()

    for repeat in range(REPEATS + 1):
        for stage, own in zip(stages, samples, strict=True):
            began_s = now_s()
            _backward(stage.forward(), device)
            if repeat > 0:  # the first one makes the gradients that the others add to
                own.append(now_s() - began_s)
    for stage in stages:
        stage.module.zero_grad(set_to_none=True)
    return [quartile(own) for own in samples]


def peak_bytes(stage: StageInputs, device: torch.device, *, in_flight: int) -> int:
    """The most that the allocator had given out while the stage trained, with its tensors from before."""

    def train() -> None:
        parameters = [parameter for parameter in stage.module.parameters() if parameter.requires_grad]
        # The optimizer steps the other version, for microbatches in flight need theirs unchanged.
        others = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
        optimizer = torch.optim.AdamW(others)
        kept: deque[list[tuple[GradientEdge, Tensor | None]]] = deque()
        for _ in range(in_flight - 1):
            kept.append(stage.forward())
        for _update in range(3):
            for _microbatch in range(2 * in_flight):
                kept.append(stage.forward())
                _backward(kept.popleft(), device)
            for other, parameter in zip(others, parameters, strict=True):
                other.grad, parameter.grad = parameter.grad, None
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    held = {
        t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in stage.module.state_dict().values()
    }
    return sum(held.values()) + most_allocated(train, device)


def most_allocated(run: Callable[[], None], device: torch.device) -> int:
    """Beside what is there before."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    with torch_profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def compared(model: nn.Module, device: torch.device, samples: int) -> list[tuple[list[str], float, float]]:
    """A row for each stage, with the errors of time and memory."""
    inputs: tuple[Tensor, ...] = model.example_inputs(samples)  # type: ignore[operator]
    model, inputs = model.to(device), tuple(tensor.to(device) for tensor in inputs)
    cluster = Cluster.uniform(2, kind=device.type, memory_bytes="16 GiB")
    pipe = split(model, inputs, num_stages=2, cluster=cluster, check=False)
    whole = trace(model, inputs, {}).call
    assert pipe.example is not None
    stages = stage_inputs(pipe)
    pairs: list[list[tuple[float, float]]] = [[] for _ in stages]
    for _ in range(ROUNDS):
        costs = profile(
            pipe.graph, pipe.example, device=pipe.cluster.devices[0], method="measured", whole=whole
        ).operators
        for planned, own, seconds in zip(pipe.plan.stages, pairs, measured_s(stages, device), strict=True):
            predicted_s = sum(costs[name].forward_s + costs[name].backward_s for name in planned.operators)
            own.append((predicted_s, seconds))
    rows = []
    for planned, stage, own in zip(pipe.plan.stages, stages, pairs, strict=True):
        predicted_s, seconds = (quartile(column) for column in zip(*own, strict=True))
        time_error = predicted_s / seconds - 1
        predicted_bytes = planned.memory.total_bytes
        num_bytes = peak_bytes(stage, device, in_flight=planned.microbatches_in_flight)
        memory_error = predicted_bytes / num_bytes - 1
        row = [str(planned.stage), f"{predicted_s * 1e3:.2f}", f"{seconds * 1e3:.2f}", f"{time_error:+.1%}"]
        row += [f"{predicted_bytes / 2**20:.1f}", f"{num_bytes / 2**20:.1f}", f"{memory_error:+.1%}"]
        rows.append((row, abs(time_error), abs(memory_error)))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", choices=[*MODELS, []], help="small models; none: the large ones")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--samples", type=int, default=MICROBATCH_SIZE, help="of a microbatch")
    options = parser.parse_args()
    chosen, device = options.models, torch.device(options.device)
    torch.set_num_threads(1)
    table = Table(
        "model", "stage", "predicted ms", "measured ms", "error", "predicted MiB", "measured MiB", "error"
    )
    time_errors, memory_errors = [], []
    for name in chosen or LARGE:
        torch.manual_seed(0)
        model = build(name) if chosen else LARGE[name]()
        for row, time_error, memory_error in compared(model, device, options.samples):
            table.add_row(name, *row)
            time_errors.append(time_error)
            memory_errors.append(memory_error)
    console = Console()
    console.print(table)
    medians = statistics.median(time_errors), statistics.median(memory_errors)
    console.print(
        f"median error of time {medians[0]:.1%}, of memory {medians[1]:.1%} (allowed {TOLERANCE:.0%})"
    )
    return int(max(medians) > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
