"""Makes the shape of a schedule for a plan: what a method needs to know of the plan's stages and devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from pd2bw_fx.actions import Shape
from pd2bw_fx.costs import Kept
from pd2bw_fx.errors import InputError
from pd2bw_fx.plan import Plan

from .flushed import warm_up_forwards
from .method import Placing
from .methods import method_of
from .times import times_of


def shape_of(
    plan: Plan,
    method: str,
    *,
    microbatches_per_update: int,
    slack: float | Literal["auto"] = 0.0,
    replicas: tuple[int, ...] | None = None,
    vertical_sync: bool = False,
) -> Shape:
    """Returns the shape of the method's schedule on this plan, which all ranks have to be given alike.

    It has the plan's replicas if the plan was made for this method. zb-auto searches for its order, by the
    plan's times and memory. For 2bw, `slack="auto"` takes as much slack, up to 1, as two weight versions and
    the devices' memory allow; for other methods it takes none. The base of bapipe is 1f1b.

    Raises InputError for a plan whose stages are not on devices as the method places them, and as
    `Method.check` does.
    """
    chosen = method_of(method)
    chunks = plan.num_stages // len({stage.device for stage in plan.stages})
    goes_round = chosen.placing is Placing.ROUND
    if chunks > 1 and chosen.trains and not goes_round:
        raise InputError(
            f"the plan has {chunks} stages on a device, which only interleaved runs, not {method}; split the "
            f"model for it: split(.., method={method!r})"
        )
    if goes_round and chunks == 1:
        raise InputError(
            f"the plan has one stage on each device, and {method} runs several; split the model for it: "
            f"split(.., method={method!r}, chunks=2)"
        )
    if replicas is None and method == plan.method:
        replicas = plan.replicas
    shape = Shape(
        plan.num_stages,
        microbatches_per_update,
        0.0 if slack == "auto" else slack,
        replicas,
        chunks if goes_round else 1,
        vertical_sync,
    )
    shape = chosen.prepared_for(shape, times_of(plan))
    chosen.check(shape)
    if slack == "auto" and chosen.fills_slack:
        shape = replace(shape, slack=_most_slack(plan, shape))
    return shape


def _most_slack(plan: Plan, shape: Shape) -> float:
    """Returns the most slack that fits, in steps of one more forward at the start of stage 0.

    It is 1/3 for 4 microbatches an update on 4 stages.
    """
    each, least = shape.microbatches_per_update // shape.replicas_of(0), shape.num_stages - 1
    more = (more for more in range(min(least, each - least), 0, -1) if _fits(plan, more / least))
    return next(more, 0) / max(1, least)


def _fits(plan: Plan, slack: float) -> bool:
    """Returns whether every stage's device has room for the microbatches that the slack adds."""
    for stage in plan.stages:
        in_flight = warm_up_forwards(stage.stage, plan.num_stages, slack) + 1
        added_bytes = max(0, in_flight - stage.microbatches_in_flight) * stage.bytes_per_microbatch
        if stage.memory.total_bytes + added_bytes > stage.memory_limit_bytes:
            return False
    return True


def keeping_copies(method: str) -> Callable[[tuple[int, ...], int], tuple[Kept, ...]]:
    """Returns a function that says what the method keeps at each stage, given the replicas of each stage and
    the microbatches of an update."""
    counting = method_of(method)

    def kept(replicas: tuple[int, ...], microbatches_per_update: int) -> tuple[Kept, ...]:
        shape = counting.prepared(Shape(len(replicas), microbatches_per_update, replicas=replicas))
        counting.check(shape)
        return tuple(counting.kept(shape, stage) for stage in range(len(replicas)))

    return kept


def keeping(method: str, shape: Shape) -> Callable[[int], tuple[Kept, ...]]:
    """Returns a function that says what the method keeps at each stage, given the number of stages.

    All else is as in `shape`, with more microbatches an update where the method needs them. zb-auto is
    counted as zb-h1, because its order is not known before there is a plan. The function raises InputError
    for a number of stages that the method cannot have.
    """
    chosen = method_of(method)
    counting = chosen.planned_as

    def kept(num_stages: int) -> tuple[Kept, ...]:
        of = shape
        if num_stages != shape.num_stages:
            of = replace(shape, num_stages=num_stages, orders=None)
            if not chosen.updates_often:
                of = replace(of, microbatches_per_update=max(num_stages, shape.microbatches_per_update))
        of = counting.prepared(of)
        counting.check(of)
        return tuple(counting.kept(of, stage) for stage in range(num_stages))

    return kept
