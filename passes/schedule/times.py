"""The times of a microbatch at each stage, with the backward in halves."""

from __future__ import annotations

from dataclasses import dataclass

from pd2bw_fx.actions import Kind
from pd2bw_fx.plan import Plan, StagePlan

_KINDS = (Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of a microbatch at each stage and of a message, and the microbatches that a stage's memory
    holds.

    `in_flight` counts microbatches between their forward and their weight gradient.
    """

    forward_s: tuple[float, ...]
    input_gradient_s: tuple[float, ...]
    weight_gradient_s: tuple[float, ...]
    latency_s: float
    in_flight: tuple[int, ...]

    @classmethod
    def equal(cls, num_stages: int, *, in_flight: int | None = None) -> Times:
        """Returns F = I = W = 1 at every stage, and unless given the memory of 1F1B's first stage."""
        one = (1.0,) * num_stages
        return cls(one, one, one, 0.0, (in_flight or num_stages,) * num_stages)

    def of(self, stage: int, kind: Kind) -> float:
        position = _KINDS.index(kind)
        return (self.forward_s, self.input_gradient_s, self.weight_gradient_s)[position][stage]

    def work_s(self, stage: int) -> float:
        return sum(self.of(stage, kind) for kind in _KINDS)


def times_of(plan: Plan) -> Times:
    """Returns a plan's times: half of a backward is for the weights; messages take as long as the slowest."""
    links = [t.seconds / (2 if t.gradient_bytes else 1) for t in plan.transfers]
    return Times(
        forward_s=tuple(stage.forward_s for stage in plan.stages),
        input_gradient_s=tuple(
            stage.backward_s / 2 + (stage.forward_s if stage.recompute else 0.0) for stage in plan.stages
        ),
        weight_gradient_s=tuple(stage.backward_s / 2 for stage in plan.stages),
        latency_s=max(links, default=0.0),
        in_flight=tuple(min(_held(stage), 2 * plan.num_stages - 1) for stage in plan.stages),
    )


def _held(stage: StagePlan) -> int:
    """Returns how many microbatches the stage's memory holds between forward and weight gradient."""
    each_bytes = stage.bytes_per_microbatch
    free_bytes = stage.memory_limit_bytes - stage.memory.total_bytes
    return max(1, stage.microbatches_in_flight) + int(free_bytes / each_bytes) if each_bytes > 0 else 2**30
