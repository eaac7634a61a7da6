"""The loss of one update: known on one rank, on its way to the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from pd2bw_fx.runtime.failure import translated

_TAGS = 2**16  # far more than are ever under way at once


class Loss:
    """Behaves as the float that it is; reading it waits until the last stage has it.

    On all but the rank of the loss, a read right after `step` stands still until the update's last
    microbatch has gone through the whole pipeline. Read the loss of the step before, or every tenth one,
    and no rank waits.
    """

    __slots__ = ("_value", "_wait", "update")

    def __init__(self, update: int, value: Tensor, wait: Callable[[], None] | None = None) -> None:
        self.update = update
        self._value = value
        self._wait = wait

    def wait(self) -> None:
        if self._wait is not None:
            self._wait()
            self._wait = None

    def item(self) -> float:
        self.wait()
        return float(self._value)

    def __float__(self) -> float:
        return self.item()

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec)

    def __repr__(self) -> str:
        return repr(self.item())


class LossPost:
    """Brings the mean loss of each update from the rank that computes it to all others.

    It is sent right after the forward of the update's last microbatch, before anything that may wait for
    another rank: a rank that stands still until it has the loss holds nobody up.
    """

    def __init__(
        self, source: int, rank: int, ranks: Sequence[int], *, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self._source = source
        self._rank = rank
        self._others = [other for other in ranks if other != source]
        self._group = group
        self._device = device
        self._collected: list[Tensor] = []
        self._means: dict[int, tuple[Tensor, list[dist.Work | None]]] = {}

    def collect(self, update: int, loss: Tensor, *, num_microbatches: int) -> None:
        """The loss of one of the update's microbatches; with the last of them, their mean goes out."""
        self._collected.append(loss)
        if len(self._collected) < num_microbatches:
            return
        mean = torch.stack([loss.double() for loss in self._collected]).mean().reshape(1)
        self._collected = []
        with translated(None):
            works = [dist.isend(mean, other, group=self._group, tag=update % _TAGS) for other in self._others]
        self._means[update] = mean, works

    def mean(self, update: int) -> tuple[Tensor, Callable[[], None]]:
        """The update's mean loss, and how to wait until it is there (here, or at all the others)."""
        if self._rank == self._source:
            mean, works = self._means.pop(update)
        else:
            mean = torch.empty(1, dtype=torch.float64, device=self._device)
            with translated(None):
                works = [dist.irecv(mean, self._source, group=self._group, tag=update % _TAGS)]

        def wait() -> None:
            with translated(None if self._source == self._rank else self._source):
                for work in works:
                    assert work is not None
                    work.wait()

        return mean, wait
