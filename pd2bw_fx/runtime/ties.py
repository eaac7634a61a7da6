"""Parameters that several ranks hold (tied, or of replicated stages): their gradients are added up over all
holders before every update.

Every holder then takes the same step on the same weights, so that the copies never part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pd2bw_fx.runtime.failure import translated


@dataclass(frozen=True, slots=True)
class TiedParameter:
    """A parameter that this rank holds, and the group of all the ranks that do."""

    name: str
    group: dist.ProcessGroup


def join_ties(holders: Mapping[str, tuple[int, ...]], rank: int) -> tuple[TiedParameter, ...]:
    """This rank's tied parameters; `holders` are the ranks of each. All ranks must call this."""
    groups = {ranks: dist.new_group(list(ranks)) for ranks in sorted(set(holders.values()))}
    return tuple(
        TiedParameter(name, groups[ranks]) for name, ranks in sorted(holders.items()) if rank in ranks
    )


class HasGroup(Protocol):
    @property
    def group(self) -> dist.ProcessGroup: ...


def start_asking(parameter: TiedParameter, used_here: bool, device: torch.device) -> tuple[Tensor, dist.Work]:
    """Begin to ask whether the parameter has a gradient on one of its holders; then the answer is not 0."""
    flag = torch.tensor([float(used_here)], device=device)
    return flag, start_adding(parameter, flag)


def start_adding(among: HasGroup, tensor: Tensor) -> dist.Work:
    """Begin to replace a tensor by its sum over the group."""
    with translated(None):
        work = dist.all_reduce(tensor, group=among.group, async_op=True)
    assert isinstance(work, dist.Work)
    return work


def wait_for(work: dist.Work) -> None:
    with translated(None):
        work.wait()
