"""Makes a plan for a method: which stages are on which devices, and what each of them holds.

2bw, 1f1b, ..   a stage on each device
interleaved     v stages on each device in turn: stage s of v d on device s mod d
chimera         stage s on devices s and d - 1 - s
bapipe          planned and timed for each order that it may choose; the fastest one that fits is kept
ddp             one stage, which every device of the cluster holds: timed as on the slowest of them
with replicas   stage s on r_s neighbouring devices, those of the first stage first
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from pd2bw_fx.actions import Shape
from pd2bw_fx.cluster import Cluster
from pd2bw_fx.costs import MemoryModel
from pd2bw_fx.errors import InfeasibleError, InputError, SolverError
from pd2bw_fx.plan import Plan
from pd2bw_fx.problem import Problem

from .device_slots import slots_for
from .partition import METHODS as TUNED
from .partition import Deadline, partition, partition_replicated, require_blocks
from .schedule import (
    BaPipe,
    Method,
    Placing,
    StageMethod,
    keeping,
    keeping_copies,
    method_of,
    schedule_of,
    shape_of,
)
from .simulate import simulate

CHUNKS = 2  # default number of stages on each device, for methods whose stages go round
_BAPIPE = (("1f1b", 0.0), ("1f1b", 1.0), ("gpipe", 0.0))  # base and slack: 1.0 overlaps the messages
LEAST_TIME_S = 1e-3  # enough for a first plan where nothing has to be searched for
_UPDATES_TIMED = 3  # to compare the orders of bapipe


def requested_shape(
    method: str,
    cluster: Cluster,
    *,
    num_stages: int | None,
    microbatches_per_update: int | None,
    chunks: int | None,
) -> Shape:
    """Returns the shape that is asked for, with defaults for all that the user left open.

    Raises InputError for an unknown method, and for numbers that it cannot use.
    """
    chosen = method_of(method)
    v = chunks or (CHUNKS if chosen.placing is Placing.ROUND else 1)
    d = _default_stages(chosen, cluster, v) if num_stages is None else num_stages
    m = microbatches_per_update
    if m is None:
        m = _default_microbatches(chosen, cluster, d, v)
    is_whole = chosen.placing is Placing.WHOLE
    shape = Shape(d, m, replicas=(len(cluster),) * d if is_whole else None, chunks=v)
    counting = chosen.planned_as
    counting.check(counting.prepared(shape))
    return shape


def _default_stages(method: Method, cluster: Cluster, chunks: int) -> int:
    """Returns one stage for each device (`chunks` for each where stages go round), or one in all for ddp."""
    return 1 if method.placing is Placing.WHOLE else len(cluster) * chunks


def _default_microbatches(method: Method, cluster: Cluster, num_stages: int, chunks: int) -> int:
    """Returns two microbatches for each device in use, or one in all where updates come after each."""
    if method.updates_often:
        return 1
    return 2 * (len(cluster) if method.placing is Placing.WHOLE else num_stages // chunks)


def arrange(
    problem: Problem,
    cluster: Cluster,
    method: str,
    shape: Shape,
    *,
    memory_model: MemoryModel,
    options: Mapping[str, Any],
    **planning_options: Any,
) -> tuple[Plan, Shape]:
    """Returns the fastest plan for the method, and the shape of its schedule.

    `options` and further arguments are those of `partition`. Where a device has several stages, each may use
    an equal share of the memory (`device_slots.py`). Raises what `partition` raises, and InputError where the
    cluster is too small.
    """
    options = {**options, **planning_options}
    chosen = method_of(method)
    if isinstance(chosen, BaPipe):
        return _explored(problem, cluster, shape, memory_model=memory_model, options=options)
    arguments: dict[str, Any] = {
        "num_stages": shape.num_stages,
        "microbatches_per_update": shape.microbatches_per_update,
        "method": method,
        "memory_model": memory_model,
        "kept": keeping(method, shape),
        **options,
    }
    slots = slots_for(
        problem,
        cluster,
        chosen.placing,
        arguments.get("constraints"),
        num_stages=shape.num_stages,
        chunks=shape.chunks,
    )
    if chosen.placing is Placing.ROUND:
        require_blocks(problem, shape.num_stages)
    arguments |= {"constraints": slots.constraints, "order": slots.order}
    plan = slots.of_plan(partition(slots.problem, slots.cluster, **arguments))
    if chosen.placing in (Placing.ROUND, Placing.BOTH_WAYS):
        plan = by_device(plan)
    return plan, shape_of(
        plan, method, microbatches_per_update=shape.microbatches_per_update, replicas=shape.replicas
    )


def share_out(
    problem: Problem,
    cluster: Cluster,
    method: str,
    replicas: int | Sequence[int] | Literal["auto"],
    *,
    num_stages: int | None,
    microbatches_per_update: int | None,
    options: Mapping[str, Any],
    **planning_options: Any,
) -> tuple[Plan, Shape]:
    """Returns the fastest plan whose stages have replicas, and the shape of its schedule.

    `replicas` is one number for all stages, a number for each, or "auto" for the fastest. Without
    `microbatches_per_update` an update has as many as the method needs.

    Raises what `partition_replicated` raises, and InputError for a method that cannot have them.
    """
    chosen, m = method_of(method), microbatches_per_update
    if not isinstance(chosen, StageMethod) or not chosen.plans_replicas:
        raise InputError(
            f"the replicas of {method} are not planned; leave replicas out, or give them to train"
        )
    counts: tuple[int, ...] | None = None
    if isinstance(replicas, int):
        d = max(1, len(cluster) // max(1, replicas)) if num_stages is None else num_stages
        counts = (replicas,) * d
    elif replicas != "auto":
        counts = tuple(replicas)
        if num_stages not in (None, len(counts)):
            raise InputError(f"replicas is {counts}, and num_stages={num_stages}; give one number for each")
    elif not chosen.may_be_unequal:
        raise InputError(
            f'replicas="auto" is for pipedream, whose stages may have unequal ones; for {method} give a '
            "number" + (", or let tune choose one" if method in TUNED else "")
        )
    if counts is not None:
        if m is None:
            m = math.lcm(*counts) * (1 if chosen.updates_often else 2 * len(counts))
        chosen.check(Shape(len(counts), m, replicas=counts))
    plan = partition_replicated(
        problem,
        cluster,
        microbatches_per_update=m,
        num_stages=None if num_stages is None else (num_stages,),
        replicas=counts,
        kept=keeping_copies(method),
        method=method,
        **options,
        **planning_options,
    )
    return plan, shape_of(plan, method, microbatches_per_update=plan.microbatches_per_update)


def by_device(plan: Plan) -> Plan:
    """Prices a plan with several stages on each device by its slowest device, which an update waits for.

    The plan was made for the fastest slowest stage. That is no proof for the slowest device, so the bound is
    0.
    """
    loads_s = [stage.load_s for stage in plan.stages]
    if method_of(plan.method).placing is Placing.BOTH_WAYS:  # half of the microbatches go the other way
        loads_s = [(one + other) / 2 for one, other in zip(loads_s, reversed(loads_s), strict=True)]
    of_devices: dict[int, float] = {}
    for stage, load_s in zip(plan.stages, loads_s, strict=True):
        of_devices[stage.device] = of_devices.get(stage.device, 0.0) + load_s
    return replace(plan, bottleneck_s=max(of_devices.values()), bound_s=0.0)


def _explored(
    problem: Problem,
    cluster: Cluster,
    shape: Shape,
    *,
    memory_model: MemoryModel,
    options: Mapping[str, Any],
) -> tuple[Plan, Shape]:
    """Explores as BaPipe does (arXiv 2012.12544): balances the stages for each order, and times the
    update. The orders share the time limit equally."""
    found: list[tuple[float, int, Plan, Shape]] = []
    trouble: list[InfeasibleError | SolverError] = []
    deadline = Deadline(options["time_limit_s"], within=options.get("within"))
    for number, (base, slack) in enumerate(_BAPIPE):
        if deadline.is_stopped and found:
            break
        candidate = replace(shape, base=base, slack=slack)
        left_s = max(deadline.left_s / (len(_BAPIPE) - number), LEAST_TIME_S)
        try:
            plan = partition(
                problem,
                cluster,
                num_stages=shape.num_stages,
                microbatches_per_update=shape.microbatches_per_update,
                method="bapipe",
                memory_model=memory_model,
                kept=keeping("bapipe", candidate),
                overlap=slack > 0,
                **{**options, "time_limit_s": left_s, "within": deadline},
            )
        except (InfeasibleError, SolverError) as error:
            trouble.append(error)
            continue
        found.append((_span_s(candidate, plan, cluster), number, plan, candidate))
    if not found:
        raise next((error for error in trouble if isinstance(error, SolverError)), trouble[0])
    _, _, plan, chosen = min(found, key=lambda each: each[:2])
    return plan, chosen


def shape_again(plan: Plan, cluster: Cluster) -> Shape:
    """Returns the shape of a plan that was made before.

    For bapipe it is the fastest order with as many microbatches in flight as the plan's stages have.
    """
    shape = shape_of(plan, plan.method, microbatches_per_update=plan.microbatches_per_update)
    if not isinstance(method_of(plan.method), BaPipe):
        return shape
    in_flight = [stage.microbatches_in_flight for stage in plan.stages]
    orders = [replace(shape, base=base, slack=slack) for base, slack in _BAPIPE]
    alike = [o for o in orders if [k.in_flight for k in keeping("bapipe", o)(len(in_flight))] == in_flight]
    return min(alike or orders[:1], key=lambda order: _span_s(order, plan, cluster))


def _span_s(shape: Shape, plan: Plan, cluster: Cluster) -> float:
    """Returns the simulated seconds of a few updates."""
    schedule = schedule_of(plan.method, shape, updates=range(_UPDATES_TIMED), drain=True)
    return simulate(schedule, plan, cluster).span_s
