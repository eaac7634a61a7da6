"""Ctrl-C that comes while a worker's message is read."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

import pd2bw_fx
from pd2bw_fx.models import build
from pd2bw_fx.runtime import local_run
from pd2bw_fx.runtime.messages import Finished, defer_interrupts, receive


@pytest.fixture(autouse=True)
def pythons_own_handler() -> Iterator[None]:
    """torchrun's launcher, which other tests start here, leaves its own."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_the_trained_weights_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = build("mlp")
    pipe = pd2bw_fx.split(model, cluster=2, costs="analytic")
    batches = [tuple(torch.cat([t] * 2) for t in model.example_inputs()) for _ in range(3)]
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    start, pressed = pipe.state_dict(), []

    def received(connection: Connection) -> Any:
        message = receive(connection)
        if isinstance(message, Finished) and not pressed:
            pressed.append(True)
            os.kill(os.getpid(), signal.SIGINT)
        return message

    monkeypatch.setattr(local_run, "receive", received)
    with pytest.raises(KeyboardInterrupt) as raised:
        pipe.train_local(batches, optimizer=sgd, microbatches_per_update=2)

    assert raised.value.__notes__ == ["the pipeline has the weights after the 3 updates that were given"]
    trained = pipe.state_dict()
    monkeypatch.undo()
    pipe.load_state_dict(start)
    pipe.train_local(batches, optimizer=sgd, microbatches_per_update=2)
    assert all(torch.equal(tensor, trained[name]) for name, tensor in pipe.state_dict().items())


@pytest.mark.parametrize("times", [1, 2])
def test_one_that_comes_when_a_batch_is_handed_out(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = build("mlp")
    pipe = pd2bw_fx.split(model, cluster=2, costs="analytic")
    batch = tuple(torch.cat([t] * 2) for t in model.example_inputs())
    start, send = pipe.state_dict(), local_run.LocalRun._send

    def sent(workers: Any, rank: int, message: bytes) -> None:
        send(workers, rank, message)
        if rank == 0 and workers.num_given == 1:
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(local_run.LocalRun, "_send", sent)
    with pytest.raises(KeyboardInterrupt) as raised:
        pipe.train_local([batch] * 3, optimizer=functools.partial(torch.optim.SGD, lr=0.1))

    (note,) = raised.value.__notes__
    is_kept = "the pipeline has the weights after the 2 updates that were given" in note
    assert is_kept == (times == 1)
    assert is_kept or "from before this run; what it trained is lost" in note
    assert is_kept == any(not torch.equal(start[name], tensor) for name, tensor in pipe.state_dict().items())


def test_a_second_one_is_not_put_off() -> None:
    with pytest.raises(KeyboardInterrupt), defer_interrupts() as noted:
        os.kill(os.getpid(), signal.SIGINT)
        assert noted
        os.kill(os.getpid(), signal.SIGINT)

    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
