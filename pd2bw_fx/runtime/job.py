"""What one rank needs to know to do its part: its stages, their weights, and what it shares with others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from pd2bw_fx.actions import RunRequest, Shape
from pd2bw_fx.batch import BatchLayout
from pd2bw_fx.errors import InputError
from pd2bw_fx.graph import OperatorGraph, ParameterSpec, TensorSpec
from pd2bw_fx.passes.schedule import METHODS, Method, Placing, check_schedule, method_of, schedule_of
from pd2bw_fx.plan import Plan
from pd2bw_fx.source_check import uses_vary
from pd2bw_fx.stage import StageProgram
from pd2bw_fx.state import as_state_dict, require_scalar_loss, require_values

if TYPE_CHECKING:
    from pd2bw_fx.pipeline import Pipeline


_UPDATES_CHECKED = 3  # the pipeline fills, runs as it always does, and drains


@dataclass(frozen=True, slots=True)
class Work:
    """How a pipeline is to be trained: a method, and the shape that its schedule is built for."""

    method: str
    shape: Shape

    @property
    def rules(self) -> Method:
        return method_of(self.method)

    @property
    def num_ranks(self) -> int:
        return self.rules.num_ranks(self.shape)


@dataclass(frozen=True, slots=True)
class Planned:
    """The device that a rank was planned for: which of its kind it is on its host, and that host's ranks."""

    name: str
    kind: str
    index: int
    ranks_of_host: int


@dataclass(frozen=True, slots=True)
class Job:
    """One rank of a training run.

    `programs` are the stages of this rank. The schedule's ranks are numbered by stage; `ranks[r]` is the
    rank in the process group that does the part of the schedule's rank r: those of one rank a stage follow
    the cluster's order of devices, and the plan says which device has which stage. `parameters` and `buffers`
    describe the whole model's tensors, `holders` names the ranks of each parameter that several ranks hold,
    `loss_stage` is the one that computes the output called `loss`; `outputs` are what the model returns, by
    name in its order, and `numbers` those beside the loss that are one number, be it a whole one or a truth
    value, by the stage that has them.
    """

    rank: int
    programs: tuple[StageProgram, ...]
    tensors: Mapping[str, Tensor]
    layout: BatchLayout
    loss: str
    work: Work
    ranks: tuple[int, ...]
    device: Planned
    recomputed: frozenset[int]  # stages whose forward is run again before the backward
    loss_stage: int
    outputs: Mapping[str, TensorSpec]
    numbers: Mapping[int, tuple[str, ...]]
    parameters: tuple[ParameterSpec, ...]
    buffers: tuple[ParameterSpec, ...]
    holders: Mapping[str, tuple[int, ...]]
    uses_vary: bool  # which parameters an update has gradients for is not the same in all of them
    evaluation: str  # what the stages do otherwise than the model in evaluation mode
    training_writes: frozenset[str]  # what a forward writes in training alone
    written_parameters: frozenset[str]  # by forwards

    @property
    def stages(self) -> tuple[int, ...]:
        return tuple(program.stage for program in self.programs)

    @property
    def place(self) -> int:
        """This rank's number in the schedule."""
        return self.ranks.index(self.rank)

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    @property
    def method(self) -> str:
        return self.work.method

    @property
    def shape(self) -> Shape:
        return self.work.shape

    @property
    def microbatches_per_update(self) -> int:
        return self.work.shape.microbatches_per_update

    @property
    def trainable(self) -> frozenset[str]:
        return frozenset(spec.name for spec in self.parameters if spec.trainable)

    def rank_of(self, stage: int, microbatch: int) -> int:
        """Who runs a microbatch at a stage."""
        return self.ranks[self.work.rules.rank_of(self.shape, stage, microbatch)]

    def ranks_of(self, stage: int) -> tuple[int, ...]:
        return tuple(self.ranks[place] for place in self.work.rules.ranks_of(self.shape, stage))

    def linked_stages(self) -> list[tuple[int, int]]:
        """First and last of stages that make no version without each other's gradients: tied parameters."""
        linked: list[set[int]] = []
        for name in sorted(self.trainable & self.holders.keys()):
            holders = set(self.holders[name])
            stages = {s for s in range(self.shape.num_stages) if not holders.isdisjoint(self.ranks_of(s))}
            linked = [
                *(group for group in linked if group.isdisjoint(stages)),
                stages.union(*(group for group in linked if not group.isdisjoint(stages))),
            ]
        return [(min(group), max(group)) for group in linked if len(group) > 1]

    def inputs(self) -> tuple[str, ...]:
        """The model's inputs that this rank's stages read."""
        values = {port.value: None for p in self.programs for port in p.inputs if port.source is None}
        return tuple(values)

    def described(self, rank: int | None = None) -> str:
        """The stages of this rank, or of another."""
        place = self.ranks.index(self.rank if rank is None else rank)
        stages = self.work.rules.stages_of(self.shape, place)
        return f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"

    def name_of(self, rank: int) -> str:
        return f"rank {rank} ({self.described(rank)})"


