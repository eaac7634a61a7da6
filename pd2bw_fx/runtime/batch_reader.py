"""What a rank takes of a batch: microbatches of what its stages read, once ranks agree on the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pd2bw_fx.runtime.inference import ordinary
from pd2bw_fx.runtime.job import Job
from pd2bw_fx.runtime.results import Results, evaluation_pieces
from pd2bw_fx.runtime.same_batches import compare_batches
from pd2bw_fx.runtime.stage_runner import Microbatch

_UPDATES_COMPARED = 2  # the first ones, in which ranks compare their whole batches before they begin


class BatchReader:
    """Cuts batches into microbatches for one rank's engine, and has them compared with other ranks'."""

    def __init__(self, job: Job, device: torch.device, results: Results, control: dist.ProcessGroup) -> None:
        self._job = job
        self._device = device
        self._results = results
        self._control = control
        self._to_compare = _UPDATES_COMPARED

    def compare_whole(self) -> None:
        """Has the next updates' whole batches compared again, as the first ones are."""
        self._to_compare = _UPDATES_COMPARED

    def of_update(self, batch: Any) -> list[Microbatch]:
        """Returns an update's microbatches, with copies of what this rank reads.

        Raises InputError for a batch that does not fit, and on every rank where whole batches differ.
        """
        layout, count = self._job.layout, self._job.microbatches_per_update
        flat = layout.flat_batches(batch, count)
        # Tensors that this rank reads may still be in flight when the caller fills them again.
        flat = [one | {name: self._kept(one[name]) for name in self._job.inputs()} for one in flat]
        pieces = layout.pieces(flat, count)
        if self._to_compare:
            compare_batches(flat, self._control)
            self._to_compare -= 1
        self._results.compare_with_others(flat)
        return [Microbatch.of(piece) for piece in pieces]

    def of_evaluation(self, batch: Any, wanted: Sequence[str]) -> list[Microbatch]:
        """Returns an evaluation's microbatches, from which these outputs can be put together.

        Raises InputError for a batch that does not fit.
        """
        pieces = evaluation_pieces(self._job, batch, wanted)
        self._results.compare_with_others(pieces)
        # What a stage does not read need be no copy.
        own = self._job.inputs()
        return [Microbatch.of(piece | {name: ordinary(piece[name]) for name in own}) for piece in pieces]

    def _kept(self, tensor: Tensor) -> Tensor:
        """Returns a copy, in pinned memory if a GPU is to fetch it while this rank goes on."""
        if self._device.type != "cuda" or tensor.device.type != "cpu":
            return tensor.clone()
        return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor)
