"""What a run tells about itself: every action of every rank once, in its order, on one clock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import pd2bw_fx
from pd2bw_fx.actions import Kind
from pd2bw_fx.metrics import Metrics
from pd2bw_fx.models import build
from pd2bw_fx.runtime.local_run import TrainResult
from pd2bw_fx.runtime.recorder import offset_to_first_rank
from pd2bw_fx.timeline import Event
from tests.trained import sgd

ROWS, UPDATES = 2, 4


@pytest.fixture(scope="module")
def pipe() -> pd2bw_fx.Pipeline:
    model = build("mlp")
    return pd2bw_fx.split(model, model.example_inputs(batch_size=1), cluster=2, check=False)


def trained(pipe: pd2bw_fx.Pipeline, record: int) -> TrainResult:
    model = build("mlp")
    batches = [model.example_inputs(batch_size=ROWS) for _ in range(UPDATES)]
    return pipe.train_local(
        batches, optimizer=sgd, microbatches_per_update=ROWS, slack=0, record=record, threads_per_worker=1
    )


@pytest.fixture(scope="module")
def recorded(pipe: pd2bw_fx.Pipeline) -> Metrics:
    return trained(pipe, record=UPDATES + 1).metrics


def test_a_run_records_the_schedule_that_it_was_given(pipe: pd2bw_fx.Pipeline, recorded: Metrics) -> None:
    expected = pipe.simulate(microbatches_per_update=ROWS, num_updates=UPDATES)

    timeline = recorded.timeline

    assert timeline is not None
    for rank in range(2):
        told = [key(event) for event in timeline.events if event.rank == rank]
        planned = [key(event) for event in expected.events if event.rank == rank]
        assert [k for k in told if k[0] in COMPUTES] == [k for k in planned if k[0] in COMPUTES]


def test_nothing_is_received_before_it_was_sent(recorded: Metrics) -> None:
    timeline = recorded.timeline
    assert timeline is not None

    began = {key(event): event.start_s for event in timeline.events}
    ended = {key(event): event.end_s for event in timeline.events}

    for microbatch in range(ROWS * UPDATES):
        assert began[Kind.SEND_ACTIVATION, 0, microbatch] < ended[Kind.RECEIVE_ACTIVATION, 1, microbatch]
        assert began[Kind.SEND_GRADIENT, 1, microbatch] < ended[Kind.RECEIVE_GRADIENT, 0, microbatch]


def test_only_the_calls_asked_for_are_kept(pipe: pd2bw_fx.Pipeline) -> None:
    last = trained(pipe, record=1).metrics.timeline  # the flush at the end

    assert last is not None
    computed = [key(event) for event in last.events if event.rank == 0 and event.kind in COMPUTES]
    assert computed == [(Kind.BACKWARD, 0, 6), (Kind.BACKWARD, 0, 7), (Kind.UPDATE, 0, -1)]


def test_records_are_kept_in_the_file_of_the_run(recorded: Metrics, tmp_path: Path) -> None:
    recorded.save(tmp_path)

    assert Metrics.load(tmp_path).timeline == recorded.timeline


@pytest.mark.parametrize(("ahead_s", "expected_s"), [(0.0, 0.0), (100.0, 99.996)])
def test_a_clock_is_set_by_the_others_unless_they_are_one(
    ahead_s: float, expected_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 5.0

    def pass_time(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    def answer(tensor: torch.Tensor, *_: Any, **__: Any) -> None:
        tensor.fill_(now_s + ahead_s)
        pass_time(0.009)

    monkeypatch.setattr("time.perf_counter", lambda: now_s)
    monkeypatch.setattr(torch.distributed, "send", lambda *_, **__: pass_time(0.001))
    monkeypatch.setattr(torch.distributed, "recv", answer)
    group = torch.distributed.ProcessGroup(0, 2)

    # The way there takes a ninth of the way back: the middle of the round trip is 4 ms off.
    assert offset_to_first_rank(1, 2, group) == pytest.approx(expected_s)


COMPUTES = (Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE)


def key(event: Event) -> tuple[Kind, int, int]:
    return event.kind, event.stage, event.microbatch


@pytest.mark.parametrize("method", ["ddp", "chimera"])
def test_an_update_that_waits_for_other_ranks_is_told_when_it_is_made(method: str) -> None:
    model = build("mlp")
    pipe = pd2bw_fx.split(
        model, model.example_inputs(batch_size=1), cluster=2, method=method, microbatches_per_update=4
    )
    batches = [model.example_inputs(batch_size=4) for _ in range(UPDATES)]
    metrics = pipe.train_local(batches, optimizer=sgd, record=UPDATES + 1, threads_per_worker=1).metrics
    timeline = metrics.timeline
    assert timeline is not None

    for rank in range(2):
        events = list(timeline.of_rank(rank))
        planned = pipe.simulate(microbatches_per_update=4, num_updates=UPDATES).of_rank(rank)
        made = [e.version for e in events if e.kind is Kind.UPDATE]
        assert made == [e.version for e in planned if e.kind is Kind.UPDATE]
        waits = {e.version: e for e in events if e.kind is Kind.ALL_REDUCE}
        steps = {e.version: e for e in events if e.kind is Kind.UPDATE and e.duration_s > 0}
        assert waits.keys() == steps.keys() == set(range(1, UPDATES + 1))
        for version, step in steps.items():
            assert waits[version].end_s == step.start_s
            first = (
                next(e for e in events if e.kind is Kind.FORWARD and e.start_s >= step.start_s)
                if (version < UPDATES)
                else None
            )
            assert first is None or (first.version == version and first.start_s == step.end_s)
