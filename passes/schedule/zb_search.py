"""Searches the orders of zb-auto: by hand first, then by an integer program.

The search begins with lists like those of zb-h1 and zb-h2, with the longest warm-up and the latest weight
gradients that each stage's memory allows. It then asks an integer program for a better one. The program has a
start time for each piece of work, and for each two pieces of one stage a binary that says which comes first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from pd2bw_fx.actions import Kind
from pd2bw_fx.errors import InputError
from pd2bw_fx.passes.solver import IntegerProgram

from .times import Times
from .zero_bubble import weights_behind

_Piece = tuple[Kind, int]  # kind and microbatch
_Order = tuple[_Piece, ...]
_KINDS = (Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)
_MOST_BINARIES = 3000  # a larger program is not tried
_MARGIN = 1e-6  # a smaller improvement is not asked for


@dataclass(frozen=True, slots=True)
class FoundOrders:
    """An order for every stage. `cost_s` is the longest time of a stage from the start of its first piece to
    the end of its last; no orders have a cost below `bound_s`."""

    orders: tuple[str, ...]
    cost_s: float
    bound_s: float


@lru_cache(maxsize=64)
def find_orders(num_microbatches: int, times: Times, *, time_limit_s: float = 5.0) -> FoundOrders:
    """Returns the best order found for every stage, and a bound on all others.

    Programs with more than 3,000 binaries are not tried; 8 stages with 16 microbatches have 2,880. Then, and
    if the time limit passes, `bound_s` is the time of the work alone.

    Raises InputError where a stage cannot hold one microbatch.
    """
    d, m = len(times.forward_s), num_microbatches
    if min(times.in_flight) < 1:
        stage = times.in_flight.index(min(times.in_flight))
        raise InputError(
            f"the memory of stage {stage} holds no microbatch; try more stages, or recompute=True"
        )
    candidates = list(_like_the_handmade(d, m, times))
    cost_s, orders = min(
        (_cost_s(orders, times), number, orders) for number, orders in enumerate(candidates)
    )[::2]
    work_s = max(m * times.work_s(stage) for stage in range(d))
    bound_s = work_s
    if cost_s > work_s * (1 + _MARGIN) and 3 * d * m * (m - 1) // 2 <= _MOST_BINARIES:
        program = _Program(m, times, cost_s)
        better, bound_s = program.solve(time_limit_s)
        bound_s = max(work_s, min(bound_s, cost_s))
        if better is not None and (better_s := _cost_s(better, times)) < cost_s:
            orders, cost_s = better, better_s
    texts = tuple(" ".join(f"{kind.value}{k}" for kind, k in order) for order in orders)
    return FoundOrders(texts, cost_s, min(bound_s, cost_s))


def _like_the_handmade(d: int, m: int, times: Times) -> Iterator[tuple[_Order, ...]]:
    for quarters in range(4, 9):
        warm_ups = [
            min(m - 1, limit - 1, -(-quarters * (d - 1 - stage) // 4))
            for stage, limit in enumerate(times.in_flight)
        ]
        for most in (d - 1, 2 * d - 2, m):
            lags = [
                min(limit - 1 - warm_up, most)
                for warm_up, limit in zip(warm_ups, times.in_flight, strict=True)
            ]
            yield tuple(
                tuple(weights_behind(range(m), warm_up=warm_up, lag=lag))
                for warm_up, lag in zip(warm_ups, lags, strict=True)
            )


def _cost_s(orders: Sequence[_Order], times: Times) -> float:
    """Returns the longest time of a stage, with pure latencies; infinite if stages wait in a circle."""
    d = len(orders)
    done_s: dict[tuple[int, Kind, int], float] = {}
    first_s, now_s, positions = [-1.0] * d, [0.0] * d, [0] * d
    moved = True
    while moved:
        moved = False
        for stage, order in enumerate(orders):
            while positions[stage] < len(order):
                kind, k = order[positions[stage]]
                step = {Kind.FORWARD: -1, Kind.INPUT_GRADIENT: 1}.get(kind, 0)
                start_s = now_s[stage]
                if step and 0 <= stage + step < d:
                    if (stage + step, kind, k) not in done_s:
                        break
                    start_s = max(start_s, done_s[stage + step, kind, k] + times.latency_s)
                first_s[stage] = start_s if first_s[stage] < 0 else first_s[stage]
                now_s[stage] = done_s[stage, kind, k] = start_s + times.of(stage, kind)
                positions[stage] += 1
                moved = True
    if any(position < len(order) for position, order in zip(positions, orders, strict=True)):
        return float("inf")
    return max(end_s - start_s for end_s, start_s in zip(now_s, first_s, strict=True))


class _Program:
    """The integer program: start times, and a binary for each pair of pieces of a stage whose order is open.

    Pieces of one kind are in the order of their microbatches. Open are F_i against I_j, F_i against W_j and
    I_i against W_j, for i > j. W_j must come before F_i if the memory holds no more than i - j microbatches.
    """

    def __init__(self, m: int, times: Times, cost_s: float) -> None:
        self.m, self.times, self.d = m, times, len(times.forward_s)
        self.program = IntegerProgram("zero_bubble")
        hops_s = sum(times.forward_s) + sum(times.input_gradient_s) + 2 * self.d * times.latency_s
        self.horizon_s = cost_s + hops_s
        self.start = {
            (stage, kind, k): self.program.continuous(f"{kind.value}_{stage}_{k}", high=self.horizon_s)
            for stage in range(self.d)
            for kind in _KINDS
            for k in range(m)
        }
        self.cost = self.program.continuous("cost", high=cost_s * (1 - _MARGIN))
        for stage in range(self.d):
            self._follow_data(stage)
            self._take_turns(stage)
            first, last = self.start[stage, Kind.FORWARD, 0], self.start[stage, Kind.WEIGHT_GRADIENT, m - 1]
            length_s = times.of(stage, Kind.WEIGHT_GRADIENT)
            self.program.at_most([(last, 1.0), (first, -1.0), (self.cost, -1.0)], -length_s)
            # A valid cut: a stage cannot take less than its work.
            self.program.at_most([(self.cost, -1.0)], -m * times.work_s(stage))
        self.program.minimise([(self.cost, 1.0)])

    def _before(self, stage: int, first: _Piece, then: _Piece, *, delay_s: float = 0.0, to: int = 0) -> None:
        """Requires `then`, `to` stages further on, to start `delay_s` or more after `first` ends."""
        length_s = self.times.of(stage, first[0]) + delay_s
        terms = [(self.start[stage, *first], 1.0), (self.start[stage + to, *then], -1.0)]
        self.program.at_most(terms, -length_s)

    def _follow_data(self, stage: int) -> None:
        forward, inputs, weights = _KINDS
        for k in range(self.m):
            self._before(stage, (forward, k), (inputs, k))
            self._before(stage, (inputs, k), (weights, k))
            if stage + 1 < self.d:
                latency_s = self.times.latency_s
                self._before(stage, (forward, k), (forward, k), delay_s=latency_s, to=1)
                self._before(stage + 1, (inputs, k), (inputs, k), delay_s=latency_s, to=-1)
        for kind in _KINDS:
            for k, after in pairwise(range(self.m)):
                self._before(stage, (kind, k), (kind, after))

    def _take_turns(self, stage: int) -> None:
        forward, inputs, weights = _KINDS
        limit = self.times.in_flight[stage]
        for early, late in ((inputs, forward), (weights, forward), (weights, inputs)):
            first = dict[tuple[int, int], object]()  # (i, j): late_i goes before early_j
            for i in range(self.m):
                for j in range(i):
                    if late is forward and i - j >= limit:
                        self._before(stage, (early, j), (late, i))
                        continue
                    name = f"{late.value}{i}_{early.value}{j}_{stage}"
                    chosen = first[i, j] = self.program.binary(name)
                    self._either(stage, (late, i), (early, j), chosen)
                    if (i - 1, j) in first:  # what goes before late_i does so before early_j too
                        self.program.at_most([(chosen, 1.0), (first[i - 1, j], -1.0)], 0.0)
                    if (i, j - 1) in first:
                        self.program.at_most([(first[i, j - 1], 1.0), (chosen, -1.0)], 0.0)

    def _either(self, stage: int, one: _Piece, other: _Piece, chosen: object) -> None:
        a, b = self.start[stage, *one], self.start[stage, *other]
        big_s = self.horizon_s + max(self.times.of(stage, kind) for kind in _KINDS)
        one_s, other_s = self.times.of(stage, one[0]), self.times.of(stage, other[0])
        self.program.at_most([(a, 1.0), (b, -1.0), (chosen, big_s)], big_s - one_s)
        self.program.at_most([(b, 1.0), (a, -1.0), (chosen, -big_s)], -other_s)

    def solve(self, time_limit_s: float) -> tuple[tuple[_Order, ...] | None, float]:
        """Returns orders with a lower cost, or None, and a bound on the cost, infinite if none is lower."""
        outcome = self.program.solve(time_limit_s=time_limit_s)
        if not outcome.has_solution:
            is_proof = outcome.status.value == "infeasible"
            return None, float("inf") if is_proof else outcome.bound or 0.0
        orders = []
        for stage in range(self.d):
            pieces = [(kind, k) for k in range(self.m) for kind in _KINDS]
            # Only pieces of length zero can start at the same time.
            key = {piece: outcome.values[f"{piece[0].value}_{stage}_{piece[1]}"] for piece in pieces}
            orders.append(tuple(sorted(pieces, key=lambda piece: (key[piece], piece[1]))))
        return tuple(orders), outcome.bound or 0.0
