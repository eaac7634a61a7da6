"""A rank's job: its stages, their weights, and what it shares with other ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from pd2bw_fx.actions import RunRequest, Shape
from pd2bw_fx.batch import BatchLayout
from pd2bw_fx.errors import InputError
from pd2bw_fx.graph import OperatorGraph, ParameterSpec, TensorSpec
from pd2bw_fx.passes.schedule import METHODS, Method, Placing, check_method, method_of
from pd2bw_fx.plan import Plan
from pd2bw_fx.runtime.recompute import unread_statistics
from pd2bw_fx.source_check import uses_vary
from pd2bw_fx.stage import StageProgram
from pd2bw_fx.stage_errors import authors_lines
from pd2bw_fx.state import as_state_dict, require_scalar_loss, require_values

if TYPE_CHECKING:
    from pd2bw_fx.pipeline import Pipeline


@dataclass(frozen=True, slots=True)
class Work:
    """How a pipeline is trained: a method, and the shape that its schedule is built for."""

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
    """The device that a rank was planned for: its number among those of its kind on its host, and the number
    of ranks on that host."""

    name: str
    kind: str
    index: int
    ranks_of_host: int


@dataclass(frozen=True, slots=True)
class Job:
    """What one rank of a training run does, and what it knows of the others."""

    rank: int
    programs: tuple[StageProgram, ...]  # this rank's stages
    tensors: Mapping[str, Tensor]  # theirs, by name in the graph
    layout: BatchLayout
    loss: str  # the name of the output that is the loss
    work: Work
    # By the schedule's rank, the rank in the process group that does its part. The schedule numbers its ranks
    # by stage; with one rank a stage, ranks follow the cluster's order of devices, of which the plan says
    # which has which stage.
    ranks: tuple[int, ...]
    device: Planned
    recomputed: frozenset[int]  # stages whose forward is run again before the backward
    loss_stage: int  # the stage that computes the loss
    outputs: Mapping[str, TensorSpec]  # of the model, by name in its order
    of_batch: frozenset[str]  # the outputs that depend on an input with a dimension of the batch
    numbers: Mapping[int, tuple[str, ...]]  # by stage: outputs other than the loss that are one number
    # Of the whole model, as `buffers` are; one that no operator reads has no gradient and is not trained.
    parameters: tuple[ParameterSpec, ...]
    buffers: tuple[ParameterSpec, ...]
    holders: Mapping[str, tuple[int, ...]]  # the ranks of each parameter that several ranks hold
    uses_vary: bool  # whether updates differ in which parameters have a gradient
    evaluation: str  # how the stages differ from the model in evaluation mode; "" if they do not
    training_writes: frozenset[str]  # tensors that a forward writes in training only
    written_parameters: frozenset[str]  # parameters that a forward writes
    unread_statistics: frozenset[str]  # buffers that a forward writes and that nothing is computed from
    authors_lines: Mapping[str, str]  # the model's code, for errors in a stage (`stage_errors.py`)

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
        """Returns the rank that runs a microbatch of a stage."""
        return self.ranks[self.work.rules.rank_of(self.shape, stage, microbatch)]

    def ranks_of(self, stage: int) -> tuple[int, ...]:
        return tuple(self.ranks[place] for place in self.work.rules.ranks_of(self.shape, stage))

    def linked_stages(self) -> list[tuple[int, int]]:
        """Returns the first and last of each group of stages that are linked by tied parameters.

        They cannot make a version without each other's gradients.
        """
        linked: list[set[int]] = []
        for name in sorted(self.trainable & self.holders.keys()):
            holders = set(self.holders[name])
            stages = {s for s in range(self.shape.num_stages) if not holders.isdisjoint(self.ranks_of(s))}
            linked = [
                *(group for group in linked if group.isdisjoint(stages)),
                stages.union(*(group for group in linked if not group.isdisjoint(stages))),
            ]
        return [(min(group), max(group)) for group in linked if len(group) > 1]

    def asked_by(self, request: RunRequest) -> dict[str, str]:
        """Returns the job's method and microbatches in words, or what the request names in their place."""
        asked = {
            "method": request.method or self.method,
            "microbatches_per_update": request.microbatches_per_update or self.microbatches_per_update,
        }
        return {name: repr(value) for name, value in asked.items()}

    def inputs(self) -> tuple[str, ...]:
        """Returns the model's inputs that this rank's stages read."""
        values = {port.value: None for p in self.programs for port in p.inputs if port.source is None}
        return tuple(values)

    def described(self, rank: int | None = None) -> str:
        """Returns the stages of this rank, or of another one, in words."""
        place = self.ranks.index(self.rank if rank is None else rank)
        stages = self.work.rules.stages_of(self.shape, place)
        return f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"

    def name_of(self, rank: int) -> str:
        return f"rank {rank} ({self.described(rank)})"


