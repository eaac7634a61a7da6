"""What a plan's devices hold with all of their stages; some methods have several stages on a device."""

from __future__ import annotations

from dataclasses import dataclass

from pd2bw_fx.passes.schedule import METHODS, Placing
from pd2bw_fx.plan import Plan, StagePlan


@dataclass(frozen=True, slots=True)
class Held:
    """What a device holds, at the worst moments of all its stages together."""

    place: str
    num_stages: int
    num_bytes: int
    limit_bytes: int

    @property
    def share(self) -> float:
        return self.num_bytes / self.limit_bytes


def held_by_devices(plan: Plan) -> tuple[Held, ...]:
    """Returns what each device of the plan holds; devices with copies of one stage are one entry."""
    stages_of: dict[int, list[StagePlan]] = {}
    for stage in plan.stages:
        stages_of.setdefault(stage.device, []).append(stage)
    if _placing(plan) is Placing.BOTH_WAYS:
        for stage, other in zip(plan.stages, reversed(plan.stages), strict=True):
            stages_of[stage.device].append(other)
    return tuple(
        Held(
            own[0].place,
            len(own),
            sum(stage.memory.total_bytes for stage in own),
            sum(stage.memory_limit_bytes for stage in own),  # each has its share of the device's
        )
        for own in stages_of.values()
    )


def fullest_device(plan: Plan) -> Held:
    return max(held_by_devices(plan), key=lambda held: held.share)


def is_on_every_device(plan: Plan) -> bool:
    """Returns whether each device has the whole model, so that the plan's times are those of one device."""
    return _placing(plan) is Placing.WHOLE


def _placing(plan: Plan) -> Placing:
    method = METHODS.get(plan.method)  # None for a user's method that is not registered here
    return Placing.ROW if method is None else method.placing
