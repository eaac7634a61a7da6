"""Links between ranks: one microbatch's tensors at a time, over torch.distributed's point-to-point calls.

Both ends of a link know the same values in the same order. Their shapes, their types and the order in which
they lie in memory (channels_last, transposed) are agreed when the first microbatch of a new size comes: a
header goes before it, and from then on both ends know what follows. If a later microbatch lies in another
memory order, it is copied to the agreed one. A tensor that does not fill its memory (expanded, every second
element) arrives contiguous.

    sender     header F0  F1  F2 ..         receiver   header F0  F1 posted  F2 posted ..

Between processes of one host, the tensors of the first such size go through shared memory.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pd2bw_fx.errors import InputError
from pd2bw_fx.graph import dtype_name
from pd2bw_fx.runtime.failure import name_peer_in_errors
from pd2bw_fx.runtime.shared_memory import NO_BUFFER, Notes, SharedBuffers
from pd2bw_fx.strides import Order, order_of, packed, packed_shape, unpacked

_CARRIED = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8,
    torch.uint8, torch.bool,
)  # fmt: skip
_AS_BYTES = (  # the types that not every process group knows
    torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.complex32, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)  # fmt: skip
_DTYPES = _CARRIED + _AS_BYTES
_MAX_DIMS = 64  # more than torch's operators take
_ABSENT = -1
_HEADER_COLUMNS = 2 + 2 * _MAX_DIMS + 3
_TAGS_A_MICROBATCH = 1024  # for the header, the values, and last the answer to the header
_ANSWER = _TAGS_A_MICROBATCH - 1  # not the header's tag: links between the same two ranks may cross
_MICROBATCH_TAGS = 2**11  # microbatches with tags of their own: far more than are ever on their way at once
TAGS_A_LINK = _TAGS_A_MICROBATCH * _MICROBATCH_TAGS


@dataclass(frozen=True, slots=True)
class Route:
    """How to reach a peer: its rank, the process group, the device of the tensors, and their first tag.

    `wire` is the device of what the group moves; tensors on another device are copied to it and from it.
    `receiving` is the stream on which receives begin, so that none waits for what the GPU computes meanwhile.
    `shares_memory`: the peer is a process of this host, and both see each other's memory. `by_host` is
    another route that does not occupy the GPU, where this one does.
    """

    peer: int
    group: dist.ProcessGroup
    device: torch.device
    wire: torch.device
    first_tag: int
    shares_memory: bool = False
    timeout_s: float = 600.0  # of a wait for shared memory; the group has a time limit of its own
    receiving: torch.cuda.Stream | None = None
    by_host: Route | None = None

    def of(self, *, by_host: bool) -> Route:
        return self.by_host if by_host and self.by_host is not None else self

    def tag(self, microbatch: int, position: int) -> int:
        return self.first_tag + (microbatch % _MICROBATCH_TAGS) * _TAGS_A_MICROBATCH + position

    def isend(self, tensor: Tensor, tag: int) -> dist.Work:
        with name_peer_in_errors(self.peer):
            work = dist.isend(_carried(tensor), self.peer, group=self.group, tag=tag)
        assert work is not None
        return work

    def irecv(self, buffer: Tensor, tag: int) -> dist.Work:
        with name_peer_in_errors(self.peer):
            work = dist.irecv(_carried(buffer), self.peer, group=self.group, tag=tag)
        assert work is not None
        return work

    def on_receiving(self) -> contextlib.AbstractContextManager[Any]:
        """Returns the context in which buffers are allocated and receives are launched."""
        return contextlib.nullcontext() if self.receiving is None else torch.cuda.stream(self.receiving)

    def taken(self, buffer: Tensor) -> Tensor:
        """Returns a received tensor on the device on which this rank computes."""
        if self.receiving is not None:
            buffer.record_stream(torch.cuda.current_stream(self.device))
        return buffer.to(self.device)

    def wait(self, work: dist.Work) -> None:
        with name_peer_in_errors(self.peer):
            work.wait()

    def shared_buffer(self, notes: Notes, microbatch: int, position: int) -> int:
        """Waits for the note on a tensor: its shared buffer, or NO_BUFFER if it comes over the group."""
        with name_peer_in_errors(self.peer):
            return notes.take(microbatch, position, timeout_s=self.timeout_s)


Entry = tuple[torch.dtype, tuple[int, ...]]
Layout = tuple[Entry | None, ...]  # None: a value that is not sent
Orders = tuple[Order, ...]
Ticket = tuple[int, int, int]  # a process, and its descriptors of memory and of notes
_NO_TICKET: Ticket = (0, 0, 0)
Shared = dict[tuple[Hashable, int], SharedBuffers]  # by size of the microbatch, and position of the value


@dataclass(slots=True)
class Outbox:
    """The sending end of a link to one peer: the values named `values`, in this order."""

    route: Route
    values: tuple[str, ...]
    window: int
    _agreed: dict[Hashable, Layout] = field(default_factory=dict)
    _orders: dict[Hashable, Orders] = field(default_factory=dict)
    _shared: Shared = field(default_factory=dict)
    _notes: tuple[Notes, Notes] | None = None  # the end to read, where the peer attaches, and to write
    _under_way: deque[tuple[int, list[tuple[dist.Work, Tensor]]]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        if len(self.values) >= _ANSWER:
            raise InputError(
                f"{len(self.values):,} values go from one stage to another, and a link carries up to "
                f"{_ANSWER - 1:,}: cut where fewer cross, or stack them into one tensor in the model"
            )

    def send(
        self, microbatch: int, size: Hashable, tensors: Sequence[Tensor | None], *, by_host: bool = False
    ) -> None:
        """Starts to send; the tensors must not be written before `settle`.

        None is a value without a gradient: zeros are sent for it where the first microbatch had one. `size`
        identifies the microbatch's input shapes, which determine the shapes here.
        """
        route = self.route.of(by_host=by_host)
        layout = tuple(None if t is None else (t.dtype, tuple(t.shape)) for t in tensors)
        works: list[tuple[dist.Work, Tensor]] = []
        if size not in self._agreed:
            self._orders[size] = tuple(() if t is None else order_of(t) for t in tensors)
            works += self._agree(route, microbatch, size, layout)
        elif self._agreed[size] != layout:
            self._require_agreed(layout, self._agreed[size], microbatch)
            tensors = self._filled(tensors, self._agreed[size])
        for position, (tensor, order) in enumerate(zip(tensors, self._orders[size], strict=True), start=1):
            if tensor is None:
                continue
            own = packed(tensor.detach(), order)
            if not self._share(microbatch, (size, position), own):
                wire = own.resolve_conj().resolve_neg().contiguous().to(route.wire)
                works.append((route.isend(wire, route.tag(microbatch, position)), wire))
        self._under_way.append((microbatch, works))
        while len(self._under_way) > self.window:
            self._wait_for_oldest()

    def _agree(
        self, route: Route, microbatch: int, size: Hashable, layout: Layout
    ) -> list[tuple[dist.Work, Tensor]]:
        """Tells the peer what comes with microbatches of this size.

        The peer answers once it has opened the shared memory, which would otherwise go with this process.
        """
        orders = self._orders[size]
        if route.shares_memory and not self._agreed:  # further sizes are too rare to keep memory for
            self._notes = Notes.make()
            for position, (entry, order) in enumerate(zip(layout, orders, strict=True), start=1):
                if entry is not None and 0 not in entry[1]:
                    self._shared[size, position] = SharedBuffers.make(entry[0], packed_shape(entry[1], order))
        self._agreed[size] = layout
        tickets = [
            (*shared.ticket, self._notes[0].ticket[1])
            if (shared := self._shared.get((size, position))) and self._notes
            else _NO_TICKET
            for position in range(1, len(layout) + 1)
        ]
        header = _header(self.values, layout, orders, tickets).to(route.wire)
        works = [(route.isend(header, route.tag(microbatch, 0)), header)]
        if any(ticket is not _NO_TICKET for ticket in tickets):
            answer = torch.empty(1, dtype=torch.float32)  # whatever either side's default is
            works.append((route.irecv(answer, route.tag(microbatch, _ANSWER)), answer))
        return works

    def _share(self, microbatch: int, at: tuple[Hashable, int], tensor: Tensor) -> bool:
        """Copies a tensor into shared memory; returns whether the peer will find it there."""
        if at not in self._shared:
            return False
        assert self._notes is not None
        number = self._shared[at].put(tensor)
        self._notes[1].put(microbatch, at[1], number)
        return number != NO_BUFFER

    def settle(self, microbatch: int | None = None) -> None:
        """Waits until the peer has received everything, or everything up to a microbatch."""
        while self._under_way and (microbatch is None or self._under_way[0][0] <= microbatch):
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        _, works = self._under_way.popleft()
        for work, _ in works:
            self.route.wait(work)

    def _filled(self, tensors: Sequence[Tensor | None], agreed: Layout) -> list[Tensor | None]:
        device = self.route.device
        return [
            torch.zeros(entry[1], dtype=entry[0], device=device) if tensor is None and entry else tensor
            for tensor, entry in zip(tensors, agreed, strict=True)
        ]

    def _require_agreed(self, found: Layout, agreed: Layout, microbatch: int) -> None:
        for value, now, before in zip(self.values, found, agreed, strict=True):
            if now is not None and before is None:
                raise InputError(
                    f"a gradient comes to {value!r} in microbatch {microbatch}, and none came in the first "
                    "one; whether there is one may not depend on data: keep what decides it in the stage "
                    "that makes the value"
                )
            if now not in (before, None):
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
    _agreed: dict[Hashable, Layout] = field(default_factory=dict)  # the layout of what is sent, packed
    _orders: dict[Hashable, Orders] = field(default_factory=dict)
    _shared: Shared = field(default_factory=dict)
    _notes: Notes | None = None
    _posted: dict[int, _Posted] = field(default_factory=dict)

    def expect(self, microbatch: int, size: Hashable, *, by_host: bool = False) -> None:
        if microbatch not in self._posted:
            self._posted[microbatch] = _Posted(size, self.route.of(by_host=by_host))
            self._post()

    def read_headers(self) -> None:
        """Waits for the headers of what has been sent, and posts receives for all that follows them."""
        while any(posted.works is None for posted in self._posted.values()):
            self._read_header()

    def take(self, microbatch: int) -> list[Tensor | None]:
        """Waits for a microbatch's tensors, in the order of `values`; they belong to the caller."""
        posted = self._posted[microbatch]
        while posted.works is None:
            self._read_header()
        del self._posted[microbatch]
        for work in posted.works:
            self.route.wait(work)
        found = [self._value(microbatch, posted, position) for position in range(1, len(posted.buffers) + 1)]
        orders = self._orders[posted.size]
        return [None if t is None else unpacked(t, order) for t, order in zip(found, orders, strict=True)]

    def _post(self) -> None:
        """Posts receives in the order of the sends, which is all that nccl tells them apart by.

        What follows a header is posted when the header has been read.
        """
        for microbatch, posted in self._posted.items():
            if posted.works is not None:
                continue
            if posted.size not in self._agreed:
                if posted.header is None:
                    route = posted.route
                    with route.on_receiving():
                        posted.header = torch.empty(
                            len(self.values), _HEADER_COLUMNS, dtype=torch.int64, device=route.wire
                        )
                        posted.header_work = route.irecv(posted.header, route.tag(microbatch, 0))
                return
            with posted.route.on_receiving():
                self._post_tensors(microbatch, posted, self._agreed[posted.size])

    def _read_header(self) -> None:
        """Waits for the header of a posted microbatch and reads it."""
        microbatch, posted = next(item for item in self._posted.items() if item[1].works is None)
        assert posted.header is not None
        assert posted.header_work is not None
        with posted.route.on_receiving():  # not on the stream of computation, which it would wait for
            self.route.wait(posted.header_work)
            header = posted.header.tolist()
        self._read(microbatch, posted.size, header)
        self._post()

    def _read(self, microbatch: int, size: Hashable, header: list[list[int]]) -> None:
        layout, self._orders[size] = _read_layout(header)
        self._agreed[size] = layout
        for position, (entry, row) in enumerate(zip(layout, header, strict=True), start=1):
            process, memory, notes = row[-3:]
            if entry is not None and process:
                with name_peer_in_errors(self.route.peer):  # the peer may have ended meanwhile
                    self._shared[size, position] = SharedBuffers.attach((process, memory), *entry)
                    self._notes = self._notes or Notes.attach((process, notes))
        if any(row[-3] for row in header):
            self.route.wait(
                self.route.isend(torch.zeros(1, dtype=torch.float32), self.route.tag(microbatch, _ANSWER))
            )

    def _value(self, microbatch: int, posted: _Posted, position: int) -> Tensor | None:
        shared = self._shared.get((posted.size, position))
        if shared is None:
            buffer = posted.buffers[position - 1]
            return None if buffer is None else posted.route.taken(buffer)
        assert self._notes is not None
        number = self.route.shared_buffer(self._notes, microbatch, position)
        if number != NO_BUFFER:
            return shared.take(number).to(self.route.device)  # this rank may compute on a GPU
        entry = self._agreed[posted.size][position - 1]
        assert entry is not None
        tensor = torch.empty(entry[1], dtype=entry[0])  # no buffer was free: the tensor itself follows
        self.route.wait(self.route.irecv(tensor, self.route.tag(microbatch, position)))
        return tensor.to(self.route.device)

    def _post_tensors(self, microbatch: int, posted: _Posted, layout: Layout) -> None:
        posted.works = []
        for position, entry in enumerate(layout, start=1):
            if entry is None or (posted.size, position) in self._shared:
                posted.buffers.append(None)
                continue
            buffer = torch.empty(entry[1], dtype=entry[0], device=posted.route.wire)
            posted.buffers.append(buffer)
            posted.works.append(posted.route.irecv(buffer, posted.route.tag(microbatch, position)))