def work_for(pipeline: Pipeline, request: RunRequest) -> Work:
    """What a pipeline, and what a user wants otherwise than it was planned, come to.

    Raises InputError for a method that does not train, and for numbers that do not go with the method;
    ScheduleError for a schedule that cannot be run.
    """
    name = pipeline.plan.method if request.method is None else request.method
    if name not in METHODS or not METHODS[name].trains:
        trained = ", ".join(known for known, rules in METHODS.items() if rules.trains)
        what = "does not train" if name in METHODS else "is unknown"
        raise InputError(f"method {name!r} {what}; expected one of {trained}")
    rules = method_of(name)
    if isinstance(request.replicas, int) and request.replicas < 1:
        raise InputError(f"replicas={request.replicas}; at least one process for each stage was expected")
    shape = pipeline.shape(replace(request, replicas=None) if request.replicas == 1 else request)
    _require_runnable(rules, shape)
    return Work(rules.name, shape)


def _require_runnable(rules: Method, shape: Shape) -> None:
    """Raises ScheduleError with the first action that cannot be; else ranks would wait for each other."""
    schedule = schedule_of(rules.name, shape, updates=range(_UPDATES_CHECKED), drain=True)
    held = [rules.in_flight(shape, stage) for stage in range(shape.num_stages)]
    check_schedule(schedule, in_flight=held)


def _require_steady_parameters(pipeline: Pipeline, work: Work) -> None:
    """Of several versions of a parameter a forward would write one, and the next is not made of that one. A
    forward that is run again would write it twice."""
    graph = pipeline.graph
    for operator in graph.operators.values():
        for name in operator.writes_buffers:
            if name not in graph.parameters or not graph.parameters[name].trainable:
                continue
            said = (
                f"operator {operator.name} ({operator.target}) writes the parameter {name!r} in its forward, "
                "as max_norm of an embedding does, and "
            )
            if not work.rules.is_synchronous:
                raise InputError(
                    f"{said}method {work.method!r} trains on more than one version of it; use a synchronous "
                    "method such as '1f1b', or do without"
                )
            again = [
                p.stage for p in pipeline.programs if name in p.parameters and _is_recomputed(pipeline, p)
            ]
            if again:
                raise InputError(
                    f"{said}stage {again[0]} is recomputed, which would write it twice; split with "
                    "recompute=False, or do without"
                )


def _is_recomputed(pipeline: Pipeline, program: StageProgram) -> bool:
    return pipeline.plan.stages[program.stage].recompute


def _require_gradients(graph: OperatorGraph) -> None:
    if not any(parameter.trainable for parameter in graph.parameters.values()):
        raise InputError(f"{graph.model_name} has no parameter that requires a gradient: nothing is trained")
    value = next(output.value for output in graph.outputs if output.name == graph.loss)
    if value in graph.operators and not graph.operators[value].requires_grad:
        raise InputError(
            f"no gradient flows from the loss of {graph.model_name} to its parameters; look for detach() or "
            "no_grad() on the way to it"
        )


def jobs(pipeline: Pipeline, work: Work) -> tuple[Job, ...]:
    """The job of every rank, in the order of ranks.

    Raises InputError for a pipeline that has no loss or no batch layout.
    """
    graph, programs = pipeline.graph, pipeline.programs
    if pipeline.batch_layout is None:
        raise InputError(
            "the pipeline was split without example inputs and does not know how a batch becomes the "
            "model's inputs; split the model with example_args"
        )
    require_scalar_loss(graph)
    if graph.loss is None:
        raise _without_loss(graph, programs)
    _require_gradients(graph)
    _require_steady_parameters(pipeline, work)
    loss_stages = [p.stage for p in programs if any(port.model_output == graph.loss for port in p.outputs)]
    assert loss_stages, f"no stage returns the output {graph.loss!r}"
    returned = {port.model_output: port for p in programs for port in p.outputs}
    written = {name for operator in graph.operators.values() for name in operator.writes_buffers}
    written_parameters = frozenset(written & graph.parameters.keys())
    held, report = pipeline.tensors(), pipeline.trace_report
    require_values(graph, held)
    ranks = _ranks(pipeline.plan, work)
    stages_of = [work.rules.stages_of(work.shape, place) for place in range(len(ranks))]
    planned = _planned_devices(pipeline, work)
    made = []
    for place, rank in enumerate(ranks):
        own = tuple(programs[stage] for stage in stages_of[place])
        made.append(
            Job(
                rank=rank,
                programs=own,
                tensors={name: held[name] for p in own for name in (*p.parameters, *p.buffers)},
                layout=pipeline.batch_layout,
                loss=graph.loss,
                work=work,
                ranks=ranks,
                device=planned[place],
                recomputed=frozenset(p.stage for p in own if _is_recomputed(pipeline, p)),
                loss_stage=loss_stages[-1],
                outputs={output.name: returned[output.name].spec for output in graph.outputs},
                numbers=_numbers(programs, graph.loss),
                parameters=tuple(graph.parameters.values()),
                buffers=tuple(graph.buffers.values()),
                holders=_holders(programs, stages_of, ranks),
                uses_vary=any(uses_vary(program.source) for program in programs),
                evaluation="" if report is None else report.evaluation,
                training_writes=frozenset() if report is None else frozenset(report.training_writes),
                written_parameters=written_parameters,
            )
        )
    return tuple(sorted(made, key=lambda job: job.rank))


