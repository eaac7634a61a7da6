"""What every rank holds at its worst moment of a timeline."""

from __future__ import annotations

from pd2bw_fx.actions import Kind
from pd2bw_fx.costs import MemoryModel
from pd2bw_fx.plan import Plan, StagePlan
from pd2bw_fx.timeline import COMPUTE, Timeline


def versions_alive(timeline: Timeline) -> dict[tuple[int, int], int]:
    """For each rank and stage, the most weight versions from the oldest that is used to the newest.

    A timeline of three updates shows the method's own number, a shorter one fewer.
    """
    newest, alive = dict[tuple[int, int], int](), dict[tuple[int, int], int]()
    for event in timeline.events:
        place = (event.rank, event.stage)
        if event.kind is Kind.UPDATE:
            newest[place] = event.version
        elif event.kind in COMPUTE:
            behind = newest.get(place, event.version) - event.version
            alive[place] = max(alive.get(place, 1), behind + 1)
    return alive


def peak_memory_bytes(timeline: Timeline, plan: Plan, memory_model: MemoryModel) -> tuple[int, ...]:
    """Bytes for each rank: the weight versions that are alive and optimizer state of all its stages, and the
    most that its microbatches between forward and backward, and its gradients between an update's first
    backward and its end, hold at one time.

    `memory_model` is what the plan was made with. A stage that recomputes holds what it received and sent of
    every such microbatch, and the activations of one.
    """
    alive = versions_alive(timeline)
    now, most = [0.0] * timeline.num_ranks, [0.0] * timeline.num_ranks
    each = [stage.bytes_per_microbatch for stage in plan.stages]
    with_gradients = set[tuple[int, int]]()
    for event in timeline.events:
        place, gradients = (event.rank, event.stage), plan.stages[event.stage].memory.gradient_bytes
        if event.kind is Kind.FORWARD:
            now[event.rank] += each[event.stage]
        elif event.kind in (Kind.BACKWARD, Kind.WEIGHT_GRADIENT):
            now[event.rank] -= each[event.stage]
            now[event.rank] += 0 if place in with_gradients else gradients
            with_gradients.add(place)
        elif event.kind is Kind.UPDATE and place in with_gradients:
            now[event.rank] -= gradients
            with_gradients.remove(place)
        most[event.rank] = max(most[event.rank], now[event.rank])
    peaks = []
    for rank, moving in enumerate(most):
        stages = [stage for of, stage in alive if of == rank]
        fixed = sum(_fixed_bytes(plan.stages[stage], memory_model, alive[rank, stage]) for stage in stages)
        once = max((_once_bytes(plan.stages[stage]) for stage in stages), default=0)
        peaks.append(round(fixed + moving + once))
    return tuple(peaks)


def _once_bytes(stage: StagePlan) -> int:
    """For the one microbatch that is worked on."""
    again = stage.memory.activation_bytes if stage.recompute else 0
    return stage.memory.workspace_bytes + again


def _fixed_bytes(stage: StagePlan, memory_model: MemoryModel, versions: int) -> float:
    memory = stage.memory
    trainable = memory.gradient_bytes / max(1, memory_model.gradient_copies)
    more = (versions - stage.weight_versions) * trainable
    return memory.weight_bytes + more + memory.optimizer_bytes
