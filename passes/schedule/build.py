"""Schedules of all ranks, from a method's name and a few numbers."""

from __future__ import annotations

from pd2bw_fx.actions import Action, Schedule, Shape

from .methods import METHODS, method_of

SYNCHRONOUS = tuple(name for name, method in METHODS.items() if method.is_synchronous and method.trains)


def build_schedule(
    method: str,
    num_stages: int,
    *,
    microbatches_per_update: int,
    updates: range,
    drain: bool,
    empty_before: int = 0,
    slack: float = 0.0,
    replicas: tuple[int, ...] | None = None,
    chunks: int = 1,
    vertical_sync: bool = False,
) -> Schedule:
    """The actions of `updates` on every rank; segments joined with `then` equal the schedule built at once.

    `drain` appends the backwards and updates that are still to come. `empty_before` is the update before
    which the pipeline was empty for the last time: 0, or where a drained segment ended. The other arguments
    are those of `Shape`.

    Raises InputError for an unknown method, and for numbers that the method cannot use.
    """
    shape = Shape(num_stages, microbatches_per_update, slack, replicas, chunks, vertical_sync)
    return schedule_of(method, shape, updates=updates, drain=drain, empty_before=empty_before)


def schedule_of(method: str, shape: Shape, *, updates: range, drain: bool, empty_before: int = 0) -> Schedule:
    """`build_schedule` for a shape that is there already."""
    chosen = method_of(method)
    shape = chosen.prepared(shape)
    chosen.check(shape)
    return Schedule(
        method=method,
        num_stages=shape.num_stages,
        microbatches_per_update=shape.microbatches_per_update,
        updates=updates,
        ranks=tuple(
            chosen.actions(shape, rank, updates=updates, drain=drain, empty_before=empty_before)
            for rank in range(chosen.num_ranks(shape))
        ),
        drained=drain or chosen.is_synchronous,
        weight_versions=max(chosen.num_versions(shape, stage) for stage in range(shape.num_stages)),
        shape=shape,
    )


def stage_actions(
    method: str,
    num_stages: int,
    stage: int,
    *,
    microbatches_per_update: int,
    updates: range,
    drain: bool,
    empty_before: int = 0,
    slack: float = 0.0,
) -> tuple[Action, ...]:
    """One stage's list of `build_schedule`, where every stage has one rank."""
    shape = Shape(num_stages, microbatches_per_update, slack)
    return method_of(method).actions(shape, stage, updates=updates, drain=drain, empty_before=empty_before)


def num_versions(method: str) -> int:
    """Weight versions alive at any one time, of a method that has as many at every stage."""
    return method_of(method).num_versions(Shape(1, 1), 0)


def weight_version(method: str, microbatch: int, microbatches_per_update: int) -> int:
    """The version that a microbatch runs on, of a method that has the same at every stage."""
    return method_of(method).forward_version(Shape(1, microbatches_per_update), 0, microbatch)
