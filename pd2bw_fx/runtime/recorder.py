"""Who did what when: the actions of a rank with their beginnings and ends, on one clock for all ranks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator

import torch
import torch.distributed as dist

from pd2bw_fx.actions import Action
from pd2bw_fx.metrics import Record

_EXCHANGES = 8


class Recorder:
    """Keeps the actions of the last `updates` calls; an action that waits for a peer lasts until it came.

    `offset_s` is added to this process's clock, which gives rank 0's.
    """

    def __init__(self, rank: int, updates: int, *, offset_s: float) -> None:
        self._rank = rank
        self._offset_s = offset_s
        self._calls: deque[list[tuple[Action, float, float]]] = deque(maxlen=updates)

    def begin(self) -> list[tuple[Action, float, float]]:
        """Where the actions of a call are noted down, with the seconds of `time.perf_counter`."""
        self._calls.append([])
        return self._calls[-1]

    def __iter__(self) -> Iterator[Record]:
        for call in self._calls:
            for action, start_s, end_s in call:
                yield Record(self._rank, str(action), start_s + self._offset_s, end_s + self._offset_s)


def offset_to_first_rank(rank: int, num_ranks: int, group: dist.ProcessGroup) -> float:
    """What to add to `time.perf_counter` here for rank 0's, by the quickest of a few exchanges.

    Half of its round trip bounds the error (Cristian 1989). All ranks call this at the same time.
    """
    offset_s = 0.0
    for other in range(1, num_ranks):
        if rank == 0:
            _answer(other, group)
        elif rank == other:
            offset_s = _asked(group)
    return offset_s


def _answer(other: int, group: dist.ProcessGroup) -> None:
    for _ in range(_EXCHANGES):
        question = torch.zeros(1, dtype=torch.float64)
        dist.recv(question, other, group=group)
        dist.send(torch.tensor([time.perf_counter()], dtype=torch.float64), other, group=group)


def _asked(group: dist.ProcessGroup) -> float:
    quickest_s, offset_s = float("inf"), 0.0
    for _ in range(_EXCHANGES):
        answer = torch.zeros(1, dtype=torch.float64)
        began_s = time.perf_counter()
        dist.send(torch.zeros(1, dtype=torch.float64), 0, group=group)
        dist.recv(answer, 0, group=group)
        ended_s = time.perf_counter()
        if ended_s - began_s < quickest_s:
            quickest_s, offset_s = ended_s - began_s, float(answer) - (began_s + ended_s) / 2
    return offset_s
