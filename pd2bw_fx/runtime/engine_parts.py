"""What an engine is made of, and how it ends: flushed, closed, or left where a program ends."""

from __future__ import annotations

import sys
import warnings
import weakref
from dataclasses import replace
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist

from pd2bw_fx.actions import RunRequest
from pd2bw_fx.runtime.action_stream import ActionStream
from pd2bw_fx.runtime.batch_reader import BatchReader
from pd2bw_fx.runtime.corrections import PipeMare, corrections_of
from pd2bw_fx.runtime.groups import Groups
from pd2bw_fx.runtime.job import Job
from pd2bw_fx.runtime.loss_reader import LossReader
from pd2bw_fx.runtime.options import EngineOptions
from pd2bw_fx.runtime.reports import LossLog
from pd2bw_fx.runtime.results import Results
from pd2bw_fx.runtime.setup import make_recorder, make_runner, make_weights
from pd2bw_fx.runtime.shared_calls import SharedCalls
from pd2bw_fx.runtime.world import agreed_seed, compare_options, local_device
from pd2bw_fx.units import counted


class EngineParts:
    """The parts of one rank's engine, from their making to their end."""

    def __init__(self, job: Job, options: EngineOptions, request: RunRequest | None = None) -> None:
        """Makes this rank's engine, at the same time as all other ranks make theirs.

        `torch.distributed` must be initialised. `request` is what this rank has asked for, where rank 0 has
        made the job. `from_pipeline` is how users make engines.
        """
        self.job = job
        self.device = local_device(job.device, options.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self._stop_at_nan = options.stop_at_nan
        self._precision = options.precision
        corrections = corrections_of(job.method) if options.corrections is None else options.corrections
        synchronous_updates = max(
            (c.synchronous_updates for c in corrections if isinstance(c, PipeMare)), default=0
        )
        self._groups = groups = Groups(
            job.num_ranks, options.timeout_s, device=self.device, backend=options.backend
        )
        self._control = groups.control
        compare_options(options.alike() | job.asked_by(request or RunRequest()), self._control)
        self._calls = SharedCalls(job, self._control)
        self._weights = weights = make_weights(
            job,
            self.device,
            groups=groups,
            max_gradient_norm=options.max_gradient_norm,
            precision=options.precision,
            corrections=corrections,
            average_decay=options.weight_average,
            compile_options=options.compile_options,
        )
        self.job = job = replace(job, tensors={})  # the weights are the store's now
        self._actions = ActionStream(job, synchronous_updates=synchronous_updates)
        self._results = Results(job, group=self._control)
        self._batches = BatchReader(job, self.device, self._results, self._control)
        weights.optimize_with(
            options.optimizer,
            options.lr_scheduler,
            options.parameter_options,
            everywhere=[spec for spec in job.parameters if spec.trainable],
        )
        self._losses = LossReader(
            job,
            weights,
            self._results,
            self._calls,
            clips=options.max_gradient_norm is not None,
            synchronous_updates=synchronous_updates,
        )
        self._log = LossLog(
            options.on_report,
            rank=job.rank,
            num_ranks=job.num_ranks,
            stop_at_nan=options.stop_at_nan,
            source=lambda microbatch: job.name_of(job.rank_of(job.loss_stage, microbatch)),
            microbatches_per_update=job.microbatches_per_update,
            learning_rates=weights.learning_rates,
            gradient_norm=weights.gradient_norm,
        )
        self._recorder = make_recorder(job, options.record, self._control, self.device)
        self._runner = make_runner(
            job,
            self._weights,
            self.device,
            groups=groups,
            precision=options.precision,
            is_compiled=options.compile_options is not None,
            on_output=self._results.collect,
            before_waiting=self._results.send,
            recorder=self._recorder,
        )
        self._calls.perform_by(self._runner.where)
        self._draw_by(agreed_seed(options.seed, self._control))

    def __repr__(self) -> str:
        job = self.job
        return (
            f"<Engine of {job.name_of(self.rank)} on {self.device}: {job.method}, "
            f"{counted(job.microbatches_per_update, 'microbatch')} an update, {self.doing()}>"
        )

    @property
    def rank(self) -> int:
        """This process's rank; the ranks are numbered from 0 in the order of the plan's devices."""
        return self.job.rank

    @property
    def updates(self) -> int:
        """The number of updates begun so far."""
        return self._actions.updates

    @property
    def loss_scale(self) -> float:
        """The loss scale of the newest weights under fp16; 1 in other precisions."""
        with self._calls.shared("reading the loss scale", alone=True):
            return self._weights.loss_scale(self._weights.newest)

    @property
    def stages(self) -> tuple[int, ...]:
        """The numbers of the stages that this rank runs."""
        return self.job.stages

    def flush(self) -> None:
        """Drains the pipeline: finishes all microbatches in flight and makes the last update.

        Training may go on afterwards.
        """
        with self._calls.shared("at the end of the pipeline"):
            if not self._actions.is_empty:
                peers = self._actions.peer_actions_while_draining() if self._groups.is_nccl else None
                self._runner.run(self._actions.drain(), peers)
                self._actions.go_on_after(self.updates)
            self._runner.finish_update()
            self._runner.settle()
            self._losses.flushed(self.updates)
            self._log.finish()

    def close(self) -> None:
        """Destroys the engine's process groups; the last engine open also leaves the world that it joined.

        It does not flush. It warns of updates that are still in flight, unless an exception is on its way.
        """
        if self._calls.is_closed:
            return
        if sys.exc_info()[0] is None:
            self._warn_of_updates_in_flight("was closed", stacklevel=3)
        self._calls.close()
        if self._calls.is_broken:
            return
        if dist.is_initialized():
            self._groups.close()
        if self._actions.is_empty:
            # gloo's threads are joined with the last reference to their group. One that lets go of a tensor
            # while the interpreter ends aborts the process.
            del (
                self._groups,
                self._control,
                self._runner,
                self._results,
                self._batches,
                self._weights,
                self._losses,
                self._log,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Flushes, unless the block failed or has closed the engine, and closes."""
        try:
            if error is not None:
                self._tell_of(error)
            elif not self._calls.is_closed:
                self.flush()
        finally:
            self.close()

    def _tell_of(self, error: BaseException) -> None:
        """Tells ranks that may wait for this one that its program failed outside of the engine's calls."""
        self._calls.tell(error, f"after {counted(self.updates, 'update')}")

    def _warn_of_updates_in_flight(self, how: str, *, stacklevel: int) -> None:
        count = 0 if self._calls.is_broken else self._actions.updates_in_flight
        if count:
            warnings.warn(
                f"the engine of {self.job.name_of(self.rank)} {how} with {counted(count, 'update')} in "
                "flight, which will not be made; call engine.flush() after the last step, or make the engine "
                "in a with statement, which flushes at its end",
                stacklevel=stacklevel,
            )

    def _draw_by(self, seed: int) -> None:
        self._seed = seed
        self._runner.draw_by(seed)

    def doing(self) -> str:
        """Returns what this rank is doing, for a message: its call, and the action in it."""
        return self._calls.doing() or f"after {counted(self.updates, 'update')}"


def close_at_exit(known: weakref.ref[EngineParts]) -> None:
    """Closes an engine that nobody has closed, unless microbatches are in flight that others wait for."""
    engine = known()
    error = getattr(sys, "last_value", None)  # what has ended the program
    if engine is None:
        return
    if error is not None:
        engine._tell_of(error)
    if engine._actions.is_empty or engine._calls.is_broken:
        engine.close()
    else:
        if error is None and not engine._calls.is_closed:  # close() has warned
            engine._warn_of_updates_in_flight("was left", stacklevel=1)
        engine._calls.leave_torn()
