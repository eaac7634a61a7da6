"""Whether all ranks were given the same batch: ranks that shuffle differently would train on inputs of one
batch and targets of another.

first updates   digests of all values go round, before anything is computed
every one       digests of some values go with the loss that a rank sends to all others (`NumberPost`)
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pd2bw_fx.errors import InputError
from pd2bw_fx.runtime.failure import name_peer_in_errors

UNKNOWN = 0  # in place of a digest
_SAMPLED = 4096  # of a tensor's entries, about: they are hashed in less than a tenth of a millisecond
_RULE = (
    "every rank must see the same batches: seed the data loader alike on all ranks, and use no "
    "DistributedSampler"
)


def compare_batches(flat: Sequence[Mapping[str, Tensor]], group: dist.ProcessGroup) -> None:
    """Raises InputError on every rank where batches differ, and names the first input that does.

    `flat` is the batch, or each of its microbatches where the caller has cut it. All ranks call it.
    """
    digests: list[Any] = [None] * dist.get_world_size(group)
    own = {
        name if len(flat) == 1 else f"{name} of microbatch {number}": _digest(tensor.detach().cpu().flatten())
        for number, one in enumerate(flat)
        for name, tensor in one.items()
    }
    with name_peer_in_errors(None):
        dist.all_gather_object(digests, own, group=group)
    for rank, theirs in enumerate(digests):
        different = [name for name in digests[0] if theirs.get(name) != digests[0][name]]
        if different:
            raise InputError(
                f"rank {rank} was given another batch than rank 0 (input {different[0]!r} differs); {_RULE}"
            )


def sampled_digests(flat: Sequence[Mapping[str, Tensor]]) -> dict[str, int]:
    """Returns a digest of some entries of each input, in all microbatches of a batch.

    A float64 holds it exactly. It is UNKNOWN for an input on a GPU, which would have to be waited for.
    """
    return {name: _sampled_digest([one[name] for one in flat]) for name in (flat[0] if flat else ())}


def require_alike(
    here: tuple[str, Mapping[str, int]], there: tuple[str, Mapping[str, int]], when: str
) -> None:
    """Raises InputError, with the first input that differs, where two ranks' names and digests do."""
    (one, own), (other, theirs) = sorted((here, there), key=lambda each: each[0])
    for name, digest in own.items():
        if digest != theirs[name] and UNKNOWN not in (digest, theirs[name]):
            raise InputError(
                f"{one} and {other} were given different batches {when} (input {name!r} differs); {_RULE}"
            )


def _sampled_digest(tensors: Sequence[Tensor]) -> int:
    if any(tensor.device.type != "cpu" for tensor in tensors):
        return UNKNOWN
    joined = "".join(_digest(_sample(tensor.detach(), _SAMPLED // len(tensors))) for tensor in tensors)
    return 1 + int(hashlib.sha256(joined.encode()).hexdigest()[:12], 16)


def _sample(tensor: Tensor, count: int) -> Tensor:
    """Returns about so many entries, or all. An odd step: not the first one of every row."""
    step = max(1, tensor.numel() // max(1, count)) | 1
    if tensor.is_contiguous():
        return tensor.view(-1)[::step]
    places = torch.arange(0, tensor.numel(), step, device="cpu")
    return tensor[torch.unravel_index(places, tensor.shape)]


def _digest(entries: Tensor) -> str:
    return hashlib.sha256(entries.contiguous().view(torch.uint8).numpy().data).hexdigest()
