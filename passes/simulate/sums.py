"""Gradients that several ranks add up before an update: who has posted his, and when the sum is there.

a stage on several ranks       its gradients, posted with the stage's update on each of them
a parameter of several stages  its gradient (tied weights), posted with the first update of each rank that
                               holds it
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class Sum:
    """What these ranks need for it once all of them have posted; the updates of `stages` wait for it.
    A rank posts at its update of a stage of `posting`, the first one where it has several.
    """

    ranks: frozenset[int]
    stages: frozenset[int]
    posting: frozenset[int]
    seconds: float


class Sums:
    """All of an update's, one update after another."""

    def __init__(self, sums: Iterable[Sum], num_stages: int) -> None:
        every = tuple(sums)
        self._awaited: list[tuple[Sum, ...]] = [
            tuple(each for each in every if stage in each.stages) for stage in range(num_stages)
        ]
        self._posting = [tuple(each for each in every if s in each.posting) for s in range(num_stages)]
        self._posted_s: dict[tuple[Sum, int], dict[int, float]] = {}  # by sum and version, then rank

    @property
    def stages(self) -> set[int]:
        """Whose updates wait or are waited for."""
        both = zip(self._awaited, self._posting, strict=True)
        return {stage for stage, (awaited, posting) in enumerate(both) if awaited or posting}

    def post(self, stage: int, version: int, rank: int, now_s: float) -> set[int]:
        """The ranks that may go on since this one was the last; it posts once, however often it asks."""
        woken = set[int]()
        for each in self._posting[stage]:
            posted_s = self._posted_s.setdefault((each, version), {})
            if rank in each.ranks and rank not in posted_s:
                posted_s[rank] = now_s
                if len(posted_s) == len(each.ranks):
                    woken |= each.ranks
        return woken - {rank}

    def done_s(self, stage: int, version: int, rank: int) -> float | None:
        """When the new version is there, on links that have one sum after another; None as long as somebody
        has not posted."""
        begin_s, takes_s = 0.0, 0.0
        for each in self._awaited[stage]:
            if rank not in each.ranks:
                continue
            posted_s = self._posted_s.get((each, version), {})
            if len(posted_s) < len(each.ranks):
                return None
            begin_s, takes_s = max(begin_s, *posted_s.values()), takes_s + each.seconds
        return begin_s + takes_s

    def others(self, stage: int, rank: int) -> list[int]:
        """The ranks that a rank's update of the stage waits for."""
        return sorted({other for each in self._awaited[stage] for other in each.ranks} - {rank})


def sums_of(holders: Sequence[set[int]], all_reduce_s: Sequence[float], tied: Iterable[Tied]) -> list[Sum]:
    """Those of stages that several ranks hold, by what each takes, and of tied parameters."""
    own = [
        Sum(frozenset(ranks), frozenset({stage}), frozenset({stage}), all_reduce_s[stage])
        for stage, ranks in enumerate(holders)
        if len(ranks) > 1
    ]
    return own + [
        Sum(
            each.ranks,
            each.stages,
            frozenset(stage for stage, ranks in enumerate(holders) if ranks & each.ranks),
            each.seconds,
        )
        for each in tied
    ]


@dataclass(frozen=True, slots=True)
class Tied:
    """Parameters that these stages hold alike, on these ranks, and what adding up their gradients takes."""

    stages: frozenset[int]
    ranks: frozenset[int]
    seconds: float
