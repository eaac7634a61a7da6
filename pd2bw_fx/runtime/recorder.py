"""Records a rank's actions with their beginnings and ends, on one clock for all ranks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from pd2bw_fx.actions import Action, Kind
from pd2bw_fx.metrics import Record
from pd2bw_fx.runtime.update import Step

_EXCHANGES = 8


class Recorder:
    """Keeps the actions of the last `updates` calls; an action that waits for a peer lasts until it came.

    `offset_s` is added to this process's clock, which gives rank 0's. A GPU goes on after a call has
    returned: its actions end, and the next ones begin, when it has done them.
    """

    def __init__(self, rank: int, updates: int, *, offset_s: float, device: torch.device) -> None:
        self._rank = rank
        self._offset_s = offset_s
        self._device = device
        self._calls: deque[list[tuple[Action, float, float]]] = deque(maxlen=updates)
        self._put_off: dict[int, list[Action]] = {}  # by version: updates that are still to be recorded

    def begin(self) -> None:
        """Begins a call of the engine."""
        self._calls.append([])

    def note(self, action: Action, began_s: float, steps: Iterable[Step]) -> None:
        """Records an action that has ended, and the `steps` made in it, by `time.perf_counter`.

        A pending update is recorded when it is made: as a wait for other ranks, and a step.
        """
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        is_update = action.kind is Kind.UPDATE
        is_made = False
        for step in steps:
            is_made = is_update and step.version == action.version
            if not is_made:
                self._tell_put_off(step)
                began_s = step.ended_s
        if is_update and not is_made:
            self._put_off.setdefault(action.version, []).append(action)
            return
        for other in self._put_off.pop(action.version, ()) if is_update else ():
            self._calls[-1].append((other, began_s, began_s))
        self._calls[-1].append((action, began_s, time.perf_counter()))

    def note_rest(self, steps: Iterable[Step]) -> None:
        """Records steps that were made after the last action."""
        for step in steps:
            self._tell_put_off(step)

    def _tell_put_off(self, step: Step) -> None:
        """Records an update that was pending: the rank's stages step together, the last one for all."""
        *others, last = self._put_off.pop(step.version)
        told = self._calls[-1]
        told.append((replace(last, kind=Kind.ALL_REDUCE), step.began_s, step.added_s))
        told += [(other, step.added_s, step.added_s) for other in others]
        told.append((last, step.added_s, step.ended_s))

    def __iter__(self) -> Iterator[Record]:
        for call in self._calls:
            for action, start_s, end_s in call:
                yield Record(self._rank, str(action), start_s + self._offset_s, end_s + self._offset_s)


def offset_to_first_rank(rank: int, num_ranks: int, group: dist.ProcessGroup) -> float:
    """Returns what to add to `time.perf_counter` here for rank 0's, by the quickest of a few exchanges.

    Half of its round trip bounds the error (Cristian 1989). If no offset at all is within that bound, it is
    zero: processes of one machine share a clock. All ranks call this at the same time.
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
        question = _time(0.0)
        dist.recv(question, other, group=group)
        dist.send(_time(time.perf_counter()), other, group=group)


def _asked(group: dist.ProcessGroup) -> float:
    quickest_s, offset_s = float("inf"), 0.0
    for _ in range(_EXCHANGES):
        answer = _time(0.0)
        began_s = time.perf_counter()
        dist.send(_time(0.0), 0, group=group)
        dist.recv(answer, 0, group=group)
        ended_s = time.perf_counter()
        if ended_s - began_s < quickest_s:
            quickest_s, offset_s = ended_s - began_s, float(answer) - (began_s + ended_s) / 2
    return offset_s if abs(offset_s) > quickest_s / 2 else 0.0


def _time(seconds: float) -> Tensor:
    return torch.tensor([seconds], dtype=torch.float64, device="cpu")
