"""The loss of one update: known on one rank, on its way to the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pd2bw_fx.runtime.failure import translated

_TAGS = 2**16  # far more than are ever under way at once


def _of_float(name: str) -> Callable[..., Any]:
    """The operator of that name, as floats have it."""
    operator = getattr(float, name)

    def method(*operands: Any) -> Any:
        return operator(*(each.item() if isinstance(each, Loss) else each for each in operands))

    return method


class Loss:
    """Behaves as the float that it is; reading it waits until the last stage has it.

    On all but the rank of the loss, a read right after `step` stands still until the update's last
    microbatch has gone through the whole pipeline. Read the loss of the step before, or every tenth one,
    and no rank waits.
    """

    __slots__ = ("_arrived", "_wait", "is_of_training", "update")

    def __init__(
        self,
        update: int,
        arrived: Tensor,
        wait: Callable[[], None] | None = None,
        *,
        is_of_training: bool = True,
    ) -> None:
        self.update = update
        self.is_of_training = is_of_training
        self._arrived = arrived
        self._wait = wait

    def wait(self) -> None:
        if self._wait is not None:
            self._wait()
            self._wait = None

    def item(self) -> float:
        self.wait()
        return float(self._arrived[0])

    def broken_microbatch(self) -> int | None:
        """The first whose loss is no finite number."""
        self.wait()
        first = float(self._arrived[1])
        return int(first) if math.isfinite(first) else None

    def __float__(self) -> float:
        return self.item()

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec)

    def __repr__(self) -> str:
        return repr(self.item())

    __add__ = _of_float("__add__")
    __radd__ = _of_float("__radd__")
    __sub__ = _of_float("__sub__")
    __rsub__ = _of_float("__rsub__")
    __mul__ = _of_float("__mul__")
    __rmul__ = _of_float("__rmul__")
    __truediv__ = _of_float("__truediv__")
    __rtruediv__ = _of_float("__rtruediv__")
    __pow__ = _of_float("__pow__")
    __neg__ = _of_float("__neg__")
    __abs__ = _of_float("__abs__")
    __round__ = _of_float("__round__")
    __bool__ = _of_float("__bool__")
    __lt__ = _of_float("__lt__")
    __le__ = _of_float("__le__")
    __gt__ = _of_float("__gt__")
    __ge__ = _of_float("__ge__")
    __eq__ = _of_float("__eq__")
    __hash__ = _of_float("__hash__")


class LossPost:
    """Brings the mean loss of each update from the ranks that compute it (`sources`) to all others, and which
    microbatch's is the first that is no finite number (infinity: none's).

    A rank sends its part right after its last forward of the update, before anything that may wait for
    another rank: a rank that stands still until it has the loss holds nobody up.
    """

    def __init__(
        self,
        sources: Sequence[int],
        rank: int,
        num_ranks: int,
        *,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._sources = sources
        self._rank = rank
        self._others = [other for other in range(num_ranks) if other != rank]
        self._group = group
        self._device = device
        self._num_microbatches = (1, 0)
        self._collected: list[tuple[int, Tensor]] = []
        self._parts: dict[int, tuple[Tensor, list[dist.Work | None]]] = {}

    @property
    def is_known_here(self) -> bool:
        """This rank computes all of it, and need not wait to read it."""
        return list(self._sources) == [self._rank]

    def expect(self, num_microbatches: int, *, here: int) -> None:
        """How many microbatches the coming update has, and of how many this rank computes the loss."""
        self._num_microbatches = num_microbatches, here

    def collect(self, microbatch: int, loss: Tensor) -> None:
        """The loss of one of this rank's microbatches; with the update's last, their sum goes out."""
        everywhere, here = self._num_microbatches
        self._collected.append((microbatch, loss))
        if len(self._collected) == here:
            self._send(microbatch // everywhere)

    def mean(self, update: int) -> tuple[Tensor, Callable[[], None]]:
        """A place for the update's mean loss and the first microbatch without one, and how to wait until they
        are there and have left this rank."""
        num_microbatches, _ = self._num_microbatches
        works: list[tuple[int, dist.Work | None]] = []
        parts: list[Tensor] = []
        for source in self._sources:
            if source == self._rank:
                if update not in self._parts:
                    self._send(update)  # an evaluation had nothing for this replica
                part, sent = self._parts.pop(update)
                works += [(source, work) for work in sent]
            else:
                part = torch.empty(2, dtype=torch.float64, device=self._device)
                with translated(source):
                    work = dist.irecv(part, source, group=self._group, tag=update % _TAGS)
                works.append((source, work))
            parts.append(part)
        arrived = torch.empty(2, dtype=torch.float64, device=self._device)

        def fill() -> None:
            sums, broken = torch.stack(parts, dim=1)
            arrived[0] = sums.sum() / num_microbatches
            arrived[1] = broken.min()

        def wait() -> None:
            for source, work in works:
                assert work is not None
                with translated(None if source == self._rank else source):
                    work.wait()
            fill()

        if self.is_known_here:
            fill()
        return arrived, wait

    def _send(self, update: int) -> None:
        part = torch.tensor([0.0, math.inf], dtype=torch.float64)
        if self._collected:
            numbers = torch.tensor([number for number, _ in self._collected], dtype=torch.float64)
            losses = torch.stack([loss.double() for _, loss in self._collected])
            broken = numbers.to(losses.device).where(~losses.isfinite(), math.inf)
            part = torch.stack([losses.sum(), broken.min()])
        part = part.to(self._device)
        self._collected = []
        with translated(None):
            works = [dist.isend(part, other, group=self._group, tag=update % _TAGS) for other in self._others]
        self._parts[update] = part, works
