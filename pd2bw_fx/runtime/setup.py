"""Makes the parts of an engine for one rank's job."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from pd2bw_fx.actions import Kind
from pd2bw_fx.errors import InputError
from pd2bw_fx.runtime.corrections import Correction, Corrector
from pd2bw_fx.runtime.failure import name_peer_in_errors
from pd2bw_fx.runtime.gradient_sums import join_ties
from pd2bw_fx.runtime.groups import Groups
from pd2bw_fx.runtime.job import Job
from pd2bw_fx.runtime.links import Connections, directed_links
from pd2bw_fx.runtime.options import Precision
from pd2bw_fx.runtime.rank_runner import RankRunner
from pd2bw_fx.runtime.recorder import Recorder, offset_to_first_rank
from pd2bw_fx.runtime.shared_memory import ranks_in_reach
from pd2bw_fx.runtime.stage_runner import OnOutput, StageRunner
from pd2bw_fx.runtime.update import Clipping, LossScale
from pd2bw_fx.runtime.weights import WeightStore

_DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


def make_recorder(
    job: Job, num_calls: int, control: dist.ProcessGroup, device: torch.device
) -> Recorder | None:
    if num_calls == 0:
        return None
    with name_peer_in_errors(None):
        offset_s = offset_to_first_rank(job.rank, job.num_ranks, control)
    return Recorder(job.rank, num_calls, offset_s=offset_s, device=device)


def make_weights(
    job: Job,
    device: torch.device,
    *,
    groups: Groups,
    max_gradient_norm: float | None,
    precision: Precision | None,
    corrections: Sequence[Correction],
    average_decay: float | None,
    compile_options: Mapping[str, Any] | None,
) -> WeightStore:
    """Makes the weight store. All ranks call this at the same time: those with the same parameters join
    groups.

    Raises InputError for a precision, corrections or compiling that do not go with the method.
    """
    rules, shape = job.work.rules, job.shape
    _check_precision(job, precision)
    if compile_options is not None:
        _check_backwards_are_whole(job)
    if corrections and rules.keeps_versions:
        raise InputError(
            f"corrections are made for methods that keep no weight versions (pb, pipemare); {job.method} does"
        )
    holders = {name: ranks for name, ranks in job.holders.items() if name in job.trainable}
    limit = math.inf if max_gradient_norm is None and precision == "fp16" else max_gradient_norm
    counts = {name: len(ranks) for name, ranks in holders.items()}
    num_versions = max(rules.num_versions(shape, stage) for stage in job.stages)
    weights = WeightStore(
        job.programs,
        job.tensors,
        trainable=job.trainable,
        num_versions=num_versions,
        device=device,
        keeps_versions=rules.keeps_versions,
        ties=join_ties(holders, job.rank, groups.of),
        uses_vary=job.uses_vary,
        sums_allowed=0 if groups.is_nccl else math.inf,
        # Its sums start while others of the engine are still to come, each rank at its own time.
        clipping=None if limit is None else Clipping(limit, groups.of_all(), counts),
        loss_scale=LossScale(num_versions) if precision == "fp16" else None,
        corrector=Corrector(corrections, delay_of(job)) if corrections else None,
        average_decay=average_decay,
    )
    if compile_options is not None:
        weights.compile(compile_options)
    return weights


def _check_precision(job: Job, precision: Precision | None) -> None:
    if precision == "fp16" and len(_versions_of_an_update(job)) > 1:
        raise InputError(
            f"fp16 scales the loss by one number for a whole update, and an update of {job.method} has "
            "microbatches of several versions; use bf16"
        )


def _check_backwards_are_whole(job: Job) -> None:
    cells = job.work.rules.order(job.shape, job.place, range(1), drain=True, empty_before=0)
    if any(kind is Kind.INPUT_GRADIENT for kind, _, _ in cells):
        raise InputError(
            f"{job.method} computes each backward in two halves, and a compiled one is in one piece; leave "
            "out compile, or train with another method, such as 1f1b"
        )


def _versions_of_an_update(job: Job) -> set[int]:
    """Returns the weight versions that an update's forwards and backwards run on, over all stages."""
    rules, shape = job.work.rules, job.shape
    of = (rules.forward_version, rules.backward_version)
    microbatches, stages = _microbatches_of_a_late_update(job), range(shape.num_stages)
    return {version(shape, stage, k) for version in of for stage in stages for k in microbatches}


def delay_of(job: Job) -> int:
    """Returns the updates between a microbatch's forward and backward on a rank of a full pipeline."""
    rules, shape, stage = job.work.rules, job.shape, job.stages[0]
    return max(
        rules.backward_version(shape, stage, k) - rules.forward_version(shape, stage, k)
        for k in _microbatches_of_a_late_update(job)
    )


def _microbatches_of_a_late_update(job: Job) -> range:
    """Returns the microbatches of an update for which the pipeline is full."""
    m = job.shape.microbatches_per_update
    first = m * (job.num_ranks + job.shape.num_stages + 1)
    return range(first, first + m)


def make_runner(
    job: Job,
    weights: WeightStore,
    device: torch.device,
    *,
    groups: Groups,
    precision: Precision | None,
    is_compiled: bool,
    on_output: OnOutput,
    before_waiting: Callable[[], None],
    recorder: Recorder | None = None,
) -> RankRunner:
    with name_peer_in_errors(None):
        in_reach = ranks_in_reach(groups.control, job.rank, job.num_ranks)
    connections = Connections(
        job,
        groups.of_links(directed_links(job)),
        groups.control,
        device,
        groups.wire,
        groups.receiving,
        in_reach,
        timeout_s=groups.timeout_s,
    )
    return RankRunner(
        job,
        {
            program.stage: StageRunner(
                job,
                program,
                connections.of(program),
                weights,
                device=device,
                precision=None if precision is None else _DTYPES[precision],
                is_compiled=is_compiled,
                on_output=on_output,
            )
            for program in job.programs
        },
        weights,
        before_waiting=before_waiting,
        posts_ahead=not groups.is_nccl,
        recorder=recorder,
    )
