"""Training methods compared on one model and one cluster: their time, memory and loss."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pd2bw_fx.actions import Kind
from pd2bw_fx.arguments import with_known_options
from pd2bw_fx.cluster import Cluster
from pd2bw_fx.errors import InfeasibleError, InputError, Pd2bwError
from pd2bw_fx.passes.schedule import METHODS, Placing, training_methods
from pd2bw_fx.passes.split import split
from pd2bw_fx.pipeline import Pipeline
from pd2bw_fx.runtime.nursery import kept_nursery
from pd2bw_fx.runtime.optimizing import ParameterOptions
from pd2bw_fx.stage import run_in_turn
from pd2bw_fx.timeline import Timeline

_UPDATES_SIMULATED = 8
_OF_TRACING = ("example_args", "example_kwargs", "loss_fn", "example_targets", "tracer")


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What a device holds at its worst moment, for all of its stages, and what it has."""

    device: str
    total_bytes: int
    limit_bytes: int


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one method.

    The first three are simulated, the first two of them in the steady state. The others are of real runs:
    `loss` is that of the trained weights on the last batch, `losses` are those of the first round's updates,
    `measured` the microbatches a second of each round. `delays`: by how many updates the weights of a
    forward or backward are behind, the least and the most.
    """

    method: str
    microbatches_per_s: float
    bubble: float
    timeline: Timeline
    memory: tuple[DeviceMemory, ...]
    versions: int
    delays: tuple[int, int]
    loss: float | None = None
    measured: tuple[float, ...] = ()
    not_trained: str | None = None  # why
    losses: tuple[float, ...] = ()

    @property
    def measured_per_s(self) -> float | None:
        """The median of the rounds."""
        return statistics.median(self.measured) if self.measured else None

    @property
    def fullest(self) -> DeviceMemory:
        return max(self.memory, key=lambda device: device.total_bytes / device.limit_bytes)

    def to_json(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "microbatches_per_s": self.microbatches_per_s,
            "bubble": self.bubble,
            "memory": {d.device: [d.total_bytes, d.limit_bytes] for d in self.memory},
            "versions": self.versions,
            "delays": list(self.delays),
            "loss": self.loss,
            "losses": list(self.losses),
            "measured_microbatches_per_s": self.measured_per_s,
            "measured_in_rounds": list(self.measured),
            "not_trained": self.not_trained,
        }


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A method that cannot be used here, and why. `fits`: memory is not the reason."""

    method: str
    reason: str
    fits: bool


@dataclass(frozen=True, slots=True)
class Training:
    """What each method is trained with, for as many updates as there are batches.

    In each of the `rounds` the methods take turns, each from the model's weights. One round says little of
    their speeds where the machine's own speed drifts.
    """

    batches: Callable[[Pipeline], Iterable[Any]]
    optimizer: Callable[[Any], Optimizer]
    parameter_options: Callable[[Pipeline], ParameterOptions | None] = lambda pipe: None
    rounds: int = 1


@with_known_options
def compare(
    model: nn.Module,
    cluster: Cluster,
    *,
    methods: Sequence[str] | None = None,
    microbatches_per_update: int | None = None,
    training: Training | None = None,
    on_run: Callable[[str], None] | None = None,
    **options: Any,
) -> Iterator[Figures | LeftOut]:
    """Yields the figures of one method after another, each planned with the same microbatches an update.

    `methods` are by default all that train, the user's registered ones among them. `microbatches_per_update`
    is by default twice the number of devices. With `training`, each is also trained with local processes,
    from the model's weights; the loss is that after the last round. `on_run(method)` is called after each
    method's turn in each round. `options` are those of `split`.
    """
    m = microbatches_per_update or 2 * len(cluster)
    rounds = 1 if training is None else training.rounds
    told = on_run or (lambda method: None)
    known: nn.Module | Pipeline = model
    contenders: list[_Contender] = []
    with kept_nursery():
        for name in training_methods() if methods is None else methods:
            try:
                own = {key: given for key, given in options.items() if _is_asked_of(name, key)}
                pipe = split(known, cluster=cluster, method=name, microbatches_per_update=m, **own)
                timeline = pipe.simulate(num_updates=_UPDATES_SIMULATED, slack="auto")
            except (InputError, InfeasibleError) as error:
                yield LeftOut(name, str(error), not isinstance(error, InfeasibleError))
                continue
            if known is model:
                # Traced and measured only once: measured again, the same operator would have another time.
                known = copy.copy(pipe)
                options = {name: given for name, given in options.items() if name not in _OF_TRACING}
                options["costs"] = pipe.costs
            contender = _Contender(name, pipe, timeline)
            contender.train(training)
            told(name)
            if rounds == 1:
                yield contender.figures()
            else:
                contenders.append(contender)
        for number in range(1, rounds):
            for contender in contenders:
                contender.train(training)
                told(contender.method)
                if number == rounds - 1:
                    yield contender.figures()


