"""The calls of one engine that all ranks make, and that fail on all ranks if they fail on one."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch.distributed as dist

from pd2bw_fx.errors import InputError, WorkerError
from pd2bw_fx.runtime.failure import (
    at,
    forget,
    is_met_by_all,
    left_early,
    name_peer_in_errors,
    share_failure,
    tell,
)
from pd2bw_fx.runtime.inference import ordinary_tensors
from pd2bw_fx.runtime.job import Job
from pd2bw_fx.runtime.launcher import tell_launcher
from pd2bw_fx.runtime.watch import Watch
from pd2bw_fx.runtime.world import World

Together = Callable[[], AbstractContextManager[None]]  # a part of a call that ends alike on all ranks
_NOBODY = Watch(None, 0, 1, silence_s=0.0)


class SharedCalls:
    """Runs an engine's calls, and knows whether it can still be called.

    `world` is what a torchrun engine has joined; None where the ranks are watched in another way.
    """

    def __init__(self, job: Job, control: dist.ProcessGroup) -> None:
        self.world: World | None = None
        self.is_closed = False
        self.is_broken = False
        self._rank, self._num_ranks = job.rank, job.num_ranks
        self._described, self._named = job.described(), job.name_of
        self._control: dist.ProcessGroup | None = control
        self._name = control.group_name
        self._num_refused = 0
        self._has_told = False  # whether this rank has told the others why it ends
        self._call = ""  # what this rank's present call does
        self._where: Callable[[], str] = str  # at which action this rank is, for the end of a message
        self._why_broken: str | None = None  # this rank's own failure; None if another rank was the first
        if self._rank == 0:
            forget(self._name)

    def perform_by(self, where: Callable[[], str]) -> None:
        """Takes note of what says at which action of a schedule this rank is."""
        self._where = where

    def doing(self) -> str:
        """Returns what this rank does in its present call, with the action; nothing between calls."""
        call = self._call  # read once: the watch's thread asks while this rank goes on
        return call and call + self._where()

    @contextmanager
    def shared(self, doing: str, *, alone: bool = False, on: str = "") -> Iterator[None]:
        """Runs a call that all ranks make.

        `alone`: not all ranks need make it, but it waits for others. `on` is what the call works on, in words
        that are the same on all ranks.

        Raises InputError for an engine that was closed or has lost its process group, WorkerError for one
        that failed before, and WorkerError with the reason of a rank that fails in here.
        """
        if self.is_closed:
            raise InputError("this engine was closed; make a new one")
        if self.is_broken:
            why = "" if self._why_broken is None else f": {self._why_broken}"
            raise WorkerError(f"this engine failed before and its pipeline is torn; make a new one{why}")
        if not dist.is_initialized():
            raise InputError(
                "the process group was destroyed while the engine was open; call engine.close() before "
                "dist.destroy_process_group(), or make the engine in a with statement"
            )
        outer, self._call = self._call, doing
        watch = _NOBODY if self.world is None else self.world.watch
        try:
            if not alone:
                watch.begin(doing, on)
            told = share_failure(
                self._rank,
                self._described,
                lambda: doing + self._where(),
                watch.lost,
                named=self._named,
                engine=self._name,
            )
            with watch, told, ordinary_tensors():
                yield
        except BaseException as error:
            self.is_broken = True
            if not isinstance(error, WorkerError):
                when = doing + self._where() + at(error)
                self._why_broken = f"rank {self._rank} ({self._described}) failed {when}: {error!r}"
                # The program may catch the error and go on, with the connections that others wait at.
                watch.fail(self._why_broken)
            raise
        finally:
            self._call = outer

    @contextmanager
    def reading_a_batch(self, doing: str, update: int) -> Iterator[None]:
        """Runs the part of a call that may refuse a batch.

        If every rank refuses it, the engine is as before.
        """
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
        """Runs a call with parts in which what one rank refuses, all refuse. The engine is then as before."""
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
        with name_peer_in_errors(None):
            dist.all_gather_object(told, None if refused is None else str(refused), group=self._control)
        if refused is not None:
            raise refused
        for rank, words in enumerate(told):
            if words is not None:
                raise InputError(f"rank {rank}: {words}")

    def join(self, world: World, named: Callable[[int], str], doing: Callable[[], str]) -> None:
        """Takes note of a complete engine: `named` names a rank with its stages, `doing` says what it
        does.
        """
        self.world = world
        world.watch.tell_of(self._name, named, doing, functools.partial(tell, self._name))

    def tell(self, error: BaseException, when: str) -> None:
        """Tells ranks that may wait for this one that its program fails outside of the engine's calls."""
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
        """Tells ranks that may wait that the user's program ends here with microbatches in flight."""
        if self.world is not None and not self._has_told:
            who = f"rank {self._rank} ({self._described})"
            self.world.watch.fail(left_early(who))

    def close(self) -> None:
        """Waits some seconds at most until all ranks have come to their end, and leaves the world.

        If connections were closed before, what this rank has sent last might still be on its way, and would
        be lost.
        """
        self.is_closed = True
        self._control = None  # the engine ends the group with its last reference
        self._where = str  # nor is the runner held, which has groups too
        if self.world is not None:
            if not self.is_broken and not self._has_told:
                with self.world.watch:
                    is_met_by_all(f"{self._name}/closed", self._num_ranks)
            self.world.leave(self._why_broken)
            self.world = None
