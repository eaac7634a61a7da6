"""The calls of one engine: all ranks make them, and what ends one ends all."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch.distributed as dist

from pd2bw_fx.errors import InputError, WorkerError
from pd2bw_fx.runtime.failure import (
    forget,
    is_met_by_all,
    note_full_memory,
    share_failure,
    tell,
    tell_launcher,
    translated,
)
from pd2bw_fx.runtime.inference import ordinary_tensors
from pd2bw_fx.runtime.job import Job
from pd2bw_fx.runtime.watch import Watch
from pd2bw_fx.runtime.world import World

Together = Callable[[], AbstractContextManager[None]]  # a part of a call, which all ranks end alike
_NOBODY = Watch(None, 0, 1, silence_s=0.0)


class SharedCalls:
    """What has become of an engine, and whether it can still be called.

    `world` is what a torchrun engine has joined; None where others care for the ranks.
    """

    def __init__(self, job: Job, control: dist.ProcessGroup) -> None:
        self.world: World | None = None
        self.is_closed = False
        self.is_broken = False
        self._rank, self._num_ranks = job.rank, job.num_ranks
        self._described = job.described()
        self._control: dist.ProcessGroup | None = control
        self._name = control.group_name
        self._num_refused = 0
        self._has_told = False  # why this rank ends
        self._at: Callable[[], str] = str  # the action, where others do not care for that
        self._why_broken: str | None = None  # unless another rank was the first
        if self._rank == 0:
            forget(self._name)

    @contextmanager
    def shared(self, doing: str, *, alone: bool = False, on: str = "") -> Iterator[None]:
        """A call on all ranks, or (`alone`) one that waits for others and that not all need make; `on` what,
        which is the same on all of them.

        Raises InputError for an engine that was closed or has lost its process group, WorkerError for one
        that failed before, and with the reason of a rank that fails in here.
        """
        if self.is_closed:
            raise InputError("this engine was closed; make a new one")
        if self.is_broken:
            raise WorkerError("this engine failed before and its pipeline is torn; make a new one")
        if not dist.is_initialized():
            raise InputError(
                "the process group was destroyed while the engine was open; call engine.close() before "
                "dist.destroy_process_group(), or make the engine in a with statement"
            )
        try:
            watch = _NOBODY if self.world is None else self.world.watch
            if not alone:
                watch.begin(doing, on)
            told = share_failure(self._rank, self._described, doing, watch.lost, engine=self._name)
            with watch, told, ordinary_tensors():
                try:
                    yield
                except Exception as error:
                    note_full_memory(error, self._at())
                    raise
        except BaseException as error:
            self.is_broken = True
            if not isinstance(error, WorkerError):
                self._why_broken = f"rank {self._rank} ({self._described}) failed {doing}: {error!r}"
            raise

    @contextmanager
    def reading_a_batch(self, doing: str, update: int) -> Iterator[None]:
        """What every rank refuses was begun by none: the engine is as before, and goes on."""
        refused: InputError | None = None
        with self.shared(doing):
            try:
                yield
            except InputError as error:
                self._num_refused += 1
                what = f"{self._name}/refused/{self._num_refused}/{update}"
                if not is_met_by_all(what, self._num_ranks):
                    raise
                refused = error
        if refused is not None:
            raise refused

    @contextmanager
    def agreeing(self, doing: str) -> Iterator[Together]:
        """What a rank refuses in a part of this, all do at its end. The engine is as before, and goes on."""
        refused: InputError | None = None
        with self.shared(doing):
            try:
                yield self._together
            except InputError as error:
                refused = error
        if refused is not None:
            raise refused

    @contextmanager
    def _together(self) -> Iterator[None]:
        refused: InputError | None = None
        try:
            yield
        except InputError as error:
            refused = error
        told: list[str | None] = [None] * self._num_ranks
        with translated(None):
            dist.all_gather_object(told, None if refused is None else str(refused), group=self._control)
        if refused is not None:
            raise refused
        for rank, words in enumerate(told):
            if words is not None:
                raise InputError(f"rank {rank}: {words}")

    def join(self, world: World, named: Callable[[int], str], doing: Callable[[], str]) -> None:
        """The engine is made; `named` names a rank with its stages, `doing` tells what this one is at."""
        self.world, self._at = world, doing
        world.watch.tell_of(self._name, named, doing, functools.partial(tell, self._name))

    def tell(self, error: BaseException, when: str) -> None:
        """The user's program on this rank fails outside of the engine's calls: others may wait for it."""
        if not self.is_closed and not self.is_broken:
            self._has_told = True
            shown = "".join(traceback.format_exception(error))
            failed = f"the program of rank {self._rank} ({self._described}) failed {when}"
            tell_launcher(error, shown)
            tell(self._name, f"{failed}:\n{shown}")
            self._why_broken = f"{failed}: {error!r}"
            if self.world is not None:
                self.world.watch.fail(self._why_broken)

    def leave_torn(self) -> None:
        """The user's program ends with microbatches in flight, which others may wait for."""
        if self.world is not None and not self._has_told:
            who = f"rank {self._rank} ({self._described})"
            self.world.watch.fail(
                f"{who} has left the pipeline: its program ended, or closed its engine, early"
            )

    def close(self) -> None:
        """Connections are not closed before all ranks are through with them: what this one has sent last may
        still be on its way, and would be lost. Nobody is waited for longer than some seconds."""
        self.is_closed = True
        self._control = None  # its owner knows when the last reference goes
        if self.world is not None:
            if not self.is_broken and not self._has_told:
                with self.world.watch:
                    is_met_by_all(f"{self._name}/closed", self._num_ranks)
            self.world.leave(self._why_broken)
            self.world = None
