"""The simulator's model of time for thousands of ranks: it gives sums in place of a timeline.

round 1   F0 .  .  .        In each round every rank that has what it needs performs its next computation.
round 2   F1 F0 .  .        All of them are one operation on arrays over the ranks, so that the number of
round 3   F2 F1 F0 .        rounds counts (about 2 (m + d) for 1F1B), not that of the actions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pd2bw_fx.actions import Kind
from pd2bw_fx.errors import InputError, ScheduleError

from .durations import Durations, LinkTimes

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

_KINDS = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT, Kind.UPDATE)
_CODE = {kind: code for code, kind in enumerate(_KINDS)}
_BITS = 3


@dataclass(frozen=True, slots=True)
class Totals:
    """The sums of a timeline.

    `span_s` is the time from the start of the first computation to the end of the last one. The others are,
    for each rank, the time that it computed and the times that it waited for an activation or a gradient.
    """

    span_s: float
    busy_s: Floats
    activation_s: Floats
    gradient_s: Floats
    update_ends_s: tuple[float, ...]  # of the first stage
    num_computations: int

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which nothing is computed."""
        return float(1.0 - self.busy_s.sum() / (len(self.busy_s) * self.span_s)) if self.span_s else 0.0


def simulate_totals(
    ranks: Iterable[Iterable[tuple[Kind, int, int]]], durations: Durations, *, links: str = "busy"
) -> Totals:
    """Simulates a row of stages with one rank each, and returns sums instead of a timeline.

    It is for schedules too large for `simulate`: `benchmarks/scale.py` uses it, and tests compare the two.
    `ranks` has the computations of each rank in order, as (kind, stage, microbatch or update), which is what
    `Method.order` yields. Links are as in `simulate`, except that where a rank sends both activations and
    gradients to one other rank (two ranks with several stages each) each kind has a direction of the link.

    Raises InputError for links that are no row, ScheduleError naming a rank that waits for ever.
    """
    if links not in ("busy", "latency"):
        raise InputError(f"links={links!r}; give 'busy' or 'latency'")
    return _Wavefront(ranks, durations, is_busy=links == "busy").run()


