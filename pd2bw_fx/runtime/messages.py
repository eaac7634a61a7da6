"""The messages between a training run's parent and its local workers."""

from __future__ import annotations

import signal
import threading
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from torch import Tensor

from pd2bw_fx.metrics import Record
from pd2bw_fx.passes.schedule import Method
from pd2bw_fx.process_settings import ProcessSettings
from pd2bw_fx.runtime.custom_operators import CustomOperators
from pd2bw_fx.runtime.job import Job
from pd2bw_fx.runtime.options import EngineOptions
from pd2bw_fx.runtime.wire import decoded

BEAT_S = 1.0
SILENCE_S = 7.0  # of a worker that has begun to work: it hangs. All workers have ended in ten seconds


@dataclass(frozen=True, slots=True)
class Start:
    """The first message to a worker. Functions are pickled by cloudpickle, a notebook's lambdas included."""

    job: Job
    options: EngineOptions
    rendezvous: str
    seed: int
    num_threads: int
    settings: ProcessSettings
    custom_operators: CustomOperators
    method: Method | None  # a method that the user has registered; None for one of ours


@dataclass(frozen=True, slots=True)
class Batch:
    """One update's inputs of this stage, whole or by microbatch.

    `sizes` identifies the sizes of all inputs in each microbatch.
    """

    inputs: Sequence[Mapping[str, Tensor]]
    sizes: tuple[Hashable, ...]


@dataclass(frozen=True, slots=True)
class Finish:
    """There are no more batches: flush, and answer with the weights."""


@dataclass(frozen=True, slots=True)
class Alive:
    """Sent every `BEAT_S`, with what the worker is doing."""

    doing: str = ""


@dataclass(frozen=True, slots=True)
class Done:
    """A step was made. The rank of the loss adds its value, and the other numbers that the model returns."""

    loss: float | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Finished:
    """The stage's newest tensors by name in the graph, and the averages of its weights, if they are kept;
    from rank 0 also `records` of all ranks."""

    tensors: dict[str, Tensor]
    averages: dict[str, Tensor] | None = None
    records: tuple[Record, ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """Why the worker ends: `kind` is the error's type, and the call of a stage that it came from, if any.

    `is_consequence`: another worker's end was the reason.
    """

    error: str
    kind: str
    is_consequence: bool


def receive(connection: Connection) -> Any:
    return decoded(connection.recv_bytes())


@contextmanager
def defer_interrupts() -> Iterator[list[int]]:
    """Puts Ctrl-C off until a message has been read, whose rest would else be taken for the next one.

    Yields a list that gets an entry for it; a second Ctrl-C is not put off.
    """
    noted: list[int] = []

    def note(number: int, frame: Any) -> None:
        noted.append(number)
        if len(noted) > 1:
            raise KeyboardInterrupt

    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield noted
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
