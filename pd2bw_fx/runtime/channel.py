"""Links between ranks: tensors of one microbatch at a time, over torch.distributed's point-to-point calls.

Both ends of a link know the same values in the same order. Their shapes and types are agreed when
microbatches of a new size come by: a header goes before the first one, and from then on both ends know what
follows.

    sender     header F0  F1  F2 ..         receiver   header F0  F1 posted  F2 posted ..

Between processes of one host, large tensors of the first such size go through memory that both see.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from pd2bw_fx.errors import InputError
from pd2bw_fx.graph import dtype_name
from pd2bw_fx.runtime.failure import translated
from pd2bw_fx.runtime.shared_memory import FROM_BYTES, SharedPlaces

_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
_MAX_DIMS = 8
_ABSENT = -1
_HEADER_COLUMNS = 2 + _MAX_DIMS + 2
_TAGS_A_MICROBATCH = 1024
_MICROBATCH_TAGS = 2**11  # far more than are ever under way at once
TAGS_A_LINK = _TAGS_A_MICROBATCH * _MICROBATCH_TAGS


@dataclass(frozen=True, slots=True)
class Route:
    """How to reach a peer: its rank, the process group, the device of the tensors, and their tags' start.

    `via_host`: the group moves host memory only (gloo), and tensors on another device are copied.
    `shares_memory`: the peer is a process of this host, and both see each other's memory.
    """

    peer: int
    group: dist.ProcessGroup
    device: torch.device
    first_tag: int
    shares_memory: bool = False

    @property
    def via_host(self) -> bool:
        return self.device.type != "cpu" and dist.get_backend(self.group) == "gloo"

    @property
    def wire_device(self) -> torch.device:
        return torch.device("cpu") if self.via_host else self.device

    def tag(self, microbatch: int, position: int) -> int:
        return self.first_tag + (microbatch % _MICROBATCH_TAGS) * _TAGS_A_MICROBATCH + position

    def isend(self, tensor: Tensor, tag: int) -> dist.Work:
        with translated(self.peer):
            work = dist.isend(tensor, self.peer, group=self.group, tag=tag)
        assert work is not None
        return work

    def irecv(self, buffer: Tensor, tag: int) -> dist.Work:
        with translated(self.peer):
            work = dist.irecv(buffer, self.peer, group=self.group, tag=tag)
        assert work is not None
        return work

    def wait(self, work: dist.Work) -> None:
        with translated(self.peer):
            work.wait()


Layout = tuple[tuple[torch.dtype, tuple[int, ...]] | None, ...]  # None: a value that is not sent
Shared = dict[tuple[Hashable, int], SharedPlaces]  # by size of the microbatch, and position of the value


@dataclass(slots=True)
class Outbox:
    """The sending end: values named `values`, in this order, to one peer."""

    route: Route
    values: tuple[str, ...]
    window: int
    _agreed: dict[Hashable, Layout] = field(default_factory=dict)
    _shared: Shared = field(default_factory=dict)
    _under_way: deque[tuple[int, list[tuple[dist.Work, Tensor]]]] = field(default_factory=deque)

    def send(self, microbatch: int, size: Hashable, tensors: Sequence[Tensor | None]) -> None:
        """Start sending; the tensors must not be written before `settle`. None: a value without gradient.

        `size` identifies the microbatch's input shapes, which determine the shapes here.
        """
        layout = tuple(None if t is None else (t.dtype, tuple(t.shape)) for t in tensors)
        works: list[tuple[dist.Work, Tensor]] = []
        if size not in self._agreed:
            works.append(self._agree(microbatch, size, layout))
        elif self._agreed[size] != layout:
            self._refuse(layout, self._agreed[size], microbatch)
        for position, tensor in enumerate(tensors, start=1):
            if tensor is not None:
                works += self._start(tensor.detach(), self.route.tag(microbatch, position), (size, position))
        self._under_way.append((microbatch, works))
        while len(self._under_way) > self.window:
            self._wait_for_oldest()

    def _agree(self, microbatch: int, size: Hashable, layout: Layout) -> tuple[dist.Work, Tensor]:
        """Tell the peer what comes with microbatches of this size."""
        if self.route.shares_memory and not self._agreed:  # further sizes are too rare to keep memory for
            for position, entry in enumerate(layout, start=1):
                if entry is not None and (size_bytes := _bytes_of(entry)) >= FROM_BYTES:
                    self._shared[size, position] = SharedPlaces.make(size_bytes)
        self._agreed[size] = layout
        places = [self._shared.get((size, position + 1)) for position in range(len(layout))]
        header = _header(self.values, layout, places).to(self.route.wire_device)
        return self.route.isend(header, self.route.tag(microbatch, 0)), header

    def _start(self, tensor: Tensor, tag: int, at: tuple[Hashable, int]) -> list[tuple[dist.Work, Tensor]]:
        works: list[tuple[dist.Work, Tensor]] = []
        if at in self._shared:
            place = torch.tensor([self._shared[at].put(tensor)])
            works.append((self.route.isend(place, tag), place))
            if int(place) >= 0:
                return works
        wire = tensor.contiguous().to(self.route.wire_device)
        works.append((self.route.isend(wire, tag), wire))
        return works

    def settle(self, microbatch: int | None = None) -> None:
        """Wait until everything, or everything up to a microbatch, has been received."""
        while self._under_way and (microbatch is None or self._under_way[0][0] <= microbatch):
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        _, works = self._under_way.popleft()
        for work, _ in works:
            self.route.wait(work)

    def _refuse(self, found: Layout, agreed: Layout, microbatch: int) -> None:
        for value, now, before in zip(self.values, found, agreed, strict=True):
            if now != before:
                raise InputError(
                    f"{value!r} of microbatch {microbatch} is {_described(now)}; microbatches with inputs "
                    f"of the same sizes had {_described(before)}. A size that depends on data cannot cross "
                    "a cut: keep its operators in one stage"
                )


@dataclass(slots=True)
class Inbox:
    """The receiving end: `expect` posts a receive ahead of time, `take` waits for it."""

    route: Route
    values: tuple[str, ...]
    _agreed: dict[Hashable, Layout] = field(default_factory=dict)
    _shared: Shared = field(default_factory=dict)
    _posted: dict[int, _Posted] = field(default_factory=dict)

    def expect(self, microbatch: int, size: Hashable) -> None:
        posted = _Posted(size)
        if size in self._agreed:
            self._post_tensors(microbatch, posted, self._agreed[size])
        elif not any(other.size == size for other in self._posted.values()):
            posted.header = torch.empty(
                len(self.values), _HEADER_COLUMNS, dtype=torch.int64, device=self.route.wire_device
            )
            posted.header_work = self.route.irecv(posted.header, self.route.tag(microbatch, 0))
        self._posted[microbatch] = posted

    def take(self, microbatch: int) -> list[Tensor | None]:
        """The tensors in the order of `values`; they belong to the caller."""
        posted = self._posted[microbatch]
        if posted.header_work is not None:
            self.route.wait(posted.header_work)
            assert posted.header is not None
            self._read(posted.size, posted.header.tolist())
            for number, other in self._posted.items():
                if other.size == posted.size:
                    self._post_tensors(number, other, self._agreed[posted.size])
        del self._posted[microbatch]
        for work in posted.works or []:
            self.route.wait(work)
        return [
            self._value(microbatch, (posted.size, position), told)
            for position, told in enumerate(posted.buffers, start=1)
        ]

    def _read(self, size: Hashable, header: list[list[int]]) -> None:
        self._agreed[size] = layout = _read_layout(header)
        for position, (entry, row) in enumerate(zip(layout, header, strict=True), start=1):
            if entry is not None and row[-2]:
                self._shared[size, position] = SharedPlaces.attach((row[-2], row[-1]), _bytes_of(entry))

    def _value(self, microbatch: int, at: tuple[Hashable, int], told: Tensor | None) -> Tensor | None:
        if told is None or at not in self._shared:
            return None if told is None else told.to(self.route.device)
        size, position = at
        entry = self._agreed[size][position - 1]
        assert entry is not None
        tensor = torch.empty(entry[1], dtype=entry[0])
        if (place := int(told)) >= 0:
            self._shared[at].take(place, tensor)
        else:  # no place was free: the tensor itself follows
            self.route.wait(self.route.irecv(tensor, self.route.tag(microbatch, position)))
        return tensor

    def _post_tensors(self, microbatch: int, posted: _Posted, layout: Layout) -> None:
        posted.works = []
        for position, entry in enumerate(layout, start=1):
            if entry is None:
                posted.buffers.append(None)
                continue
            if (posted.size, position) in self._shared:
                buffer = torch.empty(1, dtype=torch.int64)
            else:
                buffer = torch.empty(entry[1], dtype=entry[0], device=self.route.wire_device)
            posted.buffers.append(buffer)
            posted.works.append(self.route.irecv(buffer, self.route.tag(microbatch, position)))


@dataclass(slots=True)
class _Posted:
    size: Hashable
    header: Tensor | None = None
    header_work: dist.Work | None = None
    works: list[dist.Work] | None = None  # None: the tensors' shapes are not known yet
    buffers: list[Tensor | None] = field(default_factory=list)


def _header(values: Sequence[str], layout: Layout, places: Sequence[SharedPlaces | None]) -> Tensor:
    """A row for each value: its type, number of dimensions and sizes, and the ticket of its memory."""
    rows = []
    for value, entry, shared in zip(values, layout, places, strict=True):
        if entry is None:
            rows.append([0, _ABSENT] + [0] * (_HEADER_COLUMNS - 2))
            continue
        dtype, shape = entry
        if dtype not in _DTYPES or len(shape) > _MAX_DIMS:
            raise InputError(
                f"{value!r} is {_described(entry)}, which no link carries; up to {_MAX_DIMS} dimensions and "
                f"the types {', '.join(map(dtype_name, _DTYPES))} can be sent"
            )
        sizes = [*shape] + [0] * (_MAX_DIMS - len(shape))
        ticket = (0, 0) if shared is None else shared.ticket
        rows.append([_DTYPES.index(dtype), len(shape), *sizes, *ticket])
    return torch.tensor(rows, dtype=torch.int64)


def _read_layout(header: Sequence[Sequence[int]]) -> Layout:
    return tuple(
        None if num_dims == _ABSENT else (_DTYPES[dtype], tuple(sizes[:num_dims]))
        for dtype, num_dims, *sizes in header
    )


def _bytes_of(entry: tuple[torch.dtype, tuple[int, ...]]) -> int:
    return torch.Size(entry[1]).numel() * entry[0].itemsize


def _described(entry: tuple[torch.dtype, tuple[int, ...]] | None) -> str:
    return "not there" if entry is None else f"{dtype_name(entry[0])} {entry[1]}"
