"""Tensors between CPU ranks of one host, through memory that both see rather than through a socket.

    sender     copies into a free buffer, writes a note of it      receiver   copies out, marks it free
               no buffer is free: a note of that, then the tensor

The memory is an anonymous file and the notes go through a pipe. The receiver opens both through the sender's
entry in /proc, and both are gone when the processes end, however they end. Only the two threads that compute
take part; a socket's thread would first have to be given a core.
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

_NUM_BUFFERS = 3
NO_BUFFER = -1
_PAGE_BYTES = 4096
_FREE, _FULL = 0, 1
_TOKEN_BYTES = 16
_NOTE = struct.Struct("<qii")
_NOTES_READ = 64


class SharedBuffers:
    """`_NUM_BUFFERS` buffers in shared memory, each for one tensor of the same type and shape.

    `ticket` is what another process attaches by.
    """

    def __init__(self, descriptor: int, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self.ticket = os.getpid(), descriptor
        count, pitch = torch.Size(shape).numel(), _pitch(dtype, shape)
        memory = mmap.mmap(descriptor, _PAGE_BYTES + _NUM_BUFFERS * pitch)
        self._states = memoryview(memory)[: 8 * _NUM_BUFFERS].cast("q")
        self._buffers = [
            torch.frombuffer(memory, dtype=dtype, count=count, offset=_PAGE_BYTES + number * pitch).view(
                shape
            )
            for number in range(_NUM_BUFFERS)
        ]

    @classmethod
    def make(cls, dtype: torch.dtype, shape: tuple[int, ...]) -> Self:
        descriptor = os.memfd_create("pd2bw_fx", os.MFD_CLOEXEC)
        os.truncate(descriptor, _PAGE_BYTES + _NUM_BUFFERS * _pitch(dtype, shape))
        made = cls(descriptor, dtype, shape)
        weakref.finalize(made, os.close, descriptor)
        return made

    @classmethod
    def attach(cls, ticket: tuple[int, int], dtype: torch.dtype, shape: tuple[int, ...]) -> Self:
        """Maps another process's memory. Raises OSError where that process cannot be looked into."""
        descriptor = os.open(_entry(*ticket), os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(descriptor, dtype, shape)
        finally:
            os.close(descriptor)

    def put(self, tensor: Tensor) -> int:
        """Copies the tensor into a free buffer and returns its number, or NO_BUFFER if none is free."""
        for number, buffer in enumerate(self._buffers):
            if self._states[number] == _FREE:
                buffer.copy_(tensor)
                self._states[number] = _FULL
                return number
        return NO_BUFFER

    def take(self, number: int) -> Tensor:
        """Returns a copy of the tensor in a buffer, which is free again."""
        taken = self._buffers[number].clone()
        self._states[number] = _FREE
        return taken


def _pitch(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Returns the bytes from one buffer to the next, in whole pages."""
    return -(-torch.Size(shape).numel() * dtype.itemsize // _PAGE_BYTES) * _PAGE_BYTES


class Notes:
    """A pipe that tells where tensors are: (microbatch, position among the values, number of the buffer)."""

    def __init__(self, descriptor: int, *, process: int) -> None:
        self.ticket = process, descriptor
        self._descriptor = descriptor
        self._known: dict[tuple[int, int], int] = {}
        self._waiting = select.poll()
        self._waiting.register(descriptor, select.POLLIN)
        weakref.finalize(self, os.close, descriptor)

    @classmethod
    def make(cls) -> tuple[Self, Self]:
        """Returns the end to read, to which others attach, and the end to write."""
        read, write = os.pipe()
        return cls(read, process=os.getpid()), cls(write, process=os.getpid())

    @classmethod
    def attach(cls, ticket: tuple[int, int]) -> Self:
        """Opens another process's end to read. Raises OSError where that process cannot be looked into."""
        return cls(os.open(_entry(*ticket), os.O_RDONLY | os.O_CLOEXEC), process=ticket[0])

    def put(self, microbatch: int, position: int, buffer: int) -> None:
        os.write(self._descriptor, _NOTE.pack(microbatch, position, buffer))

    def take(self, microbatch: int, position: int, *, timeout_s: float) -> int:
        """Waits for the note on a tensor, and returns the number of its buffer.

        Raises EOFError where the other process is gone, TimeoutError after `timeout_s`.
        """
        key = microbatch, position
        while key not in self._known:
            if not self._waiting.poll(timeout_s * 1e3):
                raise TimeoutError(f"no note within {timeout_s:.0f} s")
            read = os.read(self._descriptor, _NOTES_READ * _NOTE.size)
            if not read:
                raise EOFError("the process at the other end is gone")
            for number, at, buffer in _NOTE.iter_unpack(read):
                self._known[number, at] = buffer
        return self._known.pop(key)


def ranks_in_reach(group: dist.ProcessGroup, rank: int, num_ranks: int) -> frozenset[int]:
    """Returns the ranks that see this one's memory and whose memory it sees, by trying.

    All ranks call this.
    """
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
    # A buffer is freed by a plain store. Other processors than x86's may make it visible before the copy is
    # read, so that the sender would overwrite it too early.
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
