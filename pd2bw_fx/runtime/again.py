"""Buffers of a stage whose forward is run again: the second run reads what the first did, and writes nothing.

forward 7     mean 0.3 -> 0.4        0.3 is kept beside the microbatch
forward 8     mean 0.4 -> 0.2
again 7       copies: mean 0.3       the true one stays 0.2
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from torch import Tensor, nn


class WrittenBuffers:
    """Those that a stage's forward writes, found out in its first one: a running mean, a codebook.

    Running statistics of batch norm, which training only writes, change without it being seen, and need not.
    """

    def __init__(self) -> None:
        self._written: list[Tensor] | None = None
        self._seen: dict[Tensor, int] = {}

    def before(self, module: nn.Module) -> dict[Tensor, Tensor]:
        """Copies of those that a forward may write."""
        if self._written is None:
            self._seen = {buffer: buffer._version for buffer in module.buffers()}
        return {buffer: buffer.clone() for buffer in (self._seen if self._written is None else self._written)}

    def keep(self, copies: dict[Tensor, Tensor]) -> None:
        """After the forward: what it did not write needs no copy."""
        if self._written is None:
            self._written = [buffer for buffer, version in self._seen.items() if buffer._version != version]
            self._seen = {}
            for buffer in copies.keys() - set(self._written):
                del copies[buffer]


@contextlib.contextmanager
def other_buffers(module: nn.Module, before: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """The module with copies of its buffers, which it may write and autograd may keep."""
    held = [(owner, dict(owner._buffers)) for owner in module.modules()]
    copies = {b: before.get(b, b).clone() for _, buffers in held for b in buffers.values() if b is not None}
    for owner, buffers in held:
        owner._buffers.update({n: None if b is None else copies[b] for n, b in buffers.items()})
    try:
        yield
    finally:
        for owner, buffers in held:
            owner._buffers.update(buffers)
