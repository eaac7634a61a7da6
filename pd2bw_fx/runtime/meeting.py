"""How the ranks of a job meet, and agree on a store that is theirs alone.

torchrun's store outlives its ranks and their engines: it may hold addresses that nobody listens at any more,
left by an earlier engine or by ranks that torchrun has restarted since.

    word/RANK            every rank writes a word that it has made up for this meeting
    answer/RANK          rank 0 answers with that word and its own, which names the meeting
    taken/MEETING/RANK   the rank has read the answer to its own word
"""

from __future__ import annotations

import datetime
import functools
import os
import sys
import time
import uuid
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from pd2bw_fx.errors import InputError, WorkerError

_PLACE = "pd2bw_fx/meeting"
_LOOK_S = 0.02
_PATIENCE_S = 30.0  # before a log message says which ranks are missing


@dataclass(frozen=True, slots=True)
class Meeting:
    """The result of a meeting: all ranks have come."""

    store: Any
    rank: int
    num_ranks: int
    is_joined: bool  # torch.distributed was initialised before


def meet(timeout_s: float) -> Meeting:
    """Waits for the ranks that torchrun describes, or takes those of an initialised torch.distributed.

    Raises InputError where there are neither, or where torch.distributed connects only GPUs, WorkerError
    naming the ranks that did not come in time.
    """
    if dist.is_initialized():
        if "cpu:" not in (backends := dist.get_backend_config()):
            raise InputError(
                f"torch.distributed was initialised for {backends}, and losses and digests of batches are on "
                "the CPU; give init_process_group('cpu:gloo,cuda:nccl'), or leave it to the engine"
            )
        store = dist.distributed_c10d._get_default_store()
        return Meeting(store, dist.get_rank(), dist.get_world_size(), is_joined=True)
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise InputError(
            "an engine needs one process for each rank: start the script with torchrun --nproc-per-node N, "
            "or train with pipe.train_local(...), which starts local processes itself"
        )
    store, rank, num_ranks = _rendezvous(timeout_s)
    name = _Arrival(store, rank, num_ranks).name(timeout_s)
    return Meeting(PrefixStore(name, store), rank, num_ranks, is_joined=False)


@functools.cache
def _rendezvous(timeout_s: float) -> tuple[Any, int, int]:
    """Makes the store once in a process: where rank 0 holds it itself, another engine would find it gone."""
    rank, num_ranks = (_number(name) for name in ("RANK", "WORLD_SIZE"))
    if not 0 <= rank < num_ranks:
        raise InputError(
            f"RANK is {rank} and WORLD_SIZE {num_ranks}; ranks from 0 to {num_ranks - 1} were expected"
        )
    try:
        store, _, _ = next(rendezvous("env://", timeout=datetime.timedelta(seconds=timeout_s)))
    except ValueError as error:
        raise InputError(f"{error}; torchrun sets it, beside RANK and WORLD_SIZE") from None
    except dist.DistError as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise WorkerError(
            f"rank {rank} of {num_ranks} did not find the others at {where} within {timeout_s:.0f} s: "
            f"{str(error).splitlines()[0]}"
        ) from error
    return store, rank, num_ranks


def _number(name: str) -> int:
    try:
        return int(os.environ[name])
    except ValueError:
        raise InputError(f"{name} is {os.environ[name]!r}; torchrun sets a whole number") from None


class _Arrival:
    """One rank's part in one meeting."""

    def __init__(self, store: Any, rank: int, num_ranks: int) -> None:
        self._store = PrefixStore(_PLACE, store)
        self._rank = rank
        self._num_ranks = num_ranks
        self._word = uuid.uuid4().hex
        self._store.set(f"word/{rank}", self._word)
        self._name: str | None = None
        if rank == 0:
            self._take(self._word)

    def name(self, timeout_s: float) -> str:
        began_s = time.monotonic()
        has_told = False
        while not self._all_are_here():
            waited_s = time.monotonic() - began_s
            if waited_s > timeout_s:
                raise WorkerError(
                    f"{self._missing()} of {self._num_ranks} did not come to make an engine within "
                    f"{timeout_s:.0f} s"
                )
            if waited_s > _PATIENCE_S and not has_told:
                has_told = True
                sys.stderr.write(f"rank {self._rank} waits for {self._missing()} to make an engine\n")
            time.sleep(_LOOK_S)
        assert self._name is not None
        return self._name

    def _all_are_here(self) -> bool:
        if self._rank == 0:
            self._answer_all()
        elif self._name is None and self._store.check([f"answer/{self._rank}"]):
            word, name = self._store.get(f"answer/{self._rank}").decode().split()
            if word == self._word:
                self._take(name)
        return self._name is not None and self._store.check([self._taken(r) for r in range(self._num_ranks)])

    def _answer_all(self) -> None:
        for other in range(1, self._num_ranks):
            if self._store.check([f"word/{other}"]) and not self._store.check([self._taken(other)]):
                word = self._store.get(f"word/{other}").decode()
                self._store.set(f"answer/{other}", f"{word} {self._name}")

    def _take(self, name: str) -> None:
        self._name = name
        self._store.set(self._taken(self._rank), "")

    def _taken(self, rank: int) -> str:
        return f"taken/{self._name}/{rank}"

    def _missing(self) -> str:
        if self._name is None:
            return "rank 0"
        ranks = [r for r in range(self._num_ranks) if not self._store.check([self._taken(r)])]
        return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
