"""A schedule is data: for each rank a plain list of actions, which the runtime executes, the simulator
times and the report draws.

    stage 0   F0 F1 B0 F2 B1 F3 B2 ..        2BW, two stages: one forward one backward, never flushed
    stage 1      F0 B0 F1 B1 F2 B2 F3 ..
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any, Literal, Self

from pd2bw_fx.arguments import make_plain, require_kind, require_whole_number
from pd2bw_fx.errors import InputError
from pd2bw_fx.units import counted

MOST_MICROBATCHES = 10_000  # in an update


class Kind(StrEnum):
    """The kinds of actions.

    A backward is whole (B), or comes in two halves: the gradients of the stage's inputs (I), after which they
    are sent, and some time later, before the update, those of its weights (W).
    """

    RECEIVE_ACTIVATION = "RF"
    FORWARD = "F"
    SEND_ACTIVATION = "SF"
    RECEIVE_GRADIENT = "RB"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"
    SEND_GRADIENT = "SB"
    UPDATE = "U"
    ALL_REDUCE = "AR"  # in timelines: waiting for the ranks that hold the same stage


@functools.cache  # asked for every action of a simulation
def prerequisites(kind: Kind, *, has_input: bool, has_gradient: bool, is_split: bool) -> tuple[Kind, ...]:
    """Returns what a rank must have done for a microbatch of a stage before an action of this kind.

    `has_input`: an earlier stage sends it activations. `has_gradient`: a later one sends it gradients.
    `is_split`: this microbatch's backward is done in two halves.
    """
    received = (Kind.RECEIVE_ACTIVATION,) if has_input else ()
    gradient = (Kind.RECEIVE_GRADIENT,) if has_gradient else ()
    match kind:
        case Kind.FORWARD:
            return received
        case Kind.SEND_ACTIVATION:
            return (Kind.FORWARD,)
        case Kind.BACKWARD | Kind.INPUT_GRADIENT:
            return (Kind.FORWARD, *gradient)
        case Kind.WEIGHT_GRADIENT:
            return (Kind.INPUT_GRADIENT,)
        case Kind.SEND_GRADIENT:
            return (Kind.INPUT_GRADIENT,) if is_split else (Kind.BACKWARD,)
        case _:
            return ()


@dataclass(frozen=True, slots=True)
class Action:
    """`microbatch` counts from the start of training and is -1 for an update.

    `version` is the weight version that a forward or backward runs on, or that an update makes:
    W(0) are the initial weights, W(t) those after t updates.
    """

    kind: Kind
    stage: int
    microbatch: int
    version: int

    def __str__(self) -> str:
        if self.kind in (Kind.UPDATE, Kind.ALL_REDUCE):
            return f"{self.kind}(stage {self.stage} -> W{self.version})"
        return f"{self.kind}{self.microbatch}(stage {self.stage}, W{self.version})"

    def described(self) -> str:
        """Returns the action in words: "in the forward of microbatch 3 at stage 1, on W0"."""
        if self.kind is Kind.UPDATE:
            return f"making W{self.version} of stage {self.stage}"
        words = _IN_WORDS[self.kind]
        return f"{words} microbatch {self.microbatch} at stage {self.stage}, on W{self.version}"


_IN_WORDS = {
    Kind.RECEIVE_ACTIVATION: "receiving the activations of",
    Kind.FORWARD: "in the forward of",
    Kind.SEND_ACTIVATION: "sending the activations of",
    Kind.RECEIVE_GRADIENT: "receiving the gradients of",
    Kind.BACKWARD: "in the backward of",
    Kind.INPUT_GRADIENT: "in the first half of the backward of",
    Kind.WEIGHT_GRADIENT: "in the second half of the backward of",
    Kind.SEND_GRADIENT: "sending the gradients of",
}


@dataclass(frozen=True, slots=True)
class Shape:
    """What a schedule is built for; each method refuses what it cannot use.

    `num_stages` is that of the model's cut (interleaved: `chunks` of them on each rank), and
    `microbatches_per_update` that of the whole update, over all replicas. `replicas` counts the ranks that
    run a stage, which take its microbatches in turn; None is one rank a stage.

    `orders` are lists for each stage that were found elsewhere, "F0 F1 I0 W0 ..", for methods that search
    (zb-auto). `base` is the method whose lists are used by a method that chooses among others (bapipe).
    """

    num_stages: int
    microbatches_per_update: int
    slack: float = 0.0  # 2bw, 1f1b: the warm-up is (d - 1 - s)(1 + slack) forwards
    replicas: tuple[int, ...] | None = None
    chunks: int = 1  # interleaved: stages of a rank
    vertical_sync: bool = False  # pipedream: every stage runs on a version that all of them have
    orders: tuple[str, ...] | None = None
    base: str | None = None

    def replicas_of(self, stage: int) -> int:
        return 1 if self.replicas is None else self.replicas[stage]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        lists = {key: tuple(data[key]) for key in ("replicas", "orders") if data.get(key) is not None}
        return cls(**{**data, **lists})


def require_microbatches(microbatches_per_update: Any) -> None:
    """Raises InputError for anything but a number of microbatches for which a schedule can be laid out."""
    require_whole_number("microbatches_per_update", microbatches_per_update)
    if microbatches_per_update > MOST_MICROBATCHES:
        raise InputError(
            f"microbatches_per_update is {microbatches_per_update}; at most {MOST_MICROBATCHES} are laid "
            "out, each with actions of its own: cut larger ones"
        )


@dataclass(frozen=True, slots=True)
class RunRequest:
    """How a plan is to be run; None is as it was planned. `replicas` is one for all stages, or one each."""

    method: str | None = None
    microbatches_per_update: int | None = None
    slack: float | Literal["auto"] = 0.0
    replicas: int | Sequence[int] | None = None
    vertical_sync: bool = False

    def __post_init__(self) -> None:
        make_plain(self, "microbatches_per_update", "slack", "replicas")
        if self.method is not None:
            require_kind("method", self.method, str, "the name of a method, such as '2bw',")


@dataclass(frozen=True, slots=True)
class Schedule:
    """The actions of updates `updates` (a range) for every rank, in the order in which a rank performs them.

    A training run is a sequence of such segments: pipelined methods leave backwards of one segment to the
    next, and the last one, with `drained` set, finishes them.
    """

    method: str
    num_stages: int
    microbatches_per_update: int
    updates: range
    ranks: tuple[tuple[Action, ...], ...]
    drained: bool
    weight_versions: int  # alive at one time, at the stage with the most
    shape: Shape | None = None  # what it was built for; None in a schedule written by hand

    def __repr__(self) -> str:
        parts = counted(len(self.updates), "update"), counted(self.microbatches_per_update, "microbatch")
        return f"<Schedule of {self.method}: {parts[0]} of {parts[1]} on {counted(len(self.ranks), 'rank')}>"

    def then(self, later: Schedule) -> Schedule:
        """Returns this segment and the one that follows it as one."""
        ranks = tuple((*mine, *theirs) for mine, theirs in zip(self.ranks, later.ranks, strict=True))
        updates = range(self.updates.start, max(self.updates.stop, later.updates.stop))
        return replace(self, ranks=ranks, updates=updates, drained=later.drained)

    def to_json(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "num_stages": self.num_stages,
            "microbatches_per_update": self.microbatches_per_update,
            "updates": [self.updates.start, self.updates.stop],
            "drained": self.drained,
            "weight_versions": self.weight_versions,
            "shape": None if self.shape is None else self.shape.to_json(),
            "ranks": [[_action_to_json(action) for action in rank] for rank in self.ranks],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        return cls(
            method=data["method"],
            num_stages=data["num_stages"],
            microbatches_per_update=data["microbatches_per_update"],
            updates=range(*data["updates"]),
            ranks=tuple(tuple(_action_from_json(a) for a in rank) for rank in data["ranks"]),
            drained=data["drained"],
            weight_versions=data["weight_versions"],
            shape=None if data.get("shape") is None else Shape.from_json(data["shape"]),
        )


def _action_to_json(action: Action) -> list[Any]:
    return [action.kind.value, action.stage, action.microbatch, action.version]


def _action_from_json(fields: Sequence[Any]) -> Action:
    kind, stage, microbatch, version = fields
    return Action(Kind(kind), stage, microbatch, version)