@dataclass(slots=True)
class _Posted:
    size: Hashable
    route: Route
    header: Tensor | None = None
    header_work: dist.Work | None = None
    works: list[dist.Work] | None = None  # None: the tensors' shapes are not known yet
    buffers: list[Tensor | None] = field(default_factory=list)


def _carried(tensor: Tensor) -> Tensor:
    """Returns a contiguous tensor as a view that every process group carries."""
    return tensor.view(-1).view(torch.uint8) if tensor.dtype in _AS_BYTES else tensor


def _header(values: Sequence[str], layout: Layout, orders: Orders, tickets: Sequence[Ticket]) -> Tensor:
    """Returns a row for each value.

    It holds the type, the number of dimensions, the sizes as they lie in memory, their order (zeros if that
    is the tensor's own), and where its shared memory and notes are.
    """
    rows = []
    for value, entry, order, ticket in zip(values, layout, orders, tickets, strict=True):
        if entry is None:
            rows.append([0, _ABSENT] + [0] * (_HEADER_COLUMNS - 2))
            continue
        dtype, shape = entry
        if dtype not in _DTYPES or len(shape) > _MAX_DIMS:
            raise InputError(
                f"{value!r} is {_described(entry)}, which no link carries; up to {_MAX_DIMS} dimensions and "
                f"the types {', '.join(map(dtype_name, _DTYPES))} can be sent"
            )
        sizes = [*packed_shape(shape, order)] + [0] * (_MAX_DIMS - len(shape))
        places = [*order] + [0] * (_MAX_DIMS - len(order))
        rows.append([_DTYPES.index(dtype), len(shape), *sizes, *places, *ticket])
    return torch.tensor(rows, dtype=torch.int64)


def _read_layout(header: Sequence[Sequence[int]]) -> tuple[Layout, Orders]:
    layout: list[Entry | None] = []
    orders: list[Order] = []
    for dtype, num_dims, *rest in header:
        order = tuple(rest[_MAX_DIMS : _MAX_DIMS + num_dims])
        orders.append(order if any(order) else ())
        layout.append(None if num_dims == _ABSENT else (_DTYPES[dtype], tuple(rest[:num_dims])))
    return tuple(layout), tuple(orders)


def _described(entry: Entry | None) -> str:
    return "not there" if entry is None else f"{dtype_name(entry[0])} {entry[1]}"
