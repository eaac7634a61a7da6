"""Tensors between CPU ranks of one host: through memory that both see, rather than through a socket.

    sender     copies into a free place, writes a note of it       receiver   copies out, marks the place free
               no place is free: a note of that, then the tensor

The memory is an open file without a name, and the notes go through a pipe: both are opened by the receiver
through the sender's process entry, and gone when the processes end, however they end. No thread but the two
that compute has a part in it, where a socket's has to be given a core first.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import select
import struct
import sys
import weakref
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

_PLACES = 3
NO_PLACE = -1
_PAGE_BYTES = 4096
_FREE, _FULL = 0, 1
_TOKEN_BYTES = 16
_NOTE = struct.Struct("<qii")
_NOTES_READ = 64


class SharedPlaces:
    """Places for `_PLACES` tensors of one type and shape. `ticket` is what another process attaches by."""

    def __init__(self, descriptor: int, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self.ticket = os.getpid(), descriptor
        count, pitch = torch.Size(shape).numel(), _pitch(dtype, shape)
        memory = mmap.mmap(descriptor, _PAGE_BYTES + _PLACES * pitch)
        self._states = memoryview(memory)[: 8 * _PLACES].cast("q")
        self._places = [
            torch.frombuffer(memory, dtype=dtype, count=count, offset=_PAGE_BYTES + place * pitch).view(shape)
            for place in range(_PLACES)
        ]

    @classmethod
    def make(cls, dtype: torch.dtype, shape: tuple[int, ...]) -> Self:
        descriptor = os.memfd_create("pd2bw_fx", os.MFD_CLOEXEC)
        os.truncate(descriptor, _PAGE_BYTES + _PLACES * _pitch(dtype, shape))
        made = cls(descriptor, dtype, shape)
        weakref.finalize(made, os.close, descriptor)
        return made

    @classmethod
    def attach(cls, ticket: tuple[int, int], dtype: torch.dtype, shape: tuple[int, ...]) -> Self:
        """Raises OSError where the other process cannot be looked into."""
        descriptor = os.open(_entry(*ticket), os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(descriptor, dtype, shape)
        finally:
            os.close(descriptor)

    def put(self, tensor: Tensor) -> int:
        """The place where the tensor is now, or NO_PLACE: none is free."""
        for place in range(_PLACES):
            if self._states[place] == _FREE:
                self._places[place].copy_(tensor)
                self._states[place] = _FULL
                return place
        return NO_PLACE

    def take(self, place: int) -> Tensor:
        """A copy of what is there."""
        taken = self._places[place].clone()
        self._states[place] = _FREE
        return taken


def _pitch(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Bytes from one place to the next: whole pages."""
    return -(-torch.Size(shape).numel() * dtype.itemsize // _PAGE_BYTES) * _PAGE_BYTES


class Notes:
    """A pipe that tells where tensors are: (microbatch, position among the values, place)."""

    def __init__(self, descriptor: int, *, process: int) -> None:
        self.ticket = process, descriptor
        self._descriptor = descriptor
        self._known: dict[tuple[int, int], int] = {}
        self._waiting = select.poll()
        self._waiting.register(descriptor, select.POLLIN)
        weakref.finalize(self, os.close, descriptor)

    @classmethod
    def make(cls) -> tuple[Self, Self]:
        """The end to read, which is there for others to attach by, and the end to write."""
        read, write = os.pipe()
        return cls(read, process=os.getpid()), cls(write, process=os.getpid())

    @classmethod
    def attach(cls, ticket: tuple[int, int]) -> Self:
        """Another process's end to read. Raises OSError where that cannot be looked into."""
        return cls(os.open(_entry(*ticket), os.O_RDONLY | os.O_CLOEXEC), process=ticket[0])

    def put(self, microbatch: int, position: int, place: int) -> None:
        os.write(self._descriptor, _NOTE.pack(microbatch, position, place))

    def take(self, microbatch: int, position: int, *, timeout_s: float) -> int:
        """The place of a tensor. Raises EOFError where the other process is gone, TimeoutError."""
        key = microbatch, position
        while key not in self._known:
            if not self._waiting.poll(timeout_s * 1e3):
                raise TimeoutError(f"no note within {timeout_s:.0f} s")
            read = os.read(self._descriptor, _NOTES_READ * _NOTE.size)
            if not read:
                raise EOFError("the process at the other end is gone")
            for number, at, place in _NOTE.iter_unpack(read):
                self._known[number, at] = place
        return self._known.pop(key)


def ranks_in_reach(group: dist.ProcessGroup, rank: int, num_ranks: int) -> frozenset[int]:
    """The ranks whose memory this one sees, and that see its own, found by trying. All ranks call this."""
    if num_ranks == 1:
        return frozenset()
    token = os.urandom(_TOKEN_BYTES)
    with contextlib.ExitStack() as stack:
        mine = _offer(token, stack)
        offers: list[Any] = [None] * num_ranks
        dist.all_gather_object(offers, (mine, token), group=group)
        seen = {other for other, (ticket, told) in enumerate(offers) if other != rank and _sees(ticket, told)}
        everyone: list[Any] = [None] * num_ranks
        dist.all_gather_object(everyone, seen, group=group)
    return frozenset(other for other in seen if rank in everyone[other])


def _offer(token: bytes, stack: contextlib.ExitStack) -> tuple[int, int] | None:
    # A place is given back by a plain store, which other processors may make visible before what was read.
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "i686"):
        return None
    descriptor = os.memfd_create("pd2bw_fx", os.MFD_CLOEXEC)
    stack.callback(os.close, descriptor)
    os.write(descriptor, token)
    return os.getpid(), descriptor


def _sees(ticket: tuple[int, int] | None, token: bytes) -> bool:
    if ticket is None:
        return False
    try:
        return _entry(*ticket).read_bytes() == token
    except OSError:
        return False


def _entry(process: int, descriptor: int) -> Path:
    return Path("/proc") / str(process) / "fd" / str(descriptor)
