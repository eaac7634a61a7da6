"""Synchronous methods on a row of stages, d = 3, m = 4: the pipeline is empty after every update.

    1f1b (PipeDream-Flush)                          gpipe
    stage 0   F0 F1 F2 B0 F3 B1 B2 B3 U             F0 F1 F2 F3 .. B3 B2 B1 B0 U
    stage 1      F0 F1 B0 F2 B1 F3 B2 B3 U             F0 F1 F2 F3 .. B3 B2 B1 B0 U
    stage 2         F0 B0 F1 B1 F2 B2 F3 B3 U             F0 F1 F2 F3 B3 B2 B1 B0 U

Both take (m + d - 1)(F + B); 1f1b holds d - s microbatches at stage s, gpipe all m.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import ClassVar

from pd2bw_fx.actions import Kind, Shape
from pd2bw_fx.errors import InputError

from .method import Placing, StageMethod

Turns = Iterator[tuple[Kind, int]]


def warm_up_forwards(stage: int, num_stages: int, slack: float = 0.0) -> int:
    """Returns how many forwards a stage does before its first forward-backward pair, which adds one in
    flight.

    d - 1 - s is the least number that keeps every stage busy; 2BW with it needs only m >= d - 1.
    """
    return math.ceil(round((num_stages - 1 - stage) * (1 + slack), 6))  # 7 (1 + 1/7) is 8


class OneForwardOneBackward(StageMethod):
    """PipeDream-Flush (arXiv 2006.09503, section 3.2).

    With `slack` it begins with more forwards, so that no stage waits for late messages, and holds as many
    more microbatches.
    """

    name = "1f1b"

    def check(self, shape: Shape) -> None:
        super().check(shape)
        if shape.slack < 0:
            raise InputError(f"slack={shape.slack}; give 0 (as few microbatches in flight as can be) or more")

    def in_flight(self, shape: Shape, stage: int) -> int:
        longest = warm_up_forwards(stage, shape.num_stages, shape.slack) + 1
        return min(longest, self.turns_per_update(shape, stage))

    def turns(self, shape: Shape, stage: int, updates: range, *, drain: bool, empty_before: int) -> Turns:
        m = self.turns_per_update(shape, stage)
        warm_up = min(m - 1, warm_up_forwards(stage, shape.num_stages, shape.slack))
        for update in updates:
            first, beyond = update * m, (update + 1) * m
            for turn in range(first, beyond):
                yield Kind.FORWARD, turn
                if turn - warm_up >= first:
                    yield Kind.BACKWARD, turn - warm_up
            for turn in range(beyond - warm_up, beyond):
                yield Kind.BACKWARD, turn
            yield Kind.UPDATE, update


class GPipe(StageMethod):
    """GPipe (arXiv 1811.06965): all forwards, then all backwards, last microbatch first."""

    name = "gpipe"

    def check(self, shape: Shape) -> None:
        super().check(shape)
        if shape.slack:
            raise InputError(f"slack={shape.slack} says nothing of gpipe, which begins with all forwards")

    def in_flight(self, shape: Shape, stage: int) -> int:
        return self.turns_per_update(shape, stage)

    def turns(self, shape: Shape, stage: int, updates: range, *, drain: bool, empty_before: int) -> Turns:
        m = self.turns_per_update(shape, stage)
        for update in updates:
            turns = range(update * m, (update + 1) * m)
            for turn in turns:
                yield Kind.FORWARD, turn
            for turn in reversed(turns):
                yield Kind.BACKWARD, turn
            yield Kind.UPDATE, update


class BaPipe(StageMethod):
    """BaPipe (arXiv 2012.12544): the synchronous order that was found to be the fastest for a cluster.

    `shape.base` names it, with `shape.slack` for a 1f1b that overlaps its messages. `passes/arrange.py`
    chooses.
    """

    name = "bapipe"
    plans_replicas = False
    bases: ClassVar[Mapping[str, StageMethod]] = {"1f1b": OneForwardOneBackward(), "gpipe": GPipe()}

    def prepared(self, shape: Shape) -> Shape:
        return shape if shape.base is not None else replace(shape, base="1f1b")

    def check(self, shape: Shape) -> None:
        if shape.base not in self.bases:
            raise InputError(f"base is {shape.base!r}; bapipe chooses among {', '.join(self.bases)}")
        super().check(shape)
        self._base(shape).check(shape)

    def in_flight(self, shape: Shape, stage: int) -> int:
        return self._base(shape).in_flight(shape, stage)

    def turns(self, shape: Shape, stage: int, updates: range, *, drain: bool, empty_before: int) -> Turns:
        return self._base(shape).turns(shape, stage, updates, drain=drain, empty_before=empty_before)

    def _base(self, shape: Shape) -> StageMethod:
        assert shape.base is not None
        return self.bases[shape.base]


class DataParallel(OneForwardOneBackward):
    """The whole model on each of N ranks, gradients averaged: the baseline (DistributedDataParallel)."""

    name = "ddp"
    plans_replicas = False
    placing = Placing.WHOLE

    def check(self, shape: Shape) -> None:
        super().check(shape)
        if shape.num_stages != 1:
            raise InputError(
                f"ddp has the whole model on every rank, and this cut has {shape.num_stages} stages; split "
                "the model for it: split(.., method='ddp'), or try method='1f1b' with replicas of every stage"
            )


class Inference(StageMethod):
    """Forwards alone, each microbatch on the newest weights of its update."""

    name = "inference"
    trains = False

    def in_flight(self, shape: Shape, stage: int) -> int:
        return 1

    def turns(self, shape: Shape, stage: int, updates: range, *, drain: bool, empty_before: int) -> Turns:
        m = self.turns_per_update(shape, stage)
        for turn in range(updates.start * m, updates.stop * m):
            yield Kind.FORWARD, turn