def _without_loss(graph: OperatorGraph, programs: tuple[StageProgram, ...]) -> InputError:
    """Names what may have been meant: numbers that a gradient flows to."""
    returned = ", ".join(repr(output.name) for output in graph.outputs)
    scalars = [
        output.name
        for output in graph.outputs
        if output.value in graph.operators
        and graph.operators[output.value].requires_grad
        and any(port.value == output.value and port.spec.shape == () for p in programs for port in p.outputs)
    ]
    advice = "let its forward return the loss, alone or as {'loss': ..}"
    if scalars:
        advice += f" (is it {scalars[0]!r}? call that 'loss')"
    return InputError(
        f"{graph.model_name} returns no loss, but {returned}; training needs one: {advice}, or split the "
        "model with loss_fn"
    )


def _numbers(programs: tuple[StageProgram, ...], loss: str) -> dict[int, tuple[str, ...]]:
    found: dict[int, list[str]] = {}
    for program in programs:
        for port in program.outputs:
            is_number = port.spec.shape == () and not port.spec.dtype.is_complex
            if port.model_output not in (None, loss) and is_number:
                found.setdefault(program.stage, []).append(str(port.model_output))
    return {stage: tuple(names) for stage, names in found.items()}


def _ranks(plan: Plan, work: Work) -> tuple[int, ...]:
    """With one rank a device, ranks follow the devices; else they are the schedule's."""
    devices = [stage.device for stage in plan.stages]
    if work.num_ranks == len(devices) == len(set(devices)):
        return tuple(sorted(devices).index(device) for device in devices)
    return tuple(range(work.num_ranks))


def _planned_devices(pipeline: Pipeline, work: Work) -> list[Planned]:
    """By the schedule's rank. Copies of a stage that were not planned for are counted as if they had been."""
    devices = pipeline.cluster.devices
    numbers = [_planned_device(pipeline, work, place) for place in range(work.num_ranks)]
    chosen = [devices[number] for number in numbers]
    among = devices if len({*numbers}) == len(numbers) else chosen
    places = numbers if among is devices else range(len(chosen))
    hosts = [device.host for device in chosen]
    return [
        Planned(
            name=device.name,
            kind=device.kind,
            index=sum((other.kind, other.host) == (device.kind, device.host) for other in among[:place]),
            ranks_of_host=hosts.count(device.host),
        )
        for device, place in zip(chosen, places, strict=True)
    ]


def _planned_device(pipeline: Pipeline, work: Work, place: int) -> int:
    if work.rules.placing in (Placing.BOTH_WAYS, Placing.WHOLE):
        return place % len(pipeline.cluster)
    stage = pipeline.plan.stages[work.rules.stages_of(work.shape, place)[0]]
    copy = work.rules.ranks_of(work.shape, stage.stage).index(place) if stage.replicas > 1 else 0
    return stage.device + copy % stage.replicas


def _holders(
    programs: tuple[StageProgram, ...], stages_of: list[tuple[int, ...]], ranks: tuple[int, ...]
) -> dict[str, tuple[int, ...]]:
    found: dict[str, set[int]] = {}
    for place, rank in enumerate(ranks):
        for stage in stages_of[place]:
            for name in programs[stage].parameters:
                found.setdefault(name, set()).add(rank)
    return {name: tuple(sorted(holders)) for name, holders in found.items() if len(holders) > 1}


def merged_tensors(job: Job, of_ranks: list[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """All ranks' tensors (by name in the graph) as the original model's state_dict.

    What several ranks hold is taken from the first: replicas have the same weights, and running statistics
    of their own.
    """
    held = {name: tensor for tensors in reversed(of_ranks) for name, tensor in tensors.items()}
    return as_state_dict((*job.parameters, *job.buffers), held)
