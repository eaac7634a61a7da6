"""The worker processes of one run on this machine: sends them batches, reads their losses, and ends them."""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing import connection as mp
from multiprocessing.connection import Connection
from socket import SHUT_RDWR, socket, socketpair
from typing import Any

import torch
from torch import Tensor

from pd2bw_fx.errors import InputError, WorkerError
from pd2bw_fx.metrics import Metrics, told_losses
from pd2bw_fx.runtime.job import Job, merged_tensors
from pd2bw_fx.runtime.launcher import how_ended
from pd2bw_fx.runtime.loss_reader import updates_apart
from pd2bw_fx.runtime.messages import (
    BEAT_S,
    SILENCE_S,
    Alive,
    Batch,
    Done,
    Failed,
    Finish,
    Finished,
    Start,
    defer_interrupts,
    receive,
)
from pd2bw_fx.runtime.nursery import Nursery, Process
from pd2bw_fx.runtime.stage_runner import Microbatch
from pd2bw_fx.runtime.wire import encoded, encoded_with_code
from pd2bw_fx.units import counted

_OF_TORCHRUN = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
_AHEAD = 2  # batches sent to a worker beyond those that it has done, or can do without more batches
_LEAVING_S, _ENDING_S = 5.0, 2.0  # until a worker is killed: one that has finished, one whose run has failed
_REASONS_S = 3.0  # after a first failure, how long to wait for a better reason


@dataclass(frozen=True, slots=True)
class TrainResult:
    """The mean loss of every update, and the weights after the last one, by name in the operator graph.

    `numbers` holds, for each other output of the model that is one number, its mean in every update.
    `metrics` is what a report shows: `result.metrics.save(folder)`. `averaged` is the model's state dict with
    the moving average of its weights, where `weight_average` was given, else None.
    """

    losses: tuple[float, ...]
    tensors: Mapping[str, Tensor] = field(repr=False)
    metrics: Metrics = field(repr=False)
    numbers: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    averaged: Mapping[str, Tensor] | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        return f"<TrainResult: {told_losses(self.losses)}>"


