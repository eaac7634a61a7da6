"""Builds the schedule of all ranks from a method's name and a few numbers."""

from __future__ import annotations

from pd2bw_fx.actions import Schedule, Shape

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
    """Builds the actions of `updates` on every rank. Segments joined with `then` equal the whole, built at
    once.

    `drain` appends the backwards and updates that are still to come. `empty_before` is the update before
    which the pipeline was empty for the last time: 0, or where a drained segment ended. The other arguments
    are those of `Shape`.

    Raises InputError for an unknown method, and for numbers that the method cannot use.
    """
    shape = Shape(num_stages, microbatches_per_update, slack, replicas, chunks, vertical_sync)
    return schedule_of(method, shape, updates=updates, drain=drain, empty_before=empty_before)


def schedule_of(method: str, shape: Shape, *, updates: range, drain: bool, empty_before: int = 0) -> Schedule:
    """Builds a schedule for a shape, with the other arguments of `build_schedule`."""
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
