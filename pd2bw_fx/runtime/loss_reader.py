"""Tells which losses a rank can wait for: not those that other ranks compute only after its next steps.

With pipedream, pb and pipemare the last stage runs some updates ahead of the first. If its versions also take
gradients from the first stage (tied parameters, clipping by the whole gradient's norm), the loss of an update
is computed on a version to which the first stage contributes only some steps later:

    4 stages, m = 1    stage 3 computes the loss of update u on W(u), stage 0 helps make W(u) in step u + 3

A rank that waited for that loss before its step u + 3 would stop all of them for ever.
"""

from __future__ import annotations

from typing import NamedTuple

from pd2bw_fx.errors import InputError
from pd2bw_fx.runtime.job import Job
from pd2bw_fx.runtime.loss import Loss, Means
from pd2bw_fx.runtime.results import Results
from pd2bw_fx.runtime.shared_calls import SharedCalls
from pd2bw_fx.runtime.weights import WeightStore


class _Need(NamedTuple):
    """Stage `by` computes on W(`version`), to which stage `of` contributes gradients."""

    of: int
    by: int
    version: int


def updates_apart(job: Job, *, clips: bool) -> int:
    """Returns how many updates the first of linked stages is ahead of the update that the last one computes.

    0 where no stages are linked. A rank that is not given so many batches more than losses have come out
    waits for ever. `clips`: every version takes all ranks' gradients.
    """
    late = 4 * job.num_ranks  # the pipeline is full
    return max((_steps_to(job, last, first, late) for first, last in _links(job, clips=clips)), default=0)


def _links(job: Job, *, clips: bool) -> list[tuple[int, int]]:
    """Returns the first and last of each group of stages that contribute gradients to one version."""
    return [(0, job.shape.num_stages - 1)] if clips else job.linked_stages()


def _steps_to(job: Job, last: int, first: int, update: int) -> int:
    """Returns the steps from `update` until stage `first` is on the version that `last` is on in it."""
    wanted, reached = _version(job, last, update), update
    while _version(job, first, reached) < wanted:
        reached += 1
    return reached - update


def _version(job: Job, stage: int, update: int, *, empty_before: int = 0) -> int:
    """Returns the version that a stage's last forward of the update runs on: all its ranks gave to it."""
    last = (update + 1) * job.microbatches_per_update - 1
    return job.work.rules.forward_version(job.shape, stage, last, empty_before=empty_before)


class LossReader:
    """Makes the losses of a rank's updates, which raise an error where waiting would never end.

    `clips`: every version takes all ranks' gradients. The first `synchronous_updates` are flushed each.
    """

    def __init__(
        self,
        job: Job,
        weights: WeightStore,
        results: Results,
        calls: SharedCalls,
        *,
        clips: bool,
        synchronous_updates: int,
    ) -> None:
        self._job = job
        self._weights = weights
        self._results = results
        self._calls = calls
        self._synchronous_updates = synchronous_updates
        self._links = _links(job, clips=clips)
        self.may_be_held_up = updates_apart(job, clips=clips) > 0
        self._newest = 0  # the update of which this rank has done its step last
        self._empty_before = synchronous_updates

    def of_update(self, update: int) -> Loss:
        """Returns the loss of an update, after this rank's step of it."""
        self._newest = update
        needs = [_Need(first, last, self._version(last, update)) for first, last in self._links]
        return self._loss(update, needs if update >= self._synchronous_updates else [], is_of_training=True)

    def flushed(self, updates: int) -> None:
        """Notes that all ranks have made so many updates, and nothing is in flight."""
        self._empty_before = max(updates, self._synchronous_updates)

    def of_evaluation(self, update: int) -> Loss:
        return self._loss(update, [], is_of_training=False)

    def _loss(self, update: int, needs: list[_Need], *, is_of_training: bool) -> Loss:
        means = [self._waited_for(each, update, needs) for each in self._results.means()]
        return Loss(update, means, is_of_training=is_of_training)

    def _version(self, stage: int, update: int) -> int:
        return _version(self._job, stage, update, empty_before=self._empty_before)

    def _waited_for(self, means: Means, update: int, needs: list[_Need]) -> Means:
        def wait() -> None:
            if not self._calls.is_closed:
                self._require_given(update, needs)
            with self._calls.shared("waiting for the loss", alone=True):
                for need in needs:
                    self._weights.progress(needed=need.version)
                means.wait()

        return Means(means.names, means.parts, wait, is_known_here=means.is_known_here)

    def _require_given(self, update: int, needs: list[_Need]) -> None:
        for need in needs:
            steps = self._steps_until_given(need)
            if steps:
                raise InputError(
                    f"the loss of update {update} cannot be read on rank {self._job.rank} yet: stage "
                    f"{need.by} computes it on W{need.version}, for which tied parameters or "
                    f"max_gradient_norm need what stage {need.of} gives in a later step; read it after "
                    f"{steps} more, or flush first"
                )

    def _steps_until_given(self, need: _Need) -> int:
        """Returns the steps after which no other rank waits for this one on the way to the version."""
        if need.version <= self._empty_before:
            return 0
        held_up = max(need.of, *self._job.stages)  # a stage behind it sends the gradients, one before inputs
        update = self._newest
        while self._version(held_up, update) < need.version:
            update += 1
        return update - self._newest
