"""The loss of one update, and other numbers of it: known on one rank, on their way to the others."""

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


class Means:
    """Of one update: where the means of what a stage returns arrive, and behind them the first microbatch
    whose loss is no finite number (infinity: none).

    `wait` stands still until they are there and have left this rank, which has them from the beginning where
    it `is_known_here`.
    """

    __slots__ = ("_wait", "is_known_here", "names", "values")

    def __init__(
        self, names: tuple[str, ...], values: Tensor, wait: Callable[[], None] | None, *, is_known_here: bool
    ) -> None:
        self.names = names
        self.values = values
        self.is_known_here = is_known_here
        self._wait = wait

    def wait(self) -> None:
        if self._wait is not None:
            self._wait()
            self._wait = None

    def as_read(self) -> Means:
        """For whoever reads them here: nothing is waited for that is here."""
        return Means(self.names, self.values, None, is_known_here=True) if self.is_known_here else self


class Loss:
    """Behaves as the float that it is; reading it waits until the last stage has it.

    On all but the rank of the loss, a read right after `step` stands still until the update's last
    microbatch has gone through the whole pipeline. Read the loss of the step before, or every tenth one,
    and no rank waits. With pipedream, pb and pipemare, tied parameters or `max_gradient_norm` make the last
    stage wait for gradients that come some steps later: a read before that raises InputError.
    """

    __slots__ = ("_means", "is_of_training", "update")

    def __init__(self, update: int, means: Sequence[Means], *, is_of_training: bool = True) -> None:
        """`means` are those of each stage that returns numbers; the first begin with the loss."""
        self.update = update
        self.is_of_training = is_of_training
        self._means = means

    def wait(self) -> None:
        for means in self._means:
            means.wait()

    def as_read(self) -> Loss:
        """For whoever reads it here: nothing is waited for that is here."""
        return Loss(
            self.update, [means.as_read() for means in self._means], is_of_training=self.is_of_training
        )

    def item(self) -> float:
        self._means[0].wait()
        return float(self._means[0].values[0])

    @property
    def numbers(self) -> dict[str, float]:
        """The other numbers that the model returns, by name: means over the batch, as the loss is."""
        self.wait()
        arrived: dict[str, float] = {}
        for means in self._means:
            arrived |= zip(means.names, means.values[:-1].tolist(), strict=True)
        del arrived[self._means[0].names[0]]
        return arrived

    def broken_microbatch(self) -> int | None:
        """The first whose loss is no finite number."""
        self._means[0].wait()
        first = float(self._means[0].values[-1])
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


class NumberPost:
    """Brings the means of numbers that a stage computes for each microbatch, the loss among them, from its
    ranks (`sources`) to all others; and which is the first microbatch whose first number is not finite.

    A rank sends its part right after its last forward of the update, before anything that may wait for
    another rank: a rank that stands still until it has the loss holds nobody up.
    """

    def __init__(
        self,
        names: Sequence[str],
        sources: Sequence[int],
        rank: int,
        num_ranks: int,
        *,
        tag: tuple[int, int] = (0, 1),
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        """`tag` is this post's number, and how many there are between the same ranks."""
        self.names = tuple(names)
        self._sources = sources
        self._rank = rank
        self._others = [other for other in range(num_ranks) if other != rank]
        self._tag = tag
        self._group = group
        self._device = device
        self._num_microbatches = (1, 0)
        self._collected: dict[int, dict[str, Tensor]] = {}
        self._parts: dict[int, tuple[Tensor, list[dist.Work | None]]] = {}

    @property
    def is_known_here(self) -> bool:
        """This rank computes all of it, and need not wait to read it."""
        return list(self._sources) == [self._rank]

    def expect(self, num_microbatches: int, *, here: int) -> None:
        """How many microbatches the coming update has, and how many of them are this rank's."""
        self._num_microbatches = num_microbatches, here

    def collect(self, microbatch: int, name: str, number: Tensor) -> None:
        """A number of one of this rank's microbatches; with the update's last, their sums go out."""
        everywhere, here = self._num_microbatches
        self._collected.setdefault(microbatch, {})[name] = number
        whole = [numbers for numbers in self._collected.values() if len(numbers) == len(self.names)]
        if len(whole) == here:
            self._send(microbatch // everywhere)

    def means(self, update: int) -> Means:
        num_microbatches, _ = self._num_microbatches
        own = self._rank  # a loss may be kept for longer than the post with its process group
        works: list[tuple[int, dist.Work | None]] = []
        parts: list[Tensor] = []
        for source in self._sources:
            if source == own:
                if update not in self._parts:
                    self._send(update)  # an evaluation had nothing for this replica
                part, sent = self._parts.pop(update)
                works += [(source, work) for work in sent]
            else:
                part = torch.empty(len(self.names) + 1, dtype=torch.float64, device=self._device)
                with translated(source):
                    work = dist.irecv(part, source, group=self._group, tag=self._tag_of(update))
                works.append((source, work))
            parts.append(part)
        arrived = torch.empty(len(self.names) + 1, dtype=torch.float64, device=self._device)

        def fill() -> None:
            of_ranks = torch.stack(parts)
            arrived[:-1] = of_ranks[:, :-1].sum(0) / num_microbatches
            arrived[-1] = of_ranks[:, -1].min()

        def wait() -> None:
            for source, work in works:
                assert work is not None
                with translated(None if source == own else source):
                    work.wait()
            fill()

        if self.is_known_here:
            fill()
        return Means(self.names, arrived, wait, is_known_here=self.is_known_here)

    def _send(self, update: int) -> None:
        part = torch.tensor([0.0] * len(self.names) + [math.inf], dtype=torch.float64)
        if self._collected:
            microbatches = torch.tensor(list(self._collected), dtype=torch.float64)
            rows = [[own[name].double() for name in self.names] for own in self._collected.values()]
            numbers = torch.stack([torch.stack(row) for row in rows])
            broken = microbatches.to(numbers.device).where(~numbers[:, 0].isfinite(), math.inf)
            part = torch.cat([numbers.sum(0), broken.min()[None]])
        part = part.to(self._device)
        self._collected = {}
        tag = self._tag_of(update)
        with translated(None):
            works = [dist.isend(part, other, group=self._group, tag=tag) for other in self._others]
        self._parts[update] = part, works

    def _tag_of(self, update: int) -> int:
        number, count = self._tag
        return update % (_TAGS // count) * count + number