def _is_asked_of(method: str, option: str) -> bool:
    """Returns whether an option is for this method: data parallelism always has one stage."""
    return option != "num_stages" or METHODS[method].placing is not Placing.WHOLE


@dataclass(slots=True)
class _Contender:
    """A method with its own plan, and the results of its runs so far."""

    method: str
    pipe: Pipeline
    timeline: Timeline
    measured: list[float] = field(default_factory=list)
    loss: float | None = None
    not_trained: str | None = None
    losses: tuple[float, ...] = ()
    initial: Mapping[str, Tensor] = field(default_factory=dict)

    def train(self, training: Training | None) -> None:
        """Makes one more run, from the same weights as the first."""
        if training is None or self.not_trained is not None:
            return
        pipe = self.pipe
        if self.measured:
            pipe.load_state_dict(self.initial)
        else:
            self.initial = pipe.tensors()
        try:
            batches = list(training.batches(pipe))
            if not batches:
                raise InputError("the data gave no batch; something that gives an iterable was expected")
            result = pipe.train_local(
                batches,
                optimizer=training.optimizer,
                parameter_options=training.parameter_options(pipe),
            )
        except Pd2bwError as error:
            self.not_trained = str(error)
        else:
            if not self.measured:
                self.loss, self.losses = _loss_of(pipe, batches[-1]), result.losses
            self.measured.append(result.metrics.throughput)

    def figures(self) -> Figures:
        pipe, timeline = self.pipe, self.timeline
        return Figures(
            method=self.method,
            microbatches_per_s=timeline.throughput,
            bubble=timeline.steady_bubble,
            timeline=timeline,
            memory=tuple(_memory(pipe, timeline)),
            versions=pipe.schedule.weight_versions,
            delays=_delays(timeline),
            loss=self.loss,
            measured=tuple(self.measured),
            not_trained=self.not_trained,
            losses=self.losses,
        )


def _loss_of(pipe: Pipeline, batch: Any) -> float | None:
    """Returns the loss of the weights as they are now. None where the stages are not for evaluation.

    A run's own last loss is that of the weights that its forwards ran on, which are older with a method that
    delays gradients.
    """
    layout, m, loss = pipe.batch_layout, pipe.plan.microbatches_per_update, pipe.graph.loss
    assert layout is not None
    assert loss is not None
    if pipe.trace_report is not None and pipe.trace_report.evaluation:
        return None
    modules = [stage.module for stage in pipe.stages]
    for module in modules:
        module.eval()
    try:
        with torch.no_grad():
            pieces = layout.cut(layout.flatten(batch), m)
            losses = [float(run_in_turn(pipe.stages, piece, pipe.graph)[loss]) for piece in pieces]
    finally:
        for module in modules:
            module.train()
    return sum(losses) / len(losses)


def _memory(pipe: Pipeline, timeline: Timeline) -> Iterator[DeviceMemory]:
    """Yields what each rank holds over all of its stages: two with chimera, the whole model with ddp."""
    peaks, devices = pipe.peak_memory_bytes(timeline), pipe.cluster.devices
    used = list(dict.fromkeys(stage.device for stage in pipe.plan.stages))  # rank r is stage r's
    places = used if len(used) == len(peaks) else range(len(peaks))
    for place, peak_bytes in zip(places, peaks, strict=True):
        yield DeviceMemory(devices[place].name, peak_bytes, devices[place].memory_bytes)


def _delays(timeline: Timeline) -> tuple[int, int]:
    """Returns the delays in the last updates, since the first ones run on the initial weights."""
    m = timeline.microbatches_per_update
    last = max((event.microbatch // m for event in timeline.events), default=0)
    behind = [
        event.microbatch // m - event.version
        for event in timeline.events
        if event.kind in (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT)
        and event.microbatch // m > last // 2
    ]
    return min(behind, default=0), max(behind, default=0)
