"""Training with local worker processes: the same result as in one process, and no process left behind."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

import pd2bw_fx
from pd2bw_fx.models import build
from pd2bw_fx.runtime import local_run, messages
from pd2bw_fx.runtime.reference import train_reference
from pd2bw_fx.runtime.reports import UpdateReport
from pd2bw_fx.runtime.wire import decoded, encoded
from tests.local_runs import ROWS, mlp_batches
from tests.processes import workers
from tests.programs.delayed_reference import DelayedReference
from tests.trained import sgd

pytestmark = pytest.mark.usefixtures("no_process_is_left")


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.dropout(torch.tanh(layer(x)))
        return x


class Exploding(torch.optim.SGD):
    """Fails in its second step, on the stage that has the head."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count = getattr(self, "count", 0) + 1
        if self.count == 2 and any(p.shape[0] == 10 for p in self.param_groups[0]["params"]):
            raise ArithmeticError("the second step went wrong")
        super().step(closure)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return build("mlp").double()


@pytest.fixture(scope="module")
def traced() -> pd2bw_fx.Pipeline:
    torch.manual_seed(0)
    return pd2bw_fx.split(build("mlp").double(), cluster=1, costs="analytic", check=False)


@pytest.fixture
def pipe(traced: pd2bw_fx.Pipeline) -> pd2bw_fx.Pipeline:
    """Returns a pipeline with the weights of `model`."""
    return pd2bw_fx.split(traced, cluster=2, microbatches_per_update=2, check=False)


def test_local_training_equals_the_rule_and_leaves_the_weights_in_the_pipeline(
    model: nn.Module, pipe: pd2bw_fx.Pipeline
) -> None:
    batches, heard = mlp_batches(model), []

    result = pipe.train_local(
        batches, optimizer=sgd, on_update=lambda update, loss: heard.append((update, loss))
    )

    reference = train_reference(model, batches, optimizer=sgd, microbatches_per_update=2)
    assert result.losses == pytest.approx(reference.losses, rel=1e-12)
    assert heard == list(enumerate(result.losses))
    assert pipe.state_dict().keys() == model.state_dict().keys()
    for name, tensor in pipe.state_dict().items():
        torch.testing.assert_close(tensor, reference.state_dict[name], rtol=1e-12, atol=1e-14)