class LocalRun:
    """The processes of one training run."""

    def __init__(
        self, starts: list[Start], on_update: Callable[[int, float], bool | None] | None, ready: Nursery
    ) -> None:
        self.jobs: list[Job] = [start.job for start in starts]
        clips = starts[0].options.max_gradient_norm is not None
        self._ahead = _AHEAD + updates_apart(self.jobs[0], clips=clips)
        self.losses: list[float] = []
        self.numbers: dict[str, list[float]] = {}
        self._update_s: list[float] = []
        self._told_s = time.monotonic()
        self._on_update = on_update
        self.is_told_to_stop = False
        self._sent = [0] * len(starts)
        self._done = [0] * len(starts)
        self._finished: dict[int, Finished] = {}
        self._processes: list[Process] = []
        self._connections: list[Connection] = []
        self._outboxes: list[queue.SimpleQueue[bytes | None]] = []
        self._last_heard: dict[int, float] = {}  # times of those that have begun to work
        self._doing: dict[int, str] = {}  # when they last said so
        try:
            pickled = [_pickled(start) for start in starts]
            for start in starts:
                self._start_process(ready, start.num_threads)
            for rank, message in enumerate(pickled):
                self._send(rank, encoded(sys.path))
                self._send(rank, message)
        except BaseException:
            self.end()
            raise

    @property
    def num_given(self) -> int:
        return max(self._sent)

    @property
    def has_trained(self) -> bool:
        return any(self._done)

    def step(self, batch: Any) -> None:
        """Hands out a batch; returns when the workers have room for another one."""
        layout, m = self.jobs[0].layout, self.jobs[0].microbatches_per_update
        try:
            flat = layout.flat_batches(batch, m)
            sizes = tuple(Microbatch.of(piece).size for piece in layout.pieces(flat, m))
        except InputError as error:
            raise InputError(f"batch {self.num_given}: {error}") from None
        own = [[{name: one[name].detach() for name in job.inputs()} for one in flat] for job in self.jobs]
        messages = [encoded(Batch(inputs, sizes)) for inputs in own]
        with defer_interrupts() as interrupts:  # ranks that have been given different batches do not finish
            for rank, message in enumerate(messages):
                self._send(rank, message)
                self._sent[rank] += 1
        if interrupts:
            raise KeyboardInterrupt
        while self._sent[0] - min(self._done) >= self._ahead:
            self._hear()

    def finish_after_error(self) -> TrainResult:
        """Returns what was trained, without calling `on_update`.

        Raises WorkerError also where workers have not been given the same batches, and would wait for more.
        """
        self._on_update = None
        if len(set(self._sent)) > 1:
            raise WorkerError("a batch had not been given to all ranks")
        return self.finish()

    def finish(self) -> TrainResult:
        for rank in range(len(self.jobs)):
            self._send(rank, encoded(Finish()))
        while len(self._finished) < len(self.jobs):
            self._hear()
        ended = [self._finished[rank] for rank in sorted(self._finished, reverse=True)]
        tensors = {name: t for finished in ended for name, t in finished.tensors.items()}
        losses, job = tuple(self.losses), self.jobs[0]
        metrics = Metrics(
            job.method,
            job.microbatches_per_update,
            losses,
            tuple(self._update_s),
            records=self._finished[0].records,
            replicas=job.shape.replicas,
        )
        numbers = {name: tuple(means) for name, means in self.numbers.items()}
        averaged = None
        if all(finished.averages is not None for finished in ended):
            averaged = merged_tensors(job, [*(f.averages or {} for f in ended), tensors])
        return TrainResult(losses, tensors, metrics, numbers, averaged)

    def end(self) -> None:
        """Ends all processes of the run, whatever has happened.

        Those that end by themselves may print first.
        """
        for rank, connection in enumerate(self._connections):
            if rank not in self._finished:
                _hang_up(connection)
        all_finished = len(self._finished) == len(self._processes)
        until_s = time.monotonic() + (_LEAVING_S if all_finished else _ENDING_S)
        try:
            for process in self._processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=max(until_s - time.monotonic(), 0.0))
        finally:  # another Ctrl-C too
            for process in self._processes:
                process.kill()
        for process in self._processes:
            process.wait()
        for outbox, connection in zip(self._outboxes, self._connections, strict=True):
            outbox.put(None)
            connection.close()

    def _start_process(self, ready: Nursery, num_threads: int) -> None:
        ours, theirs = socketpair()
        with theirs:
            environment = os.environ | {"OMP_NUM_THREADS": str(num_threads)}
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
            for name in _OF_TORCHRUN:
                environment.pop(name, None)
            self._processes.append(ready.start_worker(theirs, environment))
        self._connections.append(Connection(ours.detach()))
        self._outboxes.append(queue.SimpleQueue())
        arguments = (self._connections[-1], self._outboxes[-1])
        threading.Thread(target=_write, args=arguments, daemon=True).start()

    def _send(self, rank: int, message: bytes) -> None:
        """Sends without waiting: a worker that stands still must not keep this process from noticing."""
        self._outboxes[rank].put(message)

    def _hear(self) -> None:
        """Reads at least one message; raises a worker's failure or death."""
        waiting = [c for rank, c in enumerate(self._connections) if rank not in self._finished]
        heard = mp.wait(waiting, timeout=BEAT_S)
        self._check_silence({self._connections.index(c) for c in heard if isinstance(c, Connection)})
        for connection in heard:
            assert isinstance(connection, Connection)
            rank = self._connections.index(connection)
            with defer_interrupts() as interrupts:
                try:
                    message = receive(connection)
                except (EOFError, OSError):
                    raise self._reason({rank: None}) from None
            self._last_heard[rank] = time.monotonic()
            self._take(rank, message)
            if interrupts:
                raise KeyboardInterrupt

    def _check_silence(self, about_to_speak: set[int]) -> None:
        """Raises WorkerError for a silent worker. One whose messages wait to be read here is alive."""
        for rank, heard in self._last_heard.items():
            silence_s = time.monotonic() - heard
            if rank not in self._finished.keys() | about_to_speak and silence_s > SILENCE_S:
                raise WorkerError(
                    f"{self._who(rank)} has given no sign of life for {silence_s:.0f} s: it was stopped, or "
                    f"the machine has no memory or time for it{self._last_known(rank)}"
                )

    def _take(self, rank: int, message: Alive | Done | Finished | Failed) -> None:
        if isinstance(message, Alive):
            self._doing[rank] = message.doing
            return
        if isinstance(message, Failed):
            raise self._reason({rank: message})
        if isinstance(message, Finished):
            self._finished[rank] = message
            return
        self._done[rank] += 1
        if message.loss is not None:
            self.losses.append(message.loss)
            for name, mean in message.numbers.items():
                self.numbers.setdefault(name, []).append(mean)
            before_s, self._told_s = self._told_s, time.monotonic()
            self._update_s.append(self._told_s - before_s)
            if self._on_update is not None:
                told = self._on_update(len(self.losses) - 1, message.loss)
                self.is_told_to_stop = self.is_told_to_stop or _is_false(told)

    def _reason(self, failures: dict[int, Failed | None]) -> WorkerError:
        """Returns the first cause.

        A worker whose peer died fails too, so it waits a moment for the others.
        """
        deadline = time.monotonic() + _REASONS_S
        while time.monotonic() < deadline and not any(f and not f.is_consequence for f in failures.values()):
            open_ = {self._connections[r]: r for r in range(len(self.jobs)) if r not in failures}
            if not open_:
                break
            for connection in mp.wait(list(open_), timeout=deadline - time.monotonic()):
                assert isinstance(connection, Connection)
                rank = open_[connection]
                try:
                    message = receive(connection)
                except (EOFError, OSError):
                    failures[rank] = None
                else:
                    if isinstance(message, Failed):
                        failures[rank] = message
            if None in failures.values():
                break
        for rank, failure in failures.items():
            if failure is not None and not failure.is_consequence:
                return WorkerError(f"{self._who(rank)} failed with {failure.kind}:\n{failure.error}")
        for rank, failure in failures.items():
            if failure is None:
                return WorkerError(f"{self._who(rank)} {self._how_it_ended(rank)}{self._last_known(rank)}")
        failure = next(iter(failures.values()))
        assert failure is not None
        return WorkerError(failure.error)

    def _who(self, rank: int) -> str:
        job = self.jobs[rank]
        return f"rank {rank} ({job.described()} on {job.device.name}, process {self._processes[rank].pid})"

    def _last_known(self, rank: int) -> str:
        doing = self._doing.get(rank)
        heard = "" if doing is None else f", last heard of {doing}"
        return f"; {counted(self._done[rank], 'update')} done{heard}"

    def _how_it_ended(self, rank: int) -> str:
        try:
            code = self._processes[rank].wait(timeout=_REASONS_S)
        except subprocess.TimeoutExpired:
            return "closed its connection and did not end"
        return how_ended(code)


def _is_false(told: Any) -> bool:
    """Returns whether a callback's result is Python's, numpy's or torch's False; it may return anything."""
    if isinstance(told, Tensor):
        return told.dtype == torch.bool and told.numel() == 1 and not told.item()
    return type(told).__name__ in ("bool", "bool_") and not told


def _write(connection: Connection, outbox: queue.SimpleQueue[bytes | None]) -> None:
    """Hands messages to a worker until None comes, or the worker is gone, which the reader notices."""
    with contextlib.suppress(OSError, ValueError):
        while (message := outbox.get()) is not None:
            connection.send_bytes(message)


def _hang_up(connection: Connection) -> None:
    """Shuts a connection down, at which the worker ends; other threads may go on to read and write here."""
    with contextlib.suppress(OSError), socket(fileno=os.dup(connection.fileno())) as pair:
        pair.shutdown(SHUT_RDWR)


def _pickled(start: Start) -> bytes:
    try:
        return encoded_with_code(start)
    except Exception as error:
        raise InputError(
            f"optimizer and options are sent to the workers, and one of them cannot be ({error}); use "
            "functions or lambdas that hold no open file, lock or process; a module that was loaded by its "
            "path is sent whole, unless its folder is on sys.path"
        ) from error
