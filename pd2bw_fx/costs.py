"""What every operator costs, and what a stage holds in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self, TypeAlias

from pd2bw_fx.arguments import make_plain, require_whole_number
from pd2bw_fx.units import counted

Work: TypeAlias = tuple[float, float]  # arithmetic operations, and bytes of memory traffic

GRADIENT_BUCKET_BYTES = 25 * 2**20  # of gradients that copies add up at a time; DistributedDataParallel's


def ring_bytes(num_bytes: float, num_ranks: int) -> float:
    """What each of r ranks sends so that all have the sum: 2 (r - 1) steps of an r-th in a ring."""
    return 2 * (num_ranks - 1) / num_ranks * num_bytes


@dataclass(frozen=True, slots=True)
class OperatorCost:
    """One operator at the costs' microbatch size on the costs' device.

    `saved_bytes` of all operators add up to what the whole model keeps: what several save is counted at the
    first. Of model inputs, and of what is computed of them alone, each stage has its own, so that those are
    told of every operator that saves them, in `saved_inputs`, the first one's too.
    Where its times are estimates, `forward_work` and `backward_work` are what they were made from.
    """

    forward_s: float
    backward_s: float
    output_bytes: int = 0
    saved_bytes: int = 0  # kept for the backward: storages, not views; parameters not counted
    workspace_bytes: int = 0  # its largest temporary
    forward_work: Work | None = None
    backward_work: Work | None = None
    saved_inputs: tuple[tuple[str, int], ...] = ()  # the value's name, and its bytes


@dataclass(frozen=True, slots=True)
class Costs:
    """The cost of every operator by name.

    `origin` says how they were come by: "measured", "analytic" (operations and bytes over the device's
    rates) or "parameters" (no shapes were known). `note` is what to tell the user about it, if anything.
    """

    operators: Mapping[str, OperatorCost]
    device: str
    microbatch_size: int | None
    origin: str
    note: str = ""

    def __repr__(self) -> str:
        return f"<Costs of {counted(len(self.operators), 'operator')} on {self.device}, {self.origin}>"

    @property
    def forward_s(self) -> float:
        return sum(cost.forward_s for cost in self.operators.values())

    @property
    def backward_s(self) -> float:
        return sum(cost.backward_s for cost in self.operators.values())

    def to_json(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "microbatch_size": self.microbatch_size,
            "origin": self.origin,
            "note": self.note,
            "operators": {name: list(asdict(cost).values()) for name, cost in self.operators.items()},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        return cls(
            operators={name: _cost(*fields) for name, fields in data["operators"].items()},
            device=data["device"],
            microbatch_size=data["microbatch_size"],
            origin=data["origin"],
            note=data["note"],
        )


def _cost(*fields: Any) -> OperatorCost:
    return OperatorCost(*map(_plain, fields))


def _plain(field: Any) -> Any:
    return tuple(map(_plain, field)) if isinstance(field, list) else field


@dataclass(frozen=True, slots=True)
class Calibration:
    """What a recorded run took beside the operators' profile (`passes.simulate.calibrate` finds it out).

    `forward` and `backward` are the run's seconds over the profile's. Where a backward runs in halves, the
    two take `halves` times the whole one, `weight_share` of it in that of the weights; None: no run had any.
    Where several ranks hold a stage, its backwards take `shared` times those of others: what they add up is
    copied together while they run.
    Seconds: an update for each byte of trainable weights; starting a send, and taking what has arrived, for
    each stage that it goes to or comes from; what lies between the actions of a rank, for each update; and an
    all-reduce for each byte that a rank sends in its ring (None: no run had one, the links' figures hold).
    """

    forward: float = 1.0
    backward: float = 1.0
    halves: float | None = None
    weight_share: float = 0.5
    shared: float = 1.0
    update_s_per_byte: float = 0.0
    send_s: float = 0.0
    receive_s: float = 0.0
    between_s: float = 0.0
    ring_s_per_byte: float | None = None


@dataclass(frozen=True, slots=True)
class Kept:
    """What a method keeps at one stage: weight versions, and microbatches between forward and backward.

    PipeDream-2BW (arXiv 2006.09503, section 3.1) keeps two versions at every stage, whatever the depth.
    `gradients_wait`: while so many microbatches are in flight, none of the update's gradients is there; the
    backward that makes the first ones ends with one microbatch less. So it is in GPipe, and wherever every
    microbatch is an update (`updates_each`), where no backward ever begins beside gradients.
    `correction_copies`: of the trainable weights, for what a method does about its delay.
    `flushes`: no microbatch is in flight while the optimizer steps; else one less than `in_flight` are.
    """

    weight_versions: int
    in_flight: int
    gradients_wait: bool = False
    updates_each: bool = False
    correction_copies: int = 0
    flushes: bool = False


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """Copies of each trainable parameter that a method and an optimizer keep on a stage's device.

    `weight_versions`: None for as many as the method keeps at each stage (`Kept`).
    `optimizer_copies`: 0 for SGD, 1 with momentum, 2 for Adam. The gradient is one copy. While a parameter is
    stepped, torch's optimizers hold temporaries of as much as they keep for it: Adam the root of its second
    moment and a quotient. (On CUDA they step all parameters at once by default, which takes another copy.)
    """

    weight_versions: int | None = None
    gradient_copies: int = 1
    optimizer_copies: int = 2

    def __post_init__(self) -> None:
        make_plain(self, "weight_versions", "gradient_copies", "optimizer_copies")
        if self.weight_versions is not None:
            require_whole_number("weight_versions", self.weight_versions)
        require_whole_number("gradient_copies", self.gradient_copies, least=0)
        require_whole_number("optimizer_copies", self.optimizer_copies, least=0)

    @property
    def step_copies(self) -> int:
        """Of the largest parameter of a stage, while it is stepped."""
        return self.optimizer_copies

    def versions(self, kept: Kept) -> int:
        """At a stage where the method keeps this."""
        return kept.weight_versions if self.weight_versions is None else self.weight_versions

    def weight_copies(self, kept: Kept) -> int:
        return self.versions(kept) + kept.correction_copies

    def copies(self, kept: Kept) -> int:
        return self.weight_copies(kept) + self.gradient_copies + self.optimizer_copies


@dataclass(frozen=True, slots=True)
class StageMemory:
    """What a stage's device holds at its worst moment, in bytes.

    Where gradients wait (`Kept`), they and one microbatch's activations are never held together, and the
    smaller of the two, `apart_bytes`, is not part of the total.
    """

    weight_bytes: int  # all versions and a correction's copies, frozen parameters and buffers among them
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int  # saved for the backward, all microbatches in flight
    transfer_bytes: int  # received and sent tensors, all microbatches in flight
    workspace_bytes: int  # the largest temporary, or what an optimizer step takes beyond a microbatch
    apart_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return (
            self.weight_bytes
            + self.gradient_bytes
            + self.optimizer_bytes
            + self.activation_bytes
            + self.transfer_bytes
            + self.workspace_bytes
            - self.apart_bytes
        )
