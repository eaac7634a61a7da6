"""What one rank needs to know to do its part: its stage, its weights, and what it shares with others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from pd2bw_fx.batch import BatchLayout
from pd2bw_fx.errors import InputError
from pd2bw_fx.graph import ParameterSpec
from pd2bw_fx.passes.schedule import stage_actions, warm_up_forwards
from pd2bw_fx.plan import Plan
from pd2bw_fx.stage import StageProgram

if TYPE_CHECKING:
    from pd2bw_fx.pipeline import Pipeline


@dataclass(frozen=True, slots=True)
class Job:
    """One stage of a pipeline and how it is to be trained.

    `ranks[s]` is the rank of stage s: ranks follow the cluster's order of devices, and the plan says which
    device has which stage. `parameters` and `buffers` describe the whole model's tensors, `holders` names
    the stages of each parameter that several stages hold, `loss_stage` the one that computes the output
    called `loss`.
    """

    program: StageProgram
    tensors: Mapping[str, Tensor]
    layout: BatchLayout
    loss: str
    ranks: tuple[int, ...]
    device_name: str
    recompute: bool
    loss_stage: int
    parameters: tuple[ParameterSpec, ...]
    buffers: tuple[ParameterSpec, ...]
    holders: Mapping[str, tuple[int, ...]]
    method: str
    microbatches_per_update: int
    slack: float
    fingerprint: str  # of the operator graph

    @property
    def stage(self) -> int:
        return self.program.stage

    @property
    def rank(self) -> int:
        return self.ranks[self.stage]

    @property
    def num_stages(self) -> int:
        return len(self.ranks)

    @property
    def trainable(self) -> tuple[str, ...]:
        """This stage's parameters that are trained, in the stage's order."""
        wanted = {spec.name for spec in self.parameters if spec.trainable}
        return tuple(name for name in self.program.parameters if name in wanted)


def jobs(
    pipeline: Pipeline, *, method: str, microbatches_per_update: int, slack: float | Literal["auto"]
) -> tuple[Job, ...]:
    """The job of every rank, in the order of ranks.

    Raises InputError for a pipeline that has no loss or no batch layout, and for a method, a number of
    microbatches or a slack that does not go with the number of stages.
    """
    if slack == "auto":
        slack = chosen_slack(pipeline.plan, method, microbatches_per_update)
    check_method(method, pipeline.plan.num_stages, microbatches_per_update, slack)
    graph, programs = pipeline.graph, pipeline.programs
    if pipeline.batch_layout is None:
        raise InputError(
            "the pipeline was split without example inputs and does not know how a batch becomes the "
            "model's inputs; split the model with example_args"
        )
    if graph.loss is None:
        raise InputError(
            f"{graph.model_name} returns no loss; training needs one: split the model with loss_fn, or let "
            "its forward return the loss"
        )
    loss_stages = [p.stage for p in programs if any(port.model_output == graph.loss for port in p.outputs)]
    assert loss_stages, f"no stage returns the output {graph.loss!r}"
    devices = [stage.device for stage in pipeline.plan.stages]
    held = pipeline.tensors()
    made = [
        Job(
            program=program,
            tensors={name: held[name] for name in (*program.parameters, *program.buffers)},
            layout=pipeline.batch_layout,
            loss=graph.loss,
            ranks=tuple(sorted(devices).index(device) for device in devices),
            device_name=stage.device_name,
            recompute=stage.recompute,
            loss_stage=loss_stages[-1],
            parameters=tuple(graph.parameters.values()),
            buffers=tuple(graph.buffers.values()),
            holders=_holders(programs),
            method=method,
            microbatches_per_update=microbatches_per_update,
            slack=slack,
            fingerprint=pipeline.plan.fingerprint,
        )
        for program, stage in zip(programs, pipeline.plan.stages, strict=True)
    ]
    return tuple(sorted(made, key=lambda job: job.rank))


def chosen_slack(plan: Plan, method: str, microbatches_per_update: int) -> float:
    """The most slack of 1, 1/2 and 0 that two weight versions allow and every device's memory holds."""
    if method != "2bw":
        return 0.0
    return next(s for s in (1.0, 0.5, 0.0) if s == 0.0 or _holds(plan, microbatches_per_update, s))


def _holds(plan: Plan, microbatches_per_update: int, slack: float) -> bool:
    if warm_up_forwards(0, plan.num_stages, slack) > microbatches_per_update:
        return False
    for stage in plan.stages:
        in_flight = warm_up_forwards(stage.stage, plan.num_stages, slack) + 1
        more = max(0, in_flight - stage.microbatches_in_flight)
        kept_bytes = stage.memory.activation_bytes + stage.memory.transfer_bytes
        each_bytes = kept_bytes / max(1, stage.microbatches_in_flight)
        if stage.memory.total_bytes + more * each_bytes > stage.memory_limit_bytes:
            return False
    return True


def check_method(method: str, num_stages: int, microbatches_per_update: int, slack: float = 0.0) -> None:
    """Raises InputError for a method that cannot train so many stages with so many microbatches."""
    if method == "inference":
        raise InputError("method 'inference' does not train; expected 2bw, 1f1b or gpipe")
    stage_actions(
        method,
        num_stages,
        0,
        microbatches_per_update=microbatches_per_update,
        updates=range(1),
        drain=True,
        slack=slack,
    )


def _holders(programs: tuple[StageProgram, ...]) -> dict[str, tuple[int, ...]]:
    stages: dict[str, list[int]] = {}
    for program in programs:
        for name in program.parameters:
            stages.setdefault(name, []).append(program.stage)
    return {name: tuple(holders) for name, holders in stages.items() if len(holders) > 1}


def merged_tensors(job: Job, of_ranks: list[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """All ranks' tensors (by name in the graph) as the original model's state_dict."""
    held = {name: tensor for tensors in of_ranks for name, tensor in tensors.items()}
    return {
        name: held[spec.name]
        for spec in (*job.parameters, *job.buffers)
        if spec.persistent
        for name in (spec.name, *spec.tied_names)
    }
