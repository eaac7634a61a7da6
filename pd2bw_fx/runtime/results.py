"""Sends what the model returns from the ranks that compute it to all others.

In training that is the loss and the other outputs that are one number; in an evaluation, whatever is asked
for.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pd2bw_fx.batch import Microbatches
from pd2bw_fx.errors import InputError
from pd2bw_fx.runtime.job import Job
from pd2bw_fx.runtime.loss import Means
from pd2bw_fx.runtime.number_post import NumberPost
from pd2bw_fx.runtime.same_batches import sampled_digests


class Results:
    """Collects what this rank's stages return for each microbatch."""

    def __init__(self, job: Job, *, group: dist.ProcessGroup) -> None:
        named = {job.loss_stage: (job.loss,)}
        for stage, names in job.numbers.items():
            named[stage] = (*named.get(stage, ()), *names)
        self._job = job
        self._posts = {
            stage: NumberPost(
                names,
                job.ranks_of(stage),
                job.rank,
                job.num_ranks,
                tag=(number, len(named)),
                group=group,
                named=job.name_of,
                inputs=[known.name for known in job.layout.inputs] if stage == job.loss_stage else (),
            )
            for number, (stage, names) in enumerate(named.items())
        }
        self._post_of = {name: post for post in self._posts.values() for name in post.names}
        self._digests: dict[str, int] | None = None  # of the batch that comes next
        self._wanted: Collection[str] = ()
        self._kept: dict[str, Tensor] = {}

    def compare_with_others(self, flat: Sequence[Mapping[str, Tensor]]) -> None:
        """Compares the batch of the next update or evaluation with other ranks', when its loss is read.

        `flat` is that batch in one piece or several.
        """
        self._digests = sampled_digests(flat)

    def expect(self, update: int, numbers: range, *, training: bool) -> None:
        """Prepares for an update, or an evaluation before it, and its microbatches."""
        job = self._job
        digests, self._digests = self._digests, None
        for stage, post in self._posts.items():
            of_ranks: dict[int, list[int]] = {rank: [] for rank in job.ranks_of(stage)}
            for number in numbers:
                of_ranks[job.rank_of(stage, number)].append(number)
            post.expect(update, of_ranks, training=training, digests=digests)

    def collect(self, microbatch: int, name: str, value: Tensor) -> None:
        if name in self._post_of:
            self._post_of[name].collect(microbatch, name, value)
        if name in self._wanted:
            kept = value.detach()
            # It may be a part of a buffer, which the next microbatch writes.
            self._kept[_key(microbatch, name)] = kept.clone() if value._is_view() else kept

    def send(self) -> None:
        """Sends the numbers of an update that are still here, before this rank waits for another one."""
        for post in self._posts.values():
            post.send()

    def keep(self, names: Collection[str]) -> None:
        """Keeps these outputs from now on, until they are taken."""
        self._wanted = names

    def take(self) -> dict[str, Tensor]:
        """Returns what this rank has of the outputs that were kept."""
        kept, self._kept, self._wanted = self._kept, {}, ()
        return {key: value.contiguous() for key, value in kept.items()}

    def means(self) -> tuple[Means, ...]:
        """Returns the means of each stage for what was expected last; the loss is the very first."""
        return tuple(post.means() for post in self._posts.values())


def evaluation_pieces(job: Job, batch: Any, wanted: Sequence[str]) -> list[dict[str, Tensor]]:
    """Returns the batch in as many microbatches as an update has, or whole.

    It is whole where it cannot be cut into them, or where the microbatches' outputs could not be joined. A
    batch that the caller has cut stays as it is. Raises InputError for a batch that can be run in neither
    way.
    """
    layout, count = job.layout, job.microbatches_per_update
    apart = next((name for name in wanted if not _can_be_joined(job, name)), None)
    if isinstance(batch, Microbatches):
        if not batch:
            raise InputError("no microbatch was given; at least one was expected")
        if apart is not None and len(batch) > 1:
            raise InputError(
                f"the batch is not dimension 0, and no other, of the output {apart!r}, so that those of "
                f"{len(batch)} microbatches cannot be put together; name the outputs that are wanted, or "
                "pass one at a time"
            )
        return layout.pieces(layout.flat_batches(batch, len(batch)), 1)
    flat = layout.flatten(batch)
    size = next((flat[known.name].shape[0] for known in layout.inputs if known.batched), 1)
    if not layout.microbatch_sizes.is_one_size:
        is_cut = apart is None and size % count == 0 and size // count in layout.microbatch_sizes
        return layout.cut(flat, count if is_cut else 1)
    if apart is not None and count > 1:
        raise InputError(
            f"the batch is not dimension 0, and no other, of the output {apart!r}, so that those of {count} "
            f"microbatches cannot be put together, and the model was traced for {layout.microbatch_sizes} "
            "samples; name the outputs that are wanted: engine.outputs(batch, 'logits')"
        )
    return layout.cut(flat, count)


def joined(job: Job, parts: Mapping[str, Tensor], numbers: range, wanted: Sequence[str]) -> dict[str, Tensor]:
    """Returns the microbatches' outputs as the batch's: concatenated, or the mean of single numbers."""
    found: dict[str, Tensor] = {}
    for name in wanted:
        pieces = [parts[_key(number, name)] for number in numbers]
        if len(pieces) == 1:
            found[name] = pieces[0]
        elif job.outputs[name].shape == ():
            found[name] = torch.stack(pieces).mean(0)
        else:
            found[name] = torch.cat(pieces)
    return found


def _can_be_joined(job: Job, name: str) -> bool:
    spec, sizes = job.outputs[name], job.layout.microbatch_sizes
    if spec.shape == ():
        return spec.dtype.is_floating_point
    if not spec.shape or name not in job.of_batch:
        return False
    first, *others = spec.shape
    if sizes.is_one_size and first == sizes.least:
        return True
    # A matrix of similarities has the batch in a second dimension, too.
    return first == "batch" and not any(re.search(r"\bbatch\b", str(size)) for size in others)


def _key(microbatch: int, name: str) -> str:
    return f"{microbatch} {name}"
