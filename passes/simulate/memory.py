"""The memory that every rank holds at the worst moment of a timeline."""

from __future__ import annotations

from pd2bw_fx.actions import Kind
from pd2bw_fx.costs import MemoryModel
from pd2bw_fx.plan import Plan, StagePlan
from pd2bw_fx.timeline import COMPUTE, Timeline


def versions_alive(timeline: Timeline) -> dict[tuple[int, int], int]:
    """Returns, by rank and stage, the most weight versions from the oldest one in use to the newest.

    A timeline of three updates shows the method's own number, a shorter one fewer.
    """
    newest, alive = dict[tuple[int, int], int](), dict[tuple[int, int], int]()
    for event in timeline.events:
        key = (event.rank, event.stage)
        if event.kind is Kind.UPDATE:
            newest[key] = event.version
        elif event.kind in COMPUTE:
            behind = newest.get(key, event.version) - event.version
            alive[key] = max(alive.get(key, 1), behind + 1)
    return alive


def peak_memory_bytes(timeline: Timeline, plan: Plan, memory_model: MemoryModel) -> tuple[int, ...]:
    """Returns the peak bytes of each rank.

    They are the weight versions that are alive and the optimizer state of all its stages, and the most that
    is key at one time by microbatches between forward and backward and by gradients between an update's
    first backward and the update. `memory_model` is the one that the plan was made with. A stage that
    recomputes holds what it received and sent of every such microbatch, and the activations of the one that
    it works on.
    """
    alive = versions_alive(timeline)
    now, most = [0.0] * timeline.num_ranks, [0.0] * timeline.num_ranks
    with_gradients = set[tuple[int, int]]()
    for event in timeline.events:
        rank, stage, key = event.rank, plan.stages[event.stage], (event.rank, event.stage)
        if event.kind is Kind.FORWARD:
            now[rank] += stage.bytes_per_microbatch
        if event.kind in COMPUTE and event.kind is not Kind.UPDATE:
            again = stage.memory.activation_bytes if stage.recompute else 0
            most[rank] = max(most[rank], now[rank] + again + stage.memory.workspace_bytes)
        if event.kind in (Kind.BACKWARD, Kind.WEIGHT_GRADIENT):
            now[rank] -= stage.bytes_per_microbatch
            now[rank] += 0 if key in with_gradients else stage.memory.gradient_bytes
            with_gradients.add(key)
            most[rank] = max(most[rank], now[rank] + stage.memory.workspace_bytes)
        elif event.kind is Kind.UPDATE and key in with_gradients:
            now[rank] -= stage.memory.gradient_bytes
            with_gradients.remove(key)
    fixed = [0.0] * timeline.num_ranks
    for (rank, at), versions in alive.items():
        fixed[rank] += _fixed_bytes(plan.stages[at], memory_model, versions)
    return tuple(round(own + moving) for own, moving in zip(fixed, most, strict=True))


def _fixed_bytes(stage: StagePlan, memory_model: MemoryModel, versions: int) -> float:
    memory = stage.memory
    trainable = memory.gradient_bytes / max(1, memory_model.gradient_copies)
    more = (versions - stage.weight_versions) * trainable
    return memory.weight_bytes + more + memory.optimizer_bytes
