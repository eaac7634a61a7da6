"""Zero-bubble pipelines (arXiv 2401.10241): 1F1B with the backward in two halves. Synchronous.

I is the gradient of a stage's inputs, which the stage before waits for. W is that of its weights, which no
stage waits for, so it fills what would be bubbles. d = 3, m = 4, F = I = W:

    zb-h1    stage 0   F0 F1 F2 .. .. I0 W0 F3 I1 W1 .. I2 W2 .. I3 W3        W is s microbatches behind I
             stage 1      F0 F1 .. I0 F2 I1 W0 F3 I2 W1 .. I3 W2 W3           at stage s: d in flight, as
             stage 2         F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3              1F1B has at stage 0

    zb-h2    2(d - 1 - s) warm-up forwards and W 2s behind: 2d - 1 in flight

Bubbles are (d - 1)(F + I - W) and (d - 1)(F + I - 2W).
"""

from __future__ import annotations

from pd2bw_fx.actions import Kind, Shape
from pd2bw_fx.errors import InputError

from .flushed import Turns
from .method import StageMethod


class ZeroBubble1(StageMethod):
    """ZB-H1: every stage holds as many microbatches as stage 0 of 1F1B."""

    name = "zb-h1"
    depth = 1

    def check(self, shape: Shape) -> None:
        super().check(shape)
        if shape.slack:
            raise InputError(f"slack={shape.slack} is no option of {self.name}; leave it out, or try zb-h2")

    def in_flight(self, shape: Shape, stage: int) -> int:
        return min(self.depth * (shape.num_stages - 1) + 1, self.turns_per_update(shape, stage))

    def turns(self, shape: Shape, stage: int, updates: range, *, drain: bool, empty_before: int) -> Turns:
        m = self.turns_per_update(shape, stage)
        warm_up = min(m - 1, self.depth * (shape.num_stages - 1 - stage))
        lag = self.depth * stage
        for update in updates:
            yield from weights_behind(range(update * m, (update + 1) * m), warm_up=warm_up, lag=lag)
            yield Kind.UPDATE, update


def weights_behind(turns: range, *, warm_up: int, lag: int) -> Turns:
    """Yields 1F1B in halves, with `warm_up` forwards first and each W `lag` turns after its I."""
    yield from ((Kind.FORWARD, turn) for turn in turns[:warm_up])
    for turn in turns:
        if turn + warm_up in turns:
            yield Kind.FORWARD, turn + warm_up
        yield Kind.INPUT_GRADIENT, turn
        if turn - lag in turns:
            yield Kind.WEIGHT_GRADIENT, turn - lag
    yield from ((Kind.WEIGHT_GRADIENT, turn) for turn in turns[max(0, len(turns) - lag) :])


class ZeroBubble2(ZeroBubble1):
    """ZB-H2: about twice the memory of ZB-H1, and no bubble if 2W >= F + I."""

    name = "zb-h2"
    depth = 2
