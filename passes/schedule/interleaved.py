"""Interleaved 1F1B (arXiv 2104.04473): v stages ("chunks") on each of d ranks, placed round robin.

    d = 2, v = 2, m = 2: rank 0 has stages 0 and 2, rank 1 has 1 and 3;  a.k is microbatch k at stage a

    rank 0   F0.0 F0.1 F2.0 F2.1 .... B2.0 .... B2.1 B0.0 .... B0.1 U     bubble (d - 1) / (v m)
    rank 1   .... F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 B1.0 .... B1.1 U

The order is that of torch.distributed.pipelining's ScheduleInterleaved1F1B, for any m that is a multiple of
its number of rounds, max(1, m // d).
"""

from __future__ import annotations

from collections.abc import Iterator

from pd2bw_fx.actions import Kind, Shape
from pd2bw_fx.errors import InputError

from .method import Cell, Method, Placing


class Interleaved(Method):
    """Runs microbatches in rounds of about d, each through a rank's first stage, then its second, .."""

    name = "interleaved"
    placing = Placing.ROUND

    def check(self, shape: Shape) -> None:
        num_stages, chunks, m = shape.num_stages, shape.chunks, shape.microbatches_per_update
        if num_stages < 1 or m < 1 or chunks < 1:
            raise InputError(
                f"found {num_stages} stages, {chunks} on a rank, and {m} microbatches an update; all must be "
                "1 or more"
            )
        if num_stages % chunks or num_stages == chunks:
            raise InputError(
                f"interleaved has chunks={chunks} stages on each of two or more ranks, and the cut has "
                f"{num_stages}; try num_stages={max(2, -(-num_stages // chunks)) * chunks}, or another chunks"
            )
        if shape.replicas is not None and set(shape.replicas) != {1}:
            raise InputError("interleaved runs without replicas; leave replicas out")
        if shape.slack or shape.vertical_sync:
            raise InputError("slack and vertical_sync are no options of interleaved; leave them out")
        d = self.num_ranks(shape)
        if m % self._rounds(shape):
            raise InputError(
                f"interleaved with {m} microbatches on {d} ranks: {self._rounds(shape)} rounds cannot share "
                f"them equally; try microbatches_per_update={m // d * d}"
            )

    def num_ranks(self, shape: Shape) -> int:
        return shape.num_stages // shape.chunks

    def stages_of(self, shape: Shape, rank: int) -> tuple[int, ...]:
        return tuple(range(rank, shape.num_stages, self.num_ranks(shape)))

    def rank_of(self, shape: Shape, stage: int, microbatch: int) -> int:
        return stage % self.num_ranks(shape)

    def _rounds(self, shape: Shape) -> int:
        return max(1, shape.microbatches_per_update // self.num_ranks(shape))

    def order(
        self, shape: Shape, rank: int, updates: range, *, drain: bool, empty_before: int
    ) -> Iterator[Cell]:
        d, v, m = self.num_ranks(shape), shape.chunks, shape.microbatches_per_update
        per_round = m // self._rounds(shape)
        warm_up = min((v - 1) * per_round + 2 * (d - 1 - rank), v * m)

        def piece(position: int) -> tuple[int, int]:
            """Returns which of the rank's stages, and which microbatch of the update, is at this position."""
            round_, rest = divmod(position, v * per_round)
            return rest // per_round, round_ * per_round + rest % per_round

        for update in updates:
            for position in range(v * m + warm_up):
                if position < v * m:
                    chunk, k = piece(position)
                    yield Kind.FORWARD, chunk * d + rank, update * m + k
                if position >= warm_up:
                    chunk, k = piece(position - warm_up)
                    yield Kind.BACKWARD, (v - 1 - chunk) * d + rank, update * m + k
            for stage in self.stages_of(shape, rank):
                yield Kind.UPDATE, stage, update
