"""Chimera (arXiv 2107.06925): two synchronous pipelines in opposite directions over the same d ranks, d even.

The down pipeline has stage s on rank s, the up pipeline on rank d - 1 - s. So the weights are held twice, and
the gradients of an update are summed over the two. Each pipeline runs half of the update's microbatches as
1F1B does (here 0, 1 down and 2, 3 up; F = B; f and b are of the rank's stage in the up pipeline):

    rank 0   F0 F1 .. f2 b2 f3 b3 B0 .. B1
    rank 1   .. F0 f2 F1 f3 b2 B0 b3 B1 ..       ranks 2 and 3 mirror ranks 1 and 0
                                                 m = d = 4: 10 slots, where 1F1B takes 14

The merged order is made once, from pieces as they become ready in slots of equal length. It takes 2m + d - 2
slots if F = B. If B = 2F it takes 3m + 2(d - 2) for m = d; more microbatches, joined this way, have bubbles
between them, as the paper says of its direct concatenation.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from pd2bw_fx.actions import Kind, Shape
from pd2bw_fx.errors import InputError

from .method import Cell, Method, Placing

_Piece = tuple[Kind, int, int, int]  # kind, direction (0 down, 1 up), stage, microbatch of the direction


class Chimera(Method):
    name = "chimera"
    placing = Placing.BOTH_WAYS

    def check(self, shape: Shape) -> None:
        d, m = shape.num_stages, shape.microbatches_per_update
        if d < 2 or d % 2:
            smaller = f" or {d - 1}" if d > 2 else ""
            raise InputError(
                f"chimera runs two pipelines in opposite directions over an even number of stages, and this "
                f"cut has {d}; try num_stages={d + 1}{smaller}, or method='1f1b'"
            )
        if m < 2 or m % 2:
            raise InputError(
                f"chimera gives each of its two pipelines half of an update's {m} microbatches; try "
                f"microbatches_per_update={m + 1}"
            )
        if shape.replicas is not None and set(shape.replicas) != {1}:
            raise InputError("chimera holds every stage twice, and runs without replicas; leave replicas out")
        if shape.chunks != 1 or shape.slack or shape.vertical_sync:
            raise InputError("chunks, slack and vertical_sync are no options of chimera; leave them out")

    def num_ranks(self, shape: Shape) -> int:
        return shape.num_stages

    def stages_of(self, shape: Shape, rank: int) -> tuple[int, ...]:
        return tuple(sorted((rank, shape.num_stages - 1 - rank)))

    def rank_of(self, shape: Shape, stage: int, microbatch: int) -> int:
        goes_up = microbatch % shape.microbatches_per_update >= shape.microbatches_per_update // 2
        return shape.num_stages - 1 - stage if goes_up else stage

    def ranks_of(self, shape: Shape, stage: int) -> tuple[int, ...]:
        return tuple(sorted((stage, shape.num_stages - 1 - stage)))

    def order(
        self, shape: Shape, rank: int, updates: range, *, drain: bool, empty_before: int
    ) -> Iterator[Cell]:
        half = shape.microbatches_per_update // 2
        pieces = _merged(shape.num_stages, half)[rank]
        for update in updates:
            for kind, direction, stage, microbatch in pieces:
                yield kind, stage, (2 * update + direction) * half + microbatch
            for stage in self.stages_of(shape, rank):
                yield Kind.UPDATE, stage, update


@lru_cache(maxsize=64)
def _merged(d: int, half: int) -> tuple[tuple[_Piece, ...], ...]:
    """Returns each rank's order of an update: in every slot the first ready piece of its two stages.

    Earlier microbatches come first, then later stages, then backwards.
    """
    begun: dict[tuple[Kind, int, int], int] = {}  # microbatches by kind, direction and stage
    done = set[_Piece]()
    orders: list[list[_Piece]] = [[] for _ in range(d)]

    def ready(rank: int) -> Iterator[_Piece]:
        for direction, stage in ((0, rank), (1, d - 1 - rank)):
            forwards = begun.get((Kind.FORWARD, direction, stage), 0)
            backwards = begun.get((Kind.BACKWARD, direction, stage), 0)
            received = stage == 0 or (Kind.FORWARD, direction, stage - 1, forwards) in done
            if forwards < half and forwards - backwards < d - stage and received:
                yield Kind.FORWARD, direction, stage, forwards
            is_last = stage == d - 1
            needed = (Kind.FORWARD, direction, stage, backwards)
            if backwards < half and (
                needed in done if is_last else (Kind.BACKWARD, direction, stage + 1, backwards) in done
            ):
                yield Kind.BACKWARD, direction, stage, backwards

    def urgency(piece: _Piece) -> tuple[int, int, bool]:
        kind, _, stage, microbatch = piece
        return microbatch, -stage, kind is Kind.FORWARD

    while any(len(order) < 4 * half for order in orders):
        slot = [min(ready(rank), key=urgency, default=None) for rank in range(d)]
        assert any(slot), "no rank can go on"
        for order, piece in zip(orders, slot, strict=True):
            if piece is not None:
                kind, direction, stage, microbatch = piece
                order.append(piece)
                begun[kind, direction, stage] = microbatch + 1
                done.add(piece)
    return tuple(map(tuple, orders))
