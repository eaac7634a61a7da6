"""A local worker process, started by train_local only: forked by `nursery.py`, or as a process of its own.

It has an end of a socket pair. Commands come as the dataclasses of `messages.py`, and answers go back the
same way; when the other end is gone, the worker ends.
"""

from __future__ import annotations

import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.distributed.constants import default_pg_timeout

from pd2bw_fx.errors import Pd2bwError, WorkerError
from pd2bw_fx.passes.schedule import register_method
from pd2bw_fx.runtime.engine import Engine
from pd2bw_fx.runtime.failure import at, note_full_memory
from pd2bw_fx.runtime.launcher import end_now
from pd2bw_fx.runtime.messages import BEAT_S, Alive, Done, Failed, Finish, Finished, Start, receive
from pd2bw_fx.runtime.nursery import given_end, note_worker
from pd2bw_fx.runtime.stage_runner import Microbatch
from pd2bw_fx.runtime.wire import decoded, encoded
from pd2bw_fx.runtime.world import BACKEND


def serve(descriptor: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    note_worker()
    connection = Connection(descriptor)
    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
    try:
        sys.path[:] = receive(connection)
        received = [connection.recv_bytes()]
    except (EOFError, OSError):  # the parent has gone, before it began a message or while it sent one
        return
    parent = _Parent(connection)
    threading.Thread(target=_read, args=(connection, parent, messages), daemon=True).start()
    threading.Thread(target=parent.keep_beating, daemon=True).start()
    try:
        _work(received, parent, messages)
    except Exception as error:
        mine = not isinstance(error, WorkerError)
        note_full_memory(error)
        text = traceback.format_exc()
        if isinstance(error, Pd2bwError):  # which says itself what it is about
            text = "\n".join([str(error), *(getattr(error, "__notes__", ()) if mine else ())])
        with suppress(OSError):  # the parent may have gone
            parent.tell(Failed(text, type(error).__name__ + at(error), not mine))
        end_now()


def _loaded(sent: bytes) -> Start:
    """Unpickles a message. That imports the modules of its functions and classes, and may fail as they do."""
    try:
        start: Start = decoded(sent)
    except Exception as error:
        error.add_note("while the worker loaded the optimizer and the other functions that it was sent")
        raise
    return start


class _Parent:
    """The connection to the parent; two threads of this process send on it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._doing: Callable[[], str] = lambda: "making its engine"
        self._meeting: Path | None = None

    def meet_by(self, file: str) -> None:
        """Sets the file by which the workers meet: a parent that is killed cannot remove it."""
        self._meeting = Path(file)

    def end(self) -> NoReturn:
        """Ends this worker, whose parent has gone."""
        end_now(self._remove_meeting)

    def _remove_meeting(self) -> None:
        if self._meeting is not None:
            with suppress(OSError):  # the parent, or another worker, has done it
                self._meeting.unlink(missing_ok=True)
                self._meeting.parent.rmdir()

    def hear_of(self, doing: Callable[[], str]) -> None:
        """Sets what is asked from now on for what this worker is doing."""
        with self._lock:
            self._doing = doing

    def doing(self) -> str:
        with self._lock:
            return self._doing()

    def tell(self, message: Any) -> None:
        data = encoded(message)
        with self._lock:
            self._connection.send_bytes(data)

    def keep_beating(self) -> None:
        while True:
            try:
                self.tell(Alive(self.doing()))
            except OSError:
                self.end()
            time.sleep(BEAT_S)


def _read(connection: Connection, parent: _Parent, messages: queue.SimpleQueue[Any]) -> None:
    """Reads batches while the stage computes; when the connection ends, the worker ends."""
    while True:
        try:
            messages.put(receive(connection))
        except (EOFError, OSError):
            parent.end()
        except Exception as error:  # such as a class that cannot be imported here
            error.add_note("while the worker read what it was sent")
            messages.put(error)
            return


def _work(received: list[bytes], parent: _Parent, messages: queue.SimpleQueue[Any]) -> None:
    """Trains until a Finish comes.

    It takes the Start out of `received`: the weights in it would stand in memory beside the engine's.
    """
    start = _loaded(received.pop())
    parent.meet_by(start.rendezvous)
    job = start.job
    torch.set_num_threads(start.num_threads)
    start.settings.take_over()
    torch.manual_seed(start.seed + job.rank)
    start.custom_operators.register()
    if start.method is not None:
        register_method(start.method)
    _meet(start.rendezvous, job.rank, job.num_ranks)
    engine, records_wanted = Engine(job, start.options), start.options.record
    job = engine.job
    parent.hear_of(engine.doing)
    del start
    layout = job.layout.restricted(job.inputs())
    tells = job.rank == job.ranks_of(job.loss_stage)[0]
    while True:
        message = messages.get()
        if isinstance(message, Exception):
            raise message
        if isinstance(message, Finish):
            break
        pieces = layout.pieces(message.inputs, job.microbatches_per_update)
        sized = zip(pieces, message.sizes, strict=True)
        loss = engine.step_microbatches([Microbatch(piece, size) for piece, size in sized])
        parent.tell(Done(float(loss), loss.numbers) if tells else Done())
    tensors = {name: tensor.cpu() for name, tensor in engine.tensors().items()}
    records = engine.records() if records_wanted else ()
    averages = engine.averages()
    if averages is not None:
        averages = {name: tensor.cpu() for name, tensor in averages.items()}
    parent.tell(Finished(tensors, averages, records if job.rank == 0 else ()))
    parent.hear_of(lambda: "leaving")  # a closed engine does nothing, and cannot say so
    engine.close()
    dist.destroy_process_group()


def _meet(file: str, rank: int, num_ranks: int) -> None:
    """Meets through the file itself, not its file:// address, which torch does not unescape."""
    store = FileStore(file, num_ranks)
    store.set_timeout(default_pg_timeout)
    dist.init_process_group(BACKEND, store=store, rank=rank, world_size=num_ranks)


def main() -> None:
    """Runs a worker that was started as a process of its own."""
    serve(given_end())
