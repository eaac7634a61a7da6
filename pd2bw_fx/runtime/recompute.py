"""The state of a stage whose forward is recomputed.

The second run reads what the first one read, and writes nothing:

    forward 7     mean 0.3 -> 0.4        0.3 is kept beside the microbatch
    forward 8     mean 0.4 -> 0.2
    again 7       copies: mean 0.3       the true one stays 0.2
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from pd2bw_fx.graph import OperatorGraph
from pd2bw_fx.stage import StageProgram, held_buffers, held_parameters

_BATCH_NORMS = {"aten.batch_norm.default", "aten.native_batch_norm.default"}


def unread_statistics(graph: OperatorGraph) -> frozenset[str]:
    """Returns the running statistics that batch norm writes and that nothing is computed from in training."""
    written: set[str] = set()
    read: set[str] = set()
    for operator in graph.operators.values():
        own = set(operator.writes_buffers) if operator.target in _BATCH_NORMS else set()
        written |= own
        read |= set(operator.buffers) - own
    return frozenset(written - read)


class WrittenState:
    """Copies of the buffers and frozen parameters that a stage's forward writes.

    Which buffers it writes (a running mean, a codebook) is found out in the first forward. Frozen parameters
    that are written (those of a momentum encoder, say) are known before. The forward computes nothing from
    the `unread` buffers, which need no copy.
    """

    def __init__(self, program: StageProgram, parameters: frozenset[str], unread: frozenset[str]) -> None:
        self._program = program
        self._parameters = parameters
        self._unread = unread
        self._written: list[Tensor] | None = None
        self._seen: dict[Tensor, int] = {}

    def before(self, module: nn.Module) -> dict[Tensor, Tensor]:
        """Returns copies of the tensors that a forward may write."""
        if self._written is None:
            own = held_parameters(self._program, module)
            held: list[Tensor] = [own[name] for name in self._parameters & own.keys()]
            held += [b for name, b in held_buffers(self._program, module).items() if name not in self._unread]
            self._seen = {tensor: tensor._version for tensor in held}
        kept = self._seen if self._written is None else self._written
        return {tensor: tensor.detach().clone() for tensor in kept}

    def keep(self, copies: dict[Tensor, Tensor]) -> None:
        """Drops the copies, after the first forward, of tensors that it did not write."""
        if self._written is None:
            # Operators that write running statistics leave the version as it is.
            self._written = [
                tensor
                for tensor, version in self._seen.items()
                if tensor._version != version or not torch.equal(tensor, copies[tensor])
            ]
            self._seen = {}
            for tensor in copies.keys() - set(self._written):
                del copies[tensor]


@contextlib.contextmanager
def with_copied_state(module: nn.Module, before: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Gives the module copies of its buffers, and of the parameters that `before` has.

    The module may write them and autograd may keep them; afterwards it has its own again.
    """
    held = [(owner, dict(owner._buffers), dict(owner._parameters)) for owner in module.modules()]
    copies = {b: before.get(b, b).clone() for _, own, _ in held for b in own.values() if b is not None}
    frozen = {
        parameter: nn.Parameter(before[parameter].clone(), requires_grad=False)
        for parameter in module.parameters()
        if parameter in before
    }
    for owner, buffers, parameters in held:
        owner._buffers.update({n: None if b is None else copies[b] for n, b in buffers.items()})
        owner._parameters.update(
            {n: frozen[p] for n, p in parameters.items() if p is not None and p in frozen}
        )
    try:
        yield
    finally:
        for owner, buffers, parameters in held:
            owner._buffers.update(buffers)
            owner._parameters.update(parameters)
