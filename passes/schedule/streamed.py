"""Asynchronous methods on a row of stages: one forward, one backward, never flushed.

PipeDream-2BW (arXiv 2006.09503), d = 3 stages, m = 4 microbatches an update; w = d - 1 - s warm-up forwards:

    stage 0   F0 F1 F2 B0 F3|B1 F4 B2 F5 B3 U F6 ..     | a segment ends with the last forward of its update,
    stage 1      F0 F1 B0 F2 B1 F3|B2 F4 B3 U F5 B4 ..    so that a rank which has to wait for a gradient can
    stage 2         F0 B0 F1 B1 F2 B2 F3 B3 U|F4 B4 ..    fetch its next batch meanwhile

PipeDream (SOSP 2019), pipelined backpropagation (arXiv 2003.11666) and PipeMare (arXiv 1910.05124) have the
same order, usually with m = 1, and differ in the weights that a microbatch runs on. Microbatch k at stage s,
m = 1, after the first d:

    method       forward      backward     versions alive
    2bw          W(t-1)       W(t-1)       2                t = k // m: one delay for all stages
    pipedream    W(k-w)       W(k-w)       w + 1 = d - s    the newest at its forward, stashed
    ... vertical W(k-d+1)     W(k-d+1)     d                the newest that all stages have
    pb, pipemare W(k-w)       W(k)         1                no stash: the newest at each
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pd2bw_fx.actions import Kind, Shape
from pd2bw_fx.costs import Kept
from pd2bw_fx.errors import InputError
from pd2bw_fx.units import counted

from .flushed import Turns, warm_up_forwards
from .method import StageMethod


class _Streamed(StageMethod):
    is_synchronous = False

    def warm_up(self, shape: Shape, stage: int) -> int:
        """Returns how many forwards one replica does before its first forward-backward pair."""
        return warm_up_forwards(stage, shape.num_stages, shape.slack)

    def check(self, shape: Shape) -> None:
        super().check(shape)
        if shape.slack and not self.fills_slack:
            raise InputError(
                f"slack={shape.slack} would make {self.name} another method, with longer delays; leave it out"
            )

    def in_flight(self, shape: Shape, stage: int) -> int:
        return self.warm_up(shape, stage) + 1

    def turns(self, shape: Shape, stage: int, updates: range, *, drain: bool, empty_before: int) -> Turns:
        """Yields the backward of turn k - warm_up after the forward of turn k.

        A backward that has to wait for a gradient is the first action of the next turn instead, so that a
        segment ends with a forward.
        """
        m, warm_up = self.turns_per_update(shape, stage), self.warm_up(shape, stage)
        late = 0 if warm_up == 0 else 1

        def backward(turn: int) -> Iterator[tuple[Kind, int]]:
            if turn < empty_before * m:
                return
            yield Kind.BACKWARD, turn
            if turn % m == m - 1:
                yield Kind.UPDATE, turn // m

        for turn in range(updates.start * m, updates.stop * m):
            if late:
                yield from backward(turn - warm_up - 1)
            yield Kind.FORWARD, turn
            if not late:
                yield from backward(turn)
        if drain:
            begun = max(updates.stop * m, empty_before * m)
            for turn in range(begun - warm_up - late, begun):
                yield from backward(turn)


class TwoBuffered(_Streamed):
    """PipeDream-2BW: W(t+1) = W(t) - lr * grad f(W(t-1)); the first two updates run on the initial weights.

    `slack` lengthens the warm-up to (d - 1 - s)(1 + slack): more in flight against late gradients.
    """

    name = "2bw"
    fills_slack = True

    def check(self, shape: Shape) -> None:
        super().check(shape)
        d, w = shape.num_stages, shape.replicas_of(0)
        m = shape.microbatches_per_update // w
        each = "" if w == 1 else " for each replica"
        if m < d:
            raise InputError(
                f"2bw with {counted(m, 'microbatch')} an update{each} on {d} stages: two weight "
                "versions are enough if there are as many microbatches as stages; try "
                f"microbatches_per_update={d * w}"
            )
        longest = warm_up_forwards(0, d, shape.slack)
        if shape.slack < 0 or longest > m:
            raise InputError(
                f"slack={shape.slack} on {d} stages: stage 0 would begin with {longest} forwards, which "
                f"two weight versions allow up to {m}, the microbatches of an update{each}; try a slack from "
                f"0 to {m / max(d - 1, 1) - 1:.2g}"
            )

    def num_versions(self, shape: Shape, stage: int) -> int:
        return 2

    def forward_version(self, shape: Shape, stage: int, microbatch: int, *, empty_before: int = 0) -> int:
        return max(microbatch // shape.microbatches_per_update - 1, 0)


class PipeDream(_Streamed):
    """PipeDream with weight stashing: a forward runs on its stage's newest weights, its backward on the same.

        w_s(t+1) = w_s(t) - lr * grad f(w_0(t-d+1), .., w_{d-1}(t))          m = 1, no replicas

    Stage s of R ranks begins with floor((R - 1 - ranks before s) / replicas of s) forwards on each replica.
    The version of a microbatch depends on its number alone, so a flush, such as an evaluation makes, changes
    no result, and the stash is kept over it. With `vertical_sync` it is the newest version that every stage
    has.
    """

    name = "pipedream"
    updates_often = True
    may_be_unequal = True

    def warm_up(self, shape: Shape, stage: int) -> int:
        ranks, before = self.num_ranks(shape), self.first_rank(shape, stage)
        return (ranks - 1 - before) // shape.replicas_of(stage)

    def num_versions(self, shape: Shape, stage: int) -> int:
        stages = range(shape.num_stages) if shape.vertical_sync else [stage]
        return max(-(-self.warm_up(shape, s) // self.turns_per_update(shape, s)) for s in stages) + 1

    def forward_version(self, shape: Shape, stage: int, microbatch: int, *, empty_before: int = 0) -> int:
        stages = range(shape.num_stages) if shape.vertical_sync else [stage]
        return max(0, min(self._newest(shape, s, microbatch) for s in stages))

    def _newest(self, shape: Shape, stage: int, microbatch: int) -> int:
        """Returns the newest version at the microbatch's forward, if the pipeline was never flushed."""
        turn = microbatch // shape.replicas_of(stage)
        return (turn - self.warm_up(shape, stage)) // self.turns_per_update(shape, stage)


