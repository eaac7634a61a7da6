"""Joins the processes that train together: the process group, the device, and which rank gets which stage."""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # imported later, its defaults would keep the world of that time
from torch import Tensor

from pd2bw_fx.actions import RunRequest
from pd2bw_fx.errors import InputError, Pd2bwError, WorkerError
from pd2bw_fx.runtime.failure import first_line, forget, name_peer_in_errors
from pd2bw_fx.runtime.job import Job, Planned, Work, jobs, work_for
from pd2bw_fx.runtime.meeting import Meeting, meet
from pd2bw_fx.runtime.watch import Watch
from pd2bw_fx.runtime.wire import decoded, encoded
from pd2bw_fx.units import are, counted

if TYPE_CHECKING:
    from pd2bw_fx.pipeline import Pipeline


def local_device(planned: Planned, wanted: torch.device | str | None = None) -> torch.device:
    """Returns the device on which this rank computes: `wanted`, or the GPU that it was planned for.

    Where torchrun has put another number of ranks on this machine than were planned for its host, or shows
    each of them other GPUs, the ranks take the GPUs in turn by their local rank. Raises InputError where
    there is none.
    """
    try:
        device = torch.device(("cuda" if planned.kind == "cuda" else "cpu") if wanted is None else wanted)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"device is {wanted!r}; a device such as 'cpu' or 'cuda:0' was expected") from error
    if device.type != "cuda":
        return device
    count = torch.cuda.device_count()
    if count == 0:
        if wanted is not None:
            raise InputError(f"this stage is to run on {device}, and this process sees no GPU")
        raise InputError(
            f"this stage is planned for {planned.name}, a GPU, and this process sees none; "
            'device="cpu" trains it on the CPU'
        )
    if wanted is not None:
        if (device.index or 0) >= count:
            raise InputError(
                f"this stage is to run on {device}, and this process sees {counted(count, 'GPU')}"
            )
        if ":" in str(device):
            return device
        if "LOCAL_RANK" not in os.environ:
            return torch.device("cuda", planned.index % count)
        return torch.device("cuda", torch.cuda.current_device() or int(os.environ["LOCAL_RANK"]) % count)
    local_rank, local_ranks = (os.environ.get(name) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    as_planned = local_ranks in (None, str(planned.ranks_of_host)) and planned.index < count
    return torch.device(
        "cuda", planned.index % count if as_planned or local_rank is None else int(local_rank) % count
    )


BACKEND = "gloo"  # for what all ranks tell one another; between GPUs, engines have groups of their own


class World:
    """This rank among all ranks: torch.distributed is initialised, and the others are watched.

    Inside a `with`, a rank that gives no sign of life for `silence_s` ends this one (0: never).
    """

    _engines = 0  # the open ones, where an engine has initialised torch.distributed

    def __init__(self, *, timeout_s: float, silence_s: float = 0.0) -> None:
        """Raises InputError where torchrun describes no ranks, WorkerError where they are not reached in
        time.
        """
        meeting = meet(timeout_s)
        self.watch = Watch(meeting.store, meeting.rank, meeting.num_ranks, silence_s=silence_s)
        self._is_to_leave = False
        try:
            with self.watch:
                if not meeting.is_joined:
                    _initialise(meeting, timeout_s)
                    World._engines = 0
            self._is_to_leave = not meeting.is_joined or World._engines > 0
            World._engines += self._is_to_leave
        except BaseException:
            self.watch.close()
            raise

    def leave(self, failed: str | None = None) -> None:
        """Leaves the world; the last open engine destroys the process group that an engine has initialised.

        `failed` says why this engine has failed.
        """
        self.watch.close(failed)
        if self._is_to_leave:
            self._is_to_leave = False
            World._engines -= 1
            if World._engines == 0 and dist.is_initialized():
                dist.destroy_process_group()


def _initialise(meeting: Meeting, timeout_s: float) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    try:
        dist.init_process_group(
            BACKEND,
            store=meeting.store,
            rank=meeting.rank,
            world_size=meeting.num_ranks,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
    except RuntimeError as error:
        raise WorkerError(
            "the ranks have met and do not reach each other: one of them has ended, or GLOO_SOCKET_IFNAME "
            f"names a network that the others are not in ({first_line(error)})"
        ) from error


def job_of_this_rank(pipeline: Pipeline | None, request: RunRequest) -> Job:
    """Returns this rank's job: rank 0 sends every rank its job, or the error that all of them raise.

    The jobs are sent one after another: in addition to the model, rank 0 holds its own job and one more, not
    all of them.
    """
    if dist.get_rank() != 0:
        return _received_job()
    forget()
    others = range(1, dist.get_world_size())
    try:
        if pipeline is None:
            raise InputError("rank 0 must have the pipeline; the other ranks may pass None")
        work = _checked_work(pipeline, dist.get_world_size(), request)
        made = jobs(pipeline, work)
        own = encoded(made[0])  # the others' differ from it by their programs and tensors
    except Exception as error:
        known = isinstance(error, Pd2bwError)
        said = error if known else WorkerError(f"rank 0 failed making the jobs of all ranks: {error!r}")
        for rank in others:
            _send(said, rank)
        raise
    for rank in others:
        _send(encoded(made[rank]), rank)
    job: Job = decoded(own)
    return job


def _send(answer: bytes | Exception, rank: int) -> None:
    with name_peer_in_errors(rank):
        dist.send_object_list([answer], dst=rank)


def _received_job() -> Job:
    received: list[Any] = [None]
    with name_peer_in_errors(0):
        dist.recv_object_list(received, src=0)
    if isinstance(received[0], Pd2bwError):
        raise received[0]
    job: Job = decoded(received[0])
    return job


def _checked_work(pipeline: Pipeline, world_size: int, request: RunRequest) -> Work:
    """Returns the work; if the number of processes is wrong, the error for that comes first."""
    try:
        work = work_for(pipeline, request)
    except InputError:
        num_devices = len({stage.device for stage in pipeline.plan.stages})
        if request.replicas is None and world_size != num_devices:
            raise _wrong_size(pipeline.plan.num_stages, num_devices, world_size) from None
        raise
    if world_size != work.num_ranks:
        raise _wrong_size(work.shape.num_stages, work.num_ranks, world_size)
    return work


def _wrong_size(num_stages: int, num_ranks: int, world_size: int) -> InputError:
    has = f"has {counted(num_stages, 'stage')}"
    if num_ranks != num_stages:
        has += f", which are trained on {num_ranks} ranks,"
    return InputError(
        f"the pipeline {has} and there {are(world_size)} {counted(world_size, 'process')}; start {num_ranks} "
        f"(torchrun --nproc-per-node {num_ranks}), or split for {world_size}"
    )


def compare_options(own: Mapping[str, str], group: dist.ProcessGroup) -> None:
    """Raises InputError on every rank where ranks were given other options than rank 0, in words by name.

    They would wait for one another, or train by rules of their own. All ranks call it.
    """
    told: list[Any] = [None] * dist.get_world_size(group)
    with name_peer_in_errors(None):
        dist.all_gather_object(told, dict(own), group=group)
    for rank, theirs in enumerate(told):
        for name, first in told[0].items():
            if theirs[name] != first:
                raise InputError(
                    f"rank {rank} was given {name}={theirs[name]}, and rank 0 {name}={first}; all ranks make "
                    "their engines with the same options"
                )


def collected(own: Mapping[str, Tensor], group: dist.ProcessGroup) -> dict[str, Tensor]:
    """Returns the tensors of all ranks by name, as copies on the CPU; of several ranks' the first one's.

    Ranks send one after another, each tensor by itself, so that a rank holds no more than the result. All
    ranks call it.
    """
    rank = dist.get_rank(group)
    layouts = {name: torch.empty_like(tensor, device="meta") for name, tensor in own.items()}
    kinds: list[Any] = [None] * dist.get_world_size(group)
    with name_peer_in_errors(None):
        described = {name: (like.shape, like.stride(), like.dtype) for name, like in layouts.items()}
        dist.all_gather_object(kinds, described, group=group)
    found: dict[str, Tensor] = {}
    for source, theirs in enumerate(kinds):
        for name, (shape, stride, dtype) in theirs.items():
            if name in found:
                continue
            tensor = torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
            if source == rank:
                tensor.copy_(own[name].detach())
            found[name] = tensor
            data = torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensor.untyped_storage())
            if data.numel():
                with name_peer_in_errors(None if source == rank else source):
                    dist.broadcast(data, group=group, group_src=source)
    return found


def agreed_seed(seed: int | None, group: dist.ProcessGroup) -> int:
    """Returns rank 0's seed, on all ranks."""
    chosen = torch.initial_seed() if seed is None else seed
    told = torch.tensor([chosen % 2**63], device="cpu")
    with name_peer_in_errors(0):
        dist.broadcast(told, 0, group=group)
    return int(told)
