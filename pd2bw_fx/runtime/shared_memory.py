"""Large tensors between CPU ranks of one host: through memory that both see, rather than through a socket.

    sender     copies into a free place, sends its number          receiver   copies out, marks the place free
               no place is free: sends -1, then the tensor

The memory is an open file without a name, which the receiver opens through the sender's process entry: when
the processes end, however they end, it is gone.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import weakref
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

FROM_BYTES = 2**20  # below, a socket is as fast (benchmarks/transport.py)
_PLACES = 2
_PAGE_BYTES = 4096
_FREE, _FULL = 0, 1
_TOKEN_BYTES = 16


class SharedPlaces:
    """`_PLACES` places of `size_bytes` each. `ticket` is what another process attaches by."""

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        self.ticket = os.getpid(), descriptor
        self._pitch = -(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES
        self._memory = mmap.mmap(descriptor, _PAGE_BYTES + _PLACES * self._pitch)
        self._states = torch.frombuffer(self._memory, dtype=torch.int64, count=_PLACES)

    @classmethod
    def make(cls, size_bytes: int) -> Self:
        descriptor = os.memfd_create("pd2bw_fx", os.MFD_CLOEXEC)
        pitch = -(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES
        os.truncate(descriptor, _PAGE_BYTES + _PLACES * pitch)
        made = cls(descriptor, size_bytes)
        weakref.finalize(made, os.close, descriptor)
        return made

    @classmethod
    def attach(cls, ticket: tuple[int, int], size_bytes: int) -> Self:
        """Raises OSError where the other process cannot be looked into."""
        descriptor = os.open(_entry(*ticket), os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(descriptor, size_bytes)
        finally:
            os.close(descriptor)

    def put(self, tensor: Tensor) -> int:
        """The place where the tensor is now; -1: none is free."""
        for place in range(_PLACES):
            if self._states[place] == _FREE:
                self._view(place, tensor.dtype, tuple(tensor.shape)).copy_(tensor)
                self._states[place] = _FULL
                return place
        return -1

    def take(self, place: int, into: Tensor) -> None:
        into.copy_(self._view(place, into.dtype, tuple(into.shape)))
        self._states[place] = _FREE

    def _view(self, place: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        start, count = _PAGE_BYTES + place * self._pitch, torch.Size(shape).numel()
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=start).view(shape)


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
    if sys.platform != "linux":
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