class PipelinedBackpropagation(_Streamed):
    """Pipelined backpropagation: no stash; each forward and each backward runs on the newest weights.

    In this order a forward at stage s is at most ceil(w / m) updates older than its backward, w = d - 1 - s.
    Corrections of the delay (prediction, spike compensation) are made by the runtime.
    """

    name = "pb"
    updates_often = True
    keeps_versions = False

    def forward_version(self, shape: Shape, stage: int, microbatch: int, *, empty_before: int = 0) -> int:
        turn = microbatch // shape.replicas_of(stage)
        newest = (turn - self.warm_up(shape, stage)) // self.turns_per_update(shape, stage)
        return max(empty_before, newest)

    def backward_version(self, shape: Shape, stage: int, microbatch: int, *, empty_before: int = 0) -> int:
        return microbatch // shape.microbatches_per_update


class PipeMare(PipelinedBackpropagation):
    """PipeMare: pipelined backpropagation with corrections of learning rates and discrepancy, in the runtime.

    A backward is shown estimates of the weights that its forward saw, by the running mean of their changes.
    So a stage with a delay keeps that mean, and the newest weights beside those that are shown.
    """

    name = "pipemare"

    def kept(self, shape: Shape, stage: int) -> Kept:
        return replace(
            super().kept(shape, stage), correction_copies=2 if self.warm_up(shape, stage) > 0 else 0
        )