def work_for(pipeline: Pipeline, request: RunRequest) -> Work:
    """Returns how a pipeline is trained: as it was planned, with what the request changes.

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
    check_method(name, shape)
    return Work(rules.name, shape)


def _require_steady_parameters(pipeline: Pipeline, work: Work) -> None:
    """Raises InputError where a forward writes a trainable parameter and that would go wrong.

    With several versions of the parameter, it would write a version from which the next one is not made. A
    forward that is recomputed would write it twice.
    """
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


def _require_frozen_as_split(graph: OperatorGraph) -> None:
    """Raises InputError where the model's parameters were frozen, or made trainable, after the split."""
    now = {} if graph.root is None else dict(graph.root.named_parameters())
    changed = [
        name
        for name, spec in graph.parameters.items()
        if name in now and now[name].requires_grad != spec.trainable
    ]
    if changed:
        how = "frozen" if graph.parameters[changed[0]].trainable else "made trainable"
        more = f" and {len(changed) - 1} more were" if len(changed) > 1 else " was"
        raise InputError(
            f"the parameter {changed[0]!r}{more} {how} after the split, which decides what is trained; set "
            "requires_grad before it: split the model again"
        )


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
    """Returns the job of every rank, in the order of ranks.

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
    _require_frozen_as_split(graph)
    _require_gradients(graph)
    _require_steady_parameters(pipeline, work)
    loss_stages = [p.stage for p in programs if any(port.model_output == graph.loss for port in p.outputs)]
    assert loss_stages, f"no stage returns the output {graph.loss!r}"
    returned = {port.model_output: port for p in programs for port in p.outputs}
    written = {name for operator in graph.operators.values() for name in operator.writes_buffers}
    written_parameters = frozenset(written & graph.parameters.keys())
    statistics, lines = unread_statistics(graph), authors_lines(graph)
    trained = graph.trained()
    parameters = tuple(replace(s, trainable=s.name in trained) for s in graph.parameters.values())
    held, report = pipeline.tensors(), pipeline.trace_report
    require_values(graph, held)
    from_batch = graph.computed_from([known.name for known in pipeline.batch_layout.inputs if known.batched])
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
                of_batch=frozenset(output.name for output in graph.outputs if output.value in from_batch),
                numbers=_numbers(programs, graph.loss),
                parameters=parameters,
                buffers=tuple(graph.buffers.values()),
                holders=_holders(programs, stages_of, ranks),
                uses_vary=any(uses_vary(program.source) for program in programs),
                evaluation="" if report is None else report.evaluation,
                training_writes=frozenset() if report is None else frozenset(report.training_writes),
                written_parameters=written_parameters,
                unread_statistics=statistics,
                authors_lines=lines,
            )
        )
    return tuple(sorted(made, key=lambda job: job.rank))


def _without_loss(graph: OperatorGraph, programs: tuple[StageProgram, ...]) -> InputError:
    """Returns an error that suggests outputs that may be the loss: numbers with a gradient."""
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
    """Returns `Job.ranks`: in the order of devices where each has one rank, else the schedule's order."""
    devices = [stage.device for stage in plan.stages]
    if work.num_ranks == len(devices) == len(set(devices)):
        return tuple(sorted(devices).index(device) for device in devices)
    return tuple(range(work.num_ranks))


def _planned_devices(pipeline: Pipeline, work: Work) -> list[Planned]:
    """Returns the device of each of the schedule's ranks, also of replicas that were not planned."""
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
    """Returns all ranks' tensors (by name in the graph) as the original model's state_dict.

    A tensor that several ranks hold is the first one's: replicas have equal weights, but running statistics
    of their own.
    """
    held = {name: tensor for tensors in reversed(of_ranks) for name, tensor in tensors.items()}
    return as_state_dict((*job.parameters, *job.buffers), held)
