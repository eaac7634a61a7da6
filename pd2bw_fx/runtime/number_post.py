"""The loss of an update, and its other numbers, on their way from the ranks that compute them to others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from pd2bw_fx.errors import InputError
from pd2bw_fx.runtime.failure import calls_apart, name_peer_in_errors
from pd2bw_fx.runtime.loss import Means, Part
from pd2bw_fx.runtime.same_batches import UNKNOWN, require_alike
from pd2bw_fx.units import counted

_TAGS = 2**16  # far more than there are messages on their way at once


class NumberPost:
    """Sends the numbers that a stage computes for each microbatch, the loss among them, to all other ranks.

    `sources` are the stage's ranks. A rank sends its part right after its last forward of the update, before
    anything that may wait for another rank: so a rank that waits for the loss does not block the others. A
    GPU computes the numbers later than its rank launches it; they are then sent before the rank waits next.
    The means are computed from them by the rank that reads them, when it reads them.

    Each message also says which call it belongs to, an update or an evaluation. A rank that makes a call
    alone may not block any other, and those would take its numbers for the ones of their next call. And it
    has digests of the sender's batch, if it knows them, which the others compare with theirs.

        message   | loss, number, .. of the first microbatch | .. of the second | .. | digest, .. | the call |
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
        named: Callable[[int], str] = "rank {}".format,
        inputs: Sequence[str] = (),
    ) -> None:
        """Takes `tag`, this post's number and how many there are between the same ranks.

        `group` moves tensors of the CPU; `named` names a rank with its stages; `inputs` are those of the
        batch that are compared.
        """
        self.names = tuple(names)
        self._inputs = tuple(inputs)
        self._digests: dict[str, int] = dict.fromkeys(self._inputs, UNKNOWN)
        self._sources = sources
        self._rank = rank
        self._others = [other for other in range(num_ranks) if other != rank]
        self._tag = tag
        self._group = group
        self._named = named
        self._update = 0
        self._training = True
        self._expected: Mapping[int, Sequence[int]] = {}
        self._collected: dict[int, dict[str, Tensor | float]] = {}
        self._coming: tuple[Tensor, torch.cuda.Event] | None = None  # what the GPU has still to compute
        self._sent: tuple[Tensor, list[dist.Work | None]] | None = None

    @property
    def is_known_here(self) -> bool:
        """Whether this rank computes all of the numbers, and need not wait to read them."""
        return list(self._sources) == [self._rank]

    def expect(
        self,
        update: int,
        numbers: Mapping[int, Sequence[int]],
        *,
        training: bool = True,
        digests: Mapping[str, int] | None = None,
    ) -> None:
        """Prepares for an update, or an evaluation before it: `numbers` are the microbatches by source.

        `digests` are those of the batch's inputs, None where this rank does not have the whole batch.
        """
        self._update, self._expected, self._training = update, numbers, training
        self._digests = {name: (digests or {}).get(name, UNKNOWN) for name in self._inputs}

    def collect(self, microbatch: int, name: str, number: Tensor) -> None:
        """Takes a number of one of this rank's microbatches; sends all when the update has its last one."""
        own = self._expected[self._rank]
        # Its value now, for it may be part of a buffer that the next microbatch writes.
        is_on_gpu = number.device.type == "cuda"
        value = number.detach().to(torch.float64, copy=True) if is_on_gpu else number.item()
        self._collected.setdefault(microbatch, {})[name] = value
        if len(self._collected) == len(own) and all(
            len(numbers) == len(self.names) for numbers in self._collected.values()
        ):
            self._bring(own)

    def send(self) -> None:
        """Sends the numbers that the GPU had still to compute."""
        if self._coming is not None:
            (part, is_there), self._coming = self._coming, None
            is_there.synchronize()
            self._send(part)

    def means(self) -> Means:
        """Returns the means of the update that was expected last, whose forwards this rank has done.

        A rank that waits for them raises InputError where another rank has sent those of another call.
        """
        self.send()
        works: list[tuple[int | None, dist.Work | None]] = []
        parts: list[Part] = []
        received: dict[int, Tensor] = {}
        own, digests = self._call(), self._digests
        for source in self._sources:
            numbers = self._expected[source]
            if not numbers:  # an evaluation has nothing for this replica
                continue
            if source == self._rank:
                assert self._sent is not None
                message, sent = self._sent
                works += [(None, work) for work in sent]
            else:
                size = len(numbers) * len(self.names) + len(self._inputs) + 1
                message = received[source] = torch.empty(size, dtype=torch.float64, device="cpu")
                with name_peer_in_errors(source):
                    work = dist.irecv(message, source, group=self._group, tag=self._tag_of_update())
                works.append((source, work))
            rows = message[: len(numbers) * len(self.names)].view(len(numbers), len(self.names))
            parts.append((numbers, rows))

        def wait() -> None:
            for source, work in works:
                assert work is not None
                with name_peer_in_errors(source):
                    work.wait()
            for source, message in received.items():
                here, there = (self._named(rank) for rank in (self._rank, source))
                *theirs, call = map(int, message[-1 - len(digests) :].tolist())
                if call != own:
                    raise InputError(calls_apart(here, _told(own), there, _told(call)))
                given = dict(zip(digests, theirs, strict=True))
                require_alike((here, digests), (there, given), _told(own))

        return Means(self.names, parts, wait, is_known_here=self.is_known_here)

    def _bring(self, numbers: Sequence[int]) -> None:
        ordered = [self._collected[number][name] for number in numbers for name in self.names]
        self._collected = {}
        on_gpu = [number for number in ordered if isinstance(number, Tensor)]
        is_on_gpu = len(on_gpu) == len(ordered)
        part = (
            torch.stack(on_gpu)
            if is_on_gpu  # a forward may make some on the CPU
            else torch.tensor([float(number) for number in ordered], dtype=torch.float64, device="cpu")
        )
        told = torch.tensor([*self._digests.values(), self._call()], dtype=torch.float64, device="cpu")
        size = len(part) + len(told)
        message = torch.empty(size, dtype=torch.float64, device="cpu", pin_memory=is_on_gpu)
        message[: len(part)].copy_(part, non_blocking=is_on_gpu)
        message[len(part) :] = told
        if not is_on_gpu:
            self._send(message)
            return
        is_there = torch.cuda.Event()  # type: ignore[no-untyped-call]
        is_there.record(torch.cuda.current_stream(part.device))
        self._coming = message, is_there

    def _send(self, message: Tensor) -> None:
        tag = self._tag_of_update()
        with name_peer_in_errors(None):
            works = [dist.isend(message, other, group=self._group, tag=tag) for other in self._others]
        self._sent = message, works

    def _call(self) -> int:
        """Returns 2 u for update u, 2 u + 1 for an evaluation before it."""
        return 2 * self._update + (not self._training)

    def _tag_of_update(self) -> int:
        number, count = self._tag
        return self._update % (_TAGS // count) * count + number


def _told(call: int) -> str:
    return (
        f"in update {call // 2}"
        if call % 2 == 0
        else f"in an evaluation after {counted(call // 2, 'update')}"
    )
