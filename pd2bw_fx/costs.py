"""What every operator costs, and what a stage holds in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self, TypeAlias

from pd2bw_fx.arguments import made_with_known_options, make_plain, require_whole_number
from pd2bw_fx.units import counted

Work: TypeAlias = tuple[float, float]  # arithmetic operations, and bytes of memory traffic

GRADIENT_BUCKET_BYTES = 25 * 2**20  # of gradients in one all-reduce, as in DistributedDataParallel


def ring_bytes(num_bytes: float, num_ranks: int) -> float:
    """Returns the bytes that each of r ranks sends in a ring all-reduce: 2 (r - 1) steps of an r-th each."""
    return 2 * (num_ranks - 1) / num_ranks * num_bytes


def ring_s(num_bytes: float, num_ranks: int, *, step_s: float, bytes_per_s: float) -> float:
    """The seconds in which r ranks sum gradients in a ring: 2 (r - 1) steps of `step_s` besides the bytes.

    `step_s` is the latency of one step, once for each bucket that the gradients are sent in.
    """
    return 2 * (num_ranks - 1) * step_s + ring_bytes(num_bytes, num_ranks) / bytes_per_s


@dataclass(frozen=True, slots=True)
class OperatorCost:
    """The cost of one operator, at the costs' microbatch size on the costs' device.

    The `saved_bytes` of all operators add up to what the whole model saves: a tensor that several operators
    save counts at the first one. Model inputs, and values computed from them alone, exist on every stage that
    needs them; so `saved_inputs` of every operator that saves one names it, the first operator included.
    If the times are estimates, `forward_work` and `backward_work` are what they were computed from.
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

    `origin` says where they come from: "measured", "analytic" (operations and bytes over the device's rates)
    or "parameters" (no shapes were known). `note` is a remark for the user, if there is any.
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
    """How the times of recorded runs differ from the operators' profile (`passes.simulate.calibrate`)."""

    forward: float = 1.0  # a forward's seconds over the profile's
    backward: float = 1.0  # a whole backward's
    halves: float | None = None  # both halves of a split backward over the whole one; None: no run had any
    weight_share: float = 0.5  # of the two halves, the weights' share
    # Backwards of a stage that several ranks hold, over those of others: the gradients that the ranks add up
    # are copied into buckets meanwhile.
    shared: float = 1.0
    update_s_per_byte: float = 0.0  # of trainable weights
    send_s: float = 0.0  # to start a send, for each stage that it goes to
    receive_s: float = 0.0  # to take what has arrived, for each stage that it comes from
    between_s: float = 0.0  # between the actions of a rank, for each update
    # An all-reduce, for each byte that a rank sends in its ring; None: no run had one, the links' rates hold.
    ring_s_per_byte: float | None = None


@dataclass(frozen=True, slots=True)
class Kept:
    """What a method keeps at one stage: weight versions, and microbatches between forward and backward."""

    # Two for PipeDream-2BW at every stage, whatever the depth (arXiv 2006.09503, section 3.1).
    weight_versions: int
    in_flight: int
    # While `in_flight` microbatches are in flight, the update has no gradients yet: the backward that makes
    # the first ones ends with one microbatch less. This holds for GPipe, and with `updates_each`.
    gradients_wait: bool = False
    updates_each: bool = False  # every microbatch is an update: no backward begins while gradients are held
    correction_copies: int = 0  # of the trainable weights, to compensate for the method's delay
    flushes: bool = False  # nothing is in flight while the optimizer steps; else one less than `in_flight`


@made_with_known_options
@dataclass(frozen=True, slots=True)
class MemoryModel:
    """The copies of each trainable parameter that a method and an optimizer keep on a stage's device.

    `weight_versions` None is as many as the method keeps at each stage (`Kept`). `optimizer_copies` is 0 for
    SGD, 1 with momentum, 2 for Adam, and one more for an engine with `weight_average`. The gradient is one
    copy. While torch's optimizers step a parameter, their temporaries are as large as what they keep for it:
    for Adam, the root of the second moment and a quotient. (On CUDA they step all parameters at once by
    default, which takes another copy.)
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
        """Temporary copies of a stage's largest parameter, while the optimizer steps it."""
        return self.optimizer_copies

    def versions(self, kept: Kept) -> int:
        """Returns the weight versions at a stage where the method keeps `kept`."""
        return kept.weight_versions if self.weight_versions is None else self.weight_versions

    def weight_copies(self, kept: Kept) -> int:
        """Returns the weight versions at a stage, and the copies that a correction of the delay keeps."""
        return self.versions(kept) + kept.correction_copies

    def copies(self, kept: Kept) -> int:
        """Of each trainable parameter in all: weights, gradients and the optimizer's state."""
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
