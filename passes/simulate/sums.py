"""Gradients that several ranks sum before an update: which ranks have posted, and when the sum is done.

a stage on several ranks       its gradients; a rank posts them with its update of the stage
a parameter of several stages  its gradient (tied weights); a rank that holds it posts with its first update
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class Sum:
    """A sum of gradients over `ranks`, which takes `seconds` once all of them have posted.

    The updates of `stages` wait for it. A rank posts at its update of a stage in `posting`, at the first one
    if it has several.
    """

    ranks: frozenset[int]
    stages: frozenset[int]
    posting: frozenset[int]
    seconds: float


class Sums:
    """All sums of an update, for one update after another."""

    def __init__(self, sums: Iterable[Sum], num_stages: int) -> None:
        every = tuple(sums)
        self._awaited: list[tuple[Sum, ...]] = [
            tuple(each for each in every if stage in each.stages) for stage in range(num_stages)
        ]
        self._posting = [tuple(each for each in every if s in each.posting) for s in range(num_stages)]
        self._posted_s: dict[tuple[Sum, int], dict[int, float]] = {}  # by (sum, version), then by rank

    @property
    def stages(self) -> set[int]:
        """The stages whose updates wait for a sum or post to one."""
        both = zip(self._awaited, self._posting, strict=True)
        return {stage for stage, (awaited, posting) in enumerate(both) if awaited or posting}

    def post(self, stage: int, version: int, rank: int, now_s: float) -> set[int]:
        """Posts for a rank, and returns the ranks that may go on because it was the last one.

        A rank posts once, however often it asks.
        """
        woken = set[int]()
        for each in self._posting[stage]:
            posted_s = self._posted_s.setdefault((each, version), {})
            if rank in each.ranks and rank not in posted_s:
                posted_s[rank] = now_s
                if len(posted_s) == len(each.ranks):
                    woken |= each.ranks
        return woken - {rank}

    def done_s(self, stage: int, version: int, rank: int) -> float | None:
        """Returns when the new version is there, or None while some rank has not posted.

        The links do one sum after another.
        """
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
        """Returns the ranks that a rank's update of the stage waits for."""
        return sorted({other for each in self._awaited[stage] for other in each.ranks} - {rank})


def sums_of(holders: Sequence[set[int]], all_reduce_s: Sequence[float], tied: Iterable[Tied]) -> list[Sum]:
    """Returns the sums of stages that several ranks hold, and those of tied parameters."""
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
    """Parameters that several stages hold, on these ranks, and the seconds to sum their gradients."""

    stages: frozenset[int]
    ranks: frozenset[int]
    seconds: float