def test_what_is_sent_is_as_large_as_the_batches_and_the_weights(
    model: nn.Module, pipe: pd2bw_fx.Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches are views of a dataset, and the weights of a stage are views of one block."""
    sent, heard = [], []
    monkeypatch.setattr(local_run, "encoded", lambda message: recorded(sent, encoded(message)))
    monkeypatch.setattr(messages, "decoded", lambda data: decoded(recorded(heard, data)))
    drawn = model.example_inputs(batch_size=1000 * ROWS)  # type: ignore[operator]
    batches = list(zip(*(tensor.split(ROWS) for tensor in drawn), strict=True))[:3]

    pipe.train_local(batches, optimizer=sgd)

    weights = sum(tensor.nbytes for tensor in pipe.tensors().values())
    assert max(sent) < 2 * sum(tensor.nbytes for tensor in batches[0]) + 10_000
    assert weights < sum(heard) < 1.2 * weights + 10_000


def recorded(sizes: list[int], data: bytes) -> bytes:
    sizes.append(len(data))
    return data


def test_a_loaded_pipeline_trains_without_the_model_s_code(
    pipe: pd2bw_fx.Pipeline, model: nn.Module, tmp_path: Path
) -> None:
    pipe.save(tmp_path / "mlp")
    loaded = pd2bw_fx.load(tmp_path / "mlp")

    result = loaded.train_local(mlp_batches(model), optimizer=sgd, method="1f1b")

    reference = train_reference(
        model, mlp_batches(model), optimizer=sgd, microbatches_per_update=2, method="synchronous"
    )
    assert result.losses == pytest.approx(reference.losses, rel=1e-12)


def test_dropout_is_drawn_anew_for_every_microbatch_and_repeats_with_the_seed() -> None:
    x, y = torch.randn(2, 8), torch.randn(2, 8)
    batches = [(x.repeat(2, 1), y.repeat(2, 1))] * 3
    still = pd2bw_fx.split(
        Perceptron(), (x,), loss_fn=nn.functional.mse_loss, example_targets=y, cluster=2, costs="analytic"
    )

    def losses(seed: int) -> tuple[float, ...]:
        result = still.train_local(
            batches, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0), seed=seed
        )
        return result.losses

    first = losses(1)
    assert len(set(first)) == 3
    assert losses(1) == first
    assert losses(2) != first


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_worker_that_dies_ends_the_run_with_its_name(
    model: nn.Module, pipe: pd2bw_fx.Pipeline, end: signal.Signals
) -> None:
    def batches() -> Iterator[Any]:
        for update, batch in enumerate(mlp_batches(model) * 20):
            if update == 4:
                os.kill(workers()[1], end)
            yield batch

    with pytest.raises(
        pd2bw_fx.WorkerError,
        match=rf"rank 1 \(stage 1 on cpu:1.*was ended by {end.name}.*; \d+ updates? done",
    ):
        pipe.train_local(batches(), optimizer=sgd)


def test_a_worker_that_is_stopped_is_noticed_in_seconds(model: nn.Module, pipe: pd2bw_fx.Pipeline) -> None:
    def stop_the_second(update: int, loss: float) -> None:
        if update == 1:
            os.kill(workers()[1], signal.SIGSTOP)

    with pytest.raises(pd2bw_fx.WorkerError, match=r"rank 1 \(stage 1.*no sign of life.*; \d+ updates? done"):
        pipe.train_local(mlp_batches(model) * 20, optimizer=sgd, on_update=stop_the_second)

    assert messages.SILENCE_S + messages.BEAT_S + local_run._ENDING_S <= 10


def stopped_on_the_second(parameters: Any) -> torch.optim.Optimizer:
    if torch.distributed.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    return sgd(parameters)


def test_a_worker_that_is_stopped_while_it_makes_its_engine_is_noticed_too(
    model: nn.Module, pipe: pd2bw_fx.Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pd2bw_fx.runtime.local_run.SILENCE_S", 3.0)

    with pytest.raises(
        pd2bw_fx.WorkerError, match=r"rank 1 \(stage 1.*no sign of life.*, last heard of making its engine"
    ):
        pipe.train_local(mlp_batches(model), optimizer=stopped_on_the_second)


def test_a_worker_that_raises_gives_its_own_traceback(model: nn.Module, pipe: pd2bw_fx.Pipeline) -> None:
    before = pipe.state_dict()

    with pytest.raises(
        pd2bw_fx.WorkerError, match=r"(?s)rank \d \(stage 1.*ArithmeticError: the second step"
    ) as raised:
        pipe.train_local(mlp_batches(model) * 5, optimizer=lambda parameters: Exploding(parameters, lr=0.1))

    assert "weights from before this run; what it trained is lost" in raised.value.__notes__[0]
    assert all(torch.equal(tensor, before[name]) for name, tensor in pipe.state_dict().items())


NOT_A_NUMBER = r"^the loss of update 3 \(microbatch 7, rank 1 \(stage 1\)\) is nan; try a lower learning rate"


def test_a_loss_that_is_no_number_ends_the_run(model: nn.Module, pipe: pd2bw_fx.Pipeline) -> None:
    (features, labels), *others = mlp_batches(model)
    features = torch.cat([features[: ROWS // 2], features[ROWS // 2 :] * float("nan")])
    broken = [*others, (features, labels), *others, *others]

    with pytest.raises(pd2bw_fx.WorkerError, match=NOT_A_NUMBER):
        pipe.train_local(broken, optimizer=sgd)

    assert len(pipe.train_local(broken, optimizer=sgd, stop_at_nan=False).losses) == len(broken)


def test_clipped_stages_that_are_updates_apart_get_the_batches_that_they_wait_for(model: nn.Module) -> None:
    """With one microbatch an update, stage 0 is three updates ahead of the one that stage 3 computes."""
    pipe = pd2bw_fx.split(model, cluster=4, costs="analytic", check=False, method="pipedream")
    rows = mlp_batches(model)
    batches = [tuple(tensor[k : k + 1] for tensor in batch) for batch in rows for k in range(ROWS)]

    result = pipe.train_local(batches, optimizer=sgd, microbatches_per_update=1, max_gradient_norm=0.1)

    stage_of = {name: program.stage for program in pipe.programs for name in program.parameters}
    reference = DelayedReference(
        copy.deepcopy(model), stage_of, "pipedream", 1, sgd, [1] * 4, max_gradient_norm=0.1
    )
    reference.train(batches)
    assert result.losses == pytest.approx(reference.losses, rel=1e-12)


@pytest.mark.parametrize("method", ["2bw", "1f1b"])
def test_reports_have_the_learning_rate_of_their_update_on_every_rank(
    model: nn.Module, pipe: pd2bw_fx.Pipeline, tmp_path: Path, method: str
) -> None:
    def note(report: UpdateReport) -> None:
        with (tmp_path / f"{report.rank} {os.getpid()}").open("a") as file:
            file.write(f"{report.update} {report.learning_rates[0]:.6f}\n")

    def warm_up(optimizer: torch.optim.Optimizer) -> LRScheduler:
        return LambdaLR(optimizer, lambda update: (update + 1) / 100)

    batches = mlp_batches(model) * 4
    pipe.train_local(batches, optimizer=sgd, method=method, lr_scheduler=warm_up, on_report=note)

    assert sorted(path.name.split()[0] for path in tmp_path.iterdir()) == ["0", "1"]
    told = [path.read_text().splitlines() for path in tmp_path.iterdir()]
    rate = sgd(list(model.parameters())).param_groups[0]["lr"]
    expected = [f"{update} {rate * (update + 1) / 100:.6f}" for update in range(len(batches))]
    assert told == [expected, expected]


def test_training_that_is_broken_off_keeps_what_it_learned(model: nn.Module, pipe: pd2bw_fx.Pipeline) -> None:
    batches, start = mlp_batches(model), pipe.state_dict()

    def interrupted() -> Iterator[Any]:
        yield from batches[:2]
        raise KeyboardInterrupt

    pipe.train_local(batches[:2], optimizer=sgd)
    after_two = pipe.state_dict()
    assert not torch.equal(after_two["head.weight"], start["head.weight"])
    for broken, error, told in (
        ([*batches[:2], tuple(tensor[:3] for tensor in batches[0])], pd2bw_fx.InputError, "^batch 2: "),
        (interrupted(), KeyboardInterrupt, ""),
    ):
        pipe.load_state_dict(start)
        with pytest.raises(error, match=told) as raised:
            pipe.train_local(broken, optimizer=sgd)
        assert raised.value.__notes__ == ["the pipeline has the weights after the 2 updates that were given"]
        assert all(torch.equal(tensor, after_two[name]) for name, tensor in pipe.state_dict().items())

    pipe.load_state_dict(start)
    with pytest.raises(ZeroDivisionError):
        pipe.train_local(batches, optimizer=sgd, on_update=lambda update, loss: bool(1 // (update - 1)))
    assert not torch.equal(pipe.state_dict()["head.weight"], start["head.weight"])
    pipe.load_state_dict(start)

    stopped = pipe.train_local(batches * 5, optimizer=sgd, on_update=lambda update, loss: update < 2)
    assert 3 <= len(stopped.losses) < 5 * len(batches)


@pytest.mark.parametrize(
    ("told", "stops"),
    [
        (False, True),
        (np.bool_(False), True),
        (torch.tensor(False), True),
        (torch.tensor([False]), True),
        (True, False),
        (None, False),
        (0, False),
        (torch.tensor(0.0), False),
        (torch.zeros(2, dtype=torch.bool), False),
    ],
)
def test_a_false_of_any_library_ends_a_run_and_no_other_result_does(told: Any, stops: bool) -> None:
    assert local_run._is_false(told) == stops
