"""The process groups of an engine, and what each of them carries between which ranks.

    control      gloo, all ranks: batches' digests, losses, weights that are collected
    of(ranks)    sums over ranks that hold the same parameters
    links        tensors from stage to stage

The last two are nccl's if every rank has a GPU of its own, else gloo's; what goes over gloo's links is copied
from a GPU to the host and back.
"""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from pd2bw_fx.errors import InputError
from pd2bw_fx.runtime.failure import name_peer_in_errors

Backend = Literal["auto", "gloo", "nccl"]


class DirectedLink(NamedTuple):
    """One direction between two stages (`back`: the one of gradients), from one rank to another."""

    sender: int
    receiver: int
    back: bool
    source: int
    target: int


class Groups:
    """The process groups of an engine; all ranks make the same ones, in the same order."""

    def __init__(
        self, num_ranks: int, timeout_s: float, *, device: torch.device, backend: Backend = "auto"
    ) -> None:
        """Takes this rank's `device`.

        Raises InputError where ranks have different `backend`s, and for nccl where a rank is not on a GPU of
        its own.
        """
        self._ranks = tuple(range(num_ranks))
        self.timeout_s = timeout_s
        self._device = device
        self._made: list[dist.ProcessGroup] = []
        self._of_host = "gloo" if "cpu:gloo" in dist.get_backend_config() else None  # the default one
        self.control = self._new(self._ranks, self._of_host)
        self.is_nccl = self._chosen(backend)
        if self.is_nccl:  # without it, the first sum of another size may again wait for all ranks
            os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
        # nccl begins a call when everything that was launched on its stream before is done.
        on_gpu = self.is_nccl and device.type == "cuda"
        self.receiving: torch.cuda.Stream | None = (
            torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        )

    @property
    def wire(self) -> torch.device:
        """The device of tensors while they go over links."""
        return self._device if self.is_nccl else torch.device("cpu")

    def of_all(self) -> dist.ProcessGroup:
        return self.of(self._ranks)

    def of(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        """Returns a group for sums of tensors on the ranks' devices. An nccl group is used once here."""
        if not self.is_nccl:
            return self._new(ranks, self._of_host)
        group = self._new(ranks, "nccl")
        if dist.get_rank() in ranks:
            with name_peer_in_errors(None):
                dist.all_reduce(torch.zeros(1, device=self._device), group=group)
        return group

    def of_links(self, own: Iterable[DirectedLink]) -> Mapping[DirectedLink, dist.ProcessGroup]:
        """A group for each of this rank's directed links.

        gloo tells messages apart by their tags, and each of its groups has a thread that wakes a hundred
        times a second: `control` carries all links. nccl knows no tags and works through a group's calls in
        order, so that a send waits behind a receive: each directed link has a group of its own. The first
        use of such a group blocks both of its ranks until the other one has come. It is made here, in one
        order for all: during training two ranks could each wait for the other at a different link.
        """
        if not self.is_nccl:
            return dict.fromkeys(own, self.control)
        everyone: list[Any] = [None] * len(self._ranks)
        with name_peer_in_errors(None):
            dist.all_gather_object(everyone, list(own), group=self.control)
        made: dict[DirectedLink, dist.ProcessGroup] = {}
        for link in sorted({DirectedLink(*link) for links in everyone for link in links}):
            group = self._new(sorted((link.source, link.target)), "nccl")
            if dist.get_rank() in (link.source, link.target):
                made[link] = group
                self._use(link, group)
        torch.cuda.synchronize(self._device)
        return made

    def close(self) -> None:
        """Destroys the groups; their threads end with the last reference to them."""
        while self._made:
            dist.destroy_process_group(self._made.pop())

    def _new(self, ranks: Sequence[int], backend: str | None) -> dist.ProcessGroup:
        limit = datetime.timedelta(seconds=self.timeout_s)
        with name_peer_in_errors(None):
            group: dist.ProcessGroup = dist.new_group(list(ranks), timeout=limit, backend=backend)
        if dist.get_rank() in ranks:
            self._made.append(group)
        return group

    def _use(self, link: DirectedLink, group: dist.ProcessGroup) -> None:
        token = torch.zeros(1, device=self._device)
        if dist.get_rank() == link.source:
            with name_peer_in_errors(link.target):
                dist.send(token, link.target, group=group)
        else:
            with name_peer_in_errors(link.source):
                dist.recv(token, link.source, group=group)

    def _chosen(self, wanted: Backend) -> bool:
        everyone: list[Any] = [None] * len(self._ranks)
        with name_peer_in_errors(None):
            dist.all_gather_object(everyone, (wanted, _place(self._device)), group=self.control)
        for rank, (theirs, _) in enumerate(everyone):
            if theirs != wanted:
                raise InputError(
                    f"backend is {wanted!r} here and {theirs!r} on rank {rank}; give all ranks the same"
                )
        places = [place for _, place in everyone]
        require_gpus(wanted, places)
        if wanted != "auto":
            return wanted == "nccl"
        return None not in places and len(set(places)) == len(places) and dist.is_nccl_available()


def require_gpus(backend: Backend, gpus: Sequence[Hashable | None]) -> None:
    """Raises InputError for nccl unless each rank has a GPU of its own.

    `gpus[rank]` is None where the rank computes on the CPU.
    """
    if backend != "nccl":
        return
    for rank, gpu in enumerate(gpus):
        if gpu is None or gpu in gpus[:rank]:
            found = (
                f"rank {rank} computes on the CPU"
                if gpu is None
                else f"ranks {gpus.index(gpu)} and {rank} share one"
            )
            raise InputError(
                f"backend='nccl' moves tensors between GPUs, and {found}; leave it out, or give 'gloo'"
            )


def _place(device: torch.device) -> tuple[str, str] | None:
    """Returns what identifies a rank's GPU among all GPUs of all machines."""
    if device.type != "cuda":
        return None
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", device.index)
    return f"{socket.gethostname()} {os.environ.get('NCCL_HOSTID', '')}", str(uuid)
