"""The loss of one update, and its other numbers, which one rank computes and sends to all others."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from pd2bw_fx.errors import InputError
from pd2bw_fx.runtime.failure import calls_apart, name_peer_in_errors
from pd2bw_fx.runtime.same_batches import UNKNOWN, require_alike
from pd2bw_fx.units import counted

_TAGS = 2**16  # far more than there are messages on their way at once
Part = tuple[Sequence[int], Tensor]


def _of_float(name: str) -> Callable[..., Any]:
    """Returns the operator of that name, as floats have it."""
    operator = getattr(float, name)

    def method(*operands: Any) -> Any:
        return operator(*(each.item() if isinstance(each, Loss) else each for each in operands))

    return method


class Means:
    """The means over an update's microbatches of the numbers that a stage returns, once they have arrived.

    `parts` holds, for each of the stage's ranks, the numbers of its microbatches, and a tensor with a row for
    each of them and a column for each of `names`. `wait` returns when all parts are here and this rank's own
    have left it. `is_known_here`: this rank has computed all of them.
    """

    __slots__ = ("_wait", "is_known_here", "names", "parts")

    def __init__(
        self, names: tuple[str, ...], parts: Sequence[Part], wait: Callable[[], None], *, is_known_here: bool
    ) -> None:
        self.names = names
        self.parts = parts
        self.is_known_here = is_known_here
        self._wait: Callable[[], None] | None = wait

    def wait(self) -> None:
        if self._wait is not None:
            self._wait()
            self._wait = None

    def values(self) -> list[float]:
        """Returns the means in the order of the names."""
        rows = [row for _, tensor in self.parts for row in tensor.tolist()]
        return [sum(column) / len(rows) for column in zip(*rows, strict=True)]

    def first_broken(self) -> int | None:
        """Returns the first microbatch whose first number is not finite."""
        broken = (
            number
            for numbers, tensor in self.parts
            for number, row in zip(numbers, tensor.tolist(), strict=True)
            if not math.isfinite(row[0])
        )
        return min(broken, default=None)

    def as_read(self) -> Means:
        """Returns the means for a reader on this rank, who need not wait for what was computed here."""
        return Means(self.names, self.parts, _nothing, is_known_here=True) if self.is_known_here else self


def _nothing() -> None:
    """Waits for nothing."""


class _LikeATensor:
    """Methods of tensors that scripts call on a loss before they read it."""

    __slots__ = ()

    def detach(self, *_: Any, **__: Any) -> Self:
        return self

    cpu = cuda = to = float = double = clone = mean = __copy__ = __deepcopy__ = detach
    data = property(detach)

    def backward(self, *_: Any, **__: Any) -> None:
        """Raises InputError: the engine does the backward."""
        raise InputError(
            "engine.step(batch) has done the forward, and does the backward and the optimizer's step; leave "
            "loss.backward(), optimizer.step() and optimizer.zero_grad() out"
        )


class Loss(_LikeATensor):
    """The loss of an update. It behaves like a float, also to numpy, and like a tensor to torch's functions.

    Reading it waits until the last stage has computed it. What scripts do with a loss that is a tensor
    without reading it (`detach()`, `cpu()`, `float()`) returns the loss itself. pickle and torch.save write a
    tensor of its value. Where only a float will do (json.dumps, torch.tensor, statistics.mean), pass
    float(loss).

    On all ranks but that of the loss, a read right after `step` waits until the update's last microbatch has
    gone through the whole pipeline. Read the loss of the step before, or every tenth one, and no rank waits.
    With pipedream, pb and pipemare, tied parameters or `max_gradient_norm` make the last stage wait for
    gradients that come some steps later: a read before that raises InputError.
    """

    __slots__ = ("_means", "is_of_training", "update")

    def __init__(self, update: int, means: Sequence[Means], *, is_of_training: bool = True) -> None:
        """Takes the means of each stage that returns numbers; the first of the first ones is the loss."""
        self.update = update
        self.is_of_training = is_of_training
        self._means = means

    def wait(self) -> None:
        """Returns once the value is on this rank."""
        for means in self._means:
            means.wait()

    def as_read(self) -> Loss:
        """Returns the loss for a reader on this rank, who need not wait for what was computed here."""
        return Loss(
            self.update, [means.as_read() for means in self._means], is_of_training=self.is_of_training
        )

    def item(self) -> float:
        """Returns the value, once it is on this rank."""
        self._means[0].wait()
        return self._means[0].values()[0]

    def tolist(self) -> Any:
        """Returns `item()`, like a tensor's."""
        return self.item()

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = pytree.tree_map_only(Loss, Loss._as_tensor, (args, kwargs or {}))
        return function(*given[0], **given[1])

    def _as_tensor(self) -> Tensor:
        return torch.tensor(self.item(), device="cpu")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles the loss as a tensor: it waits for this process's links, and torch.load refuses our
        classes.
        """
        return torch.tensor(self.item(), dtype=torch.float64, device="cpu").__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    @property
    def numbers(self) -> dict[str, float]:
        """The model's other outputs that are numbers, by name: means over the microbatches, like the loss.

        The mean of a count is the count in a microbatch, that of a bool the share in which it is true.
        """
        self.wait()
        arrived: dict[str, float] = {}
        for means in self._means:
            arrived |= zip(means.names, means.values(), strict=True)
        del arrived[self._means[0].names[0]]
        return arrived

    def broken_microbatch(self) -> int | None:
        """Returns the first microbatch whose loss is not finite."""
        self._means[0].wait()
        return self._means[0].first_broken()

    def __float__(self) -> float:
        return self.item()

    def __int__(self) -> int:
        return int(self.item())

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec)

    def __repr__(self) -> str:
        return repr(self.item())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.asarray(self.item(), dtype=dtype)

    __add__ = _of_float("__add__")
    __radd__ = _of_float("__radd__")
    __sub__ = _of_float("__sub__")
    __rsub__ = _of_float("__rsub__")
    __mul__ = _of_float("__mul__")
    __rmul__ = _of_float("__rmul__")
    __truediv__ = _of_float("__truediv__")
    __rtruediv__ = _of_float("__rtruediv__")
    __floordiv__ = _of_float("__floordiv__")
    __rfloordiv__ = _of_float("__rfloordiv__")
    __mod__ = _of_float("__mod__")
    __rmod__ = _of_float("__rmod__")
    __divmod__ = _of_float("__divmod__")
    __rdivmod__ = _of_float("__rdivmod__")
    __pow__ = _of_float("__pow__")
    __rpow__ = _of_float("__rpow__")
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
        value = number.to(torch.float64, copy=True) if is_on_gpu else number.item()
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