class _Wavefront:
    """A position in its list and a clock for each rank, and when each message arrives at each stage."""

    def __init__(
        self,
        ranks: Iterable[Iterable[tuple[Kind, int, int]]],
        durations: Durations,
        *,
        is_busy: bool,
    ) -> None:
        self.num_stages = s = durations.num_stages
        self.is_busy = is_busy
        lists = [_encoded(cells, s) for cells in ranks]
        self.length = np.array([len(codes) for codes in lists], dtype=np.int64)
        self.codes = np.full((len(lists), int(self.length.max())), -1, dtype=np.int64)
        for rank, codes in enumerate(lists):
            self.codes[rank, : len(codes)] = codes
        del lists
        self.seconds = np.array(
            [
                durations.forward_s,
                [durations.whole_backward_s(stage) for stage in range(s)],
                durations.backward_s,
                durations.weight_backward_s or (0.0,) * s,
                durations.update_s,
            ]
        )
        numbers = (self.codes >> _BITS) // s
        m = int(numbers.max()) + 1
        # Arrival times. Stage 0 has every input from the beginning, the last stage every gradient.
        self.activation_there_s = np.full((s, m), np.nan)
        self.gradient_there_s = np.full((s, m), np.nan)
        self.activation_there_s[0] = self.gradient_there_s[s - 1] = 0.0
        self.forth = _row(durations.links, s)

    def run(self) -> Totals:
        num_ranks = len(self.codes)
        now, busy, waited_a, waited_g = (np.zeros(num_ranks) for _ in range(4))
        first_s = np.inf
        free = np.zeros((2, num_ranks))  # until when a rank's links are busy: activations, gradients
        position = np.zeros(num_ranks, dtype=np.int64)
        active = np.flatnonzero(self.length > 0)
        update_ends: list[float] = []
        while len(active):
            kind, stage, number = self._at(active, position[active])
            is_forward, is_backward = kind == 0, (kind == 1) | (kind == 2)
            ready_s = np.zeros(len(active))
            ready_s[is_forward] = self.activation_there_s[stage[is_forward], number[is_forward]]
            ready_s[is_backward] = self.gradient_there_s[stage[is_backward], number[is_backward]]
            can = ~np.isnan(ready_s)
            if not can.any():
                self._refuse(int(active[0]), int(position[active[0]]), len(active))
            who, kind, stage, number = active[can], kind[can], stage[can], number[can]
            start_s = np.maximum(now[who], ready_s[can])
            idle_s = start_s - now[who]
            waited_a[who] += np.where(kind == 0, idle_s, 0.0)
            waited_g[who] += np.where(kind != 0, idle_s, 0.0)
            length_s = self.seconds[kind, stage]
            end_s = start_s + length_s
            busy[who] += length_s
            now[who] = end_s
            first_s = min(first_s, float(start_s.min()))
            self._send(who, kind == 0, +1, stage, number, end_s, free[0])
            self._send(who, (kind == 1) | (kind == 2), -1, stage, number, end_s, free[1])
            update_ends += end_s[(kind == 4) & (stage == 0)].tolist()
            position[who] += 1
            active = active[position[active] < self.length[active]]
        return Totals(
            span_s=float(now.max()) - first_s,
            busy_s=busy,
            activation_s=waited_a,
            gradient_s=waited_g,
            update_ends_s=tuple(update_ends),
            num_computations=int(self.length.sum()),
        )

    def _at(self, ranks: Integers, position: Integers) -> tuple[Integers, Integers, Integers]:
        codes = self.codes[ranks, position]
        rest = codes >> _BITS
        return codes & ((1 << _BITS) - 1), rest % self.num_stages, rest // self.num_stages

    def _send(
        self,
        ranks: Integers,
        chosen: npt.NDArray[np.bool_],
        step: int,
        stage: Integers,
        number: Integers,
        end_s: Floats,
        free_s: Floats,
    ) -> None:
        """Sends results of the chosen computations to the next stage (step 1) or to the one before (-1)."""
        target = stage + step
        chosen = chosen & (target >= 0) & (target < self.num_stages)
        ranks, target, number, left_s = ranks[chosen], target[chosen], number[chosen], end_s[chosen]
        link = self.forth[:, np.minimum(stage[chosen], target)]
        latency_s, transmit_s = (link[0], link[1]) if step > 0 else (link[2], link[3])
        if self.is_busy:
            left_s = np.maximum(left_s, free_s[ranks])
            free_s[ranks] = left_s + transmit_s
        there_s = self.activation_there_s if step > 0 else self.gradient_there_s
        there_s[target, number] = left_s + transmit_s + latency_s

    def _refuse(self, rank: int, position: int, waiting: int) -> None:
        kind, stage, number = self._at(np.array([rank]), np.array([position]))
        piece = f"{_KINDS[int(kind[0])].value}{int(number[0])} of stage {int(stage[0])}"
        raise ScheduleError(
            f"the schedule never ends: rank {rank} waits before {piece}; {waiting} of {len(self.codes)} "
            "ranks stand still"
        )


def _encoded(cells: Iterable[tuple[Kind, int, int]], num_stages: int) -> Integers:
    codes = (_CODE[kind] | (stage + num_stages * number) << _BITS for kind, stage, number in cells)
    return np.fromiter(codes, dtype=np.int64)


def _row(links: Iterable[LinkTimes], num_stages: int) -> Floats:
    """Returns, for the link after each stage, latency and transmission of an activation and of a gradient."""
    row = np.zeros((4, num_stages))
    for link in links:
        if link.target != link.source + 1 or link.gradient_s is None:
            raise InputError(
                f"a link goes from stage {link.source} to {link.target}; sums are for stages in a row, each "
                "with a gradient back; use simulate_durations"
            )
        back_s = link.latency_s if link.gradient_latency_s is None else link.gradient_latency_s
        row[:, link.source] = link.latency_s, link.activation_s, back_s, link.gradient_s
    return row
