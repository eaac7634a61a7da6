"""What a forward does in later calls, or with what is none of the model's: the stages do it too, or it is
refused."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pd2bw_fx
from pd2bw_fx.errors import TraceError, VerificationError
from tests.trained import assert_trained_by_the_rule

SGD = functools.partial(torch.optim.SGD, lr=0.05)
Pairs = list[tuple[Tensor, Tensor]]


class Counting(nn.Module):
    """`loss_of(self, hidden, loss)` is what it returns."""

    def __init__(self, loss_of: Callable[..., Tensor] = lambda model, hidden, loss: loss) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 6)
        self.loss_of, self.step = loss_of, 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.step += 1
        hidden = torch.tanh(self.first(x))
        return self.loss_of(self, hidden, nn.functional.mse_loss(self.last(hidden), y))


def after_twenty(model: Counting, hidden: Tensor, loss: Tensor) -> Tensor:
    return loss + hidden.square().mean() if model.step > 20 else loss


def with_its_own_noise(model: Counting, hidden: Tensor, loss: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return loss + (hidden * torch.randn(8)).sum()


def batches(count: int) -> Pairs:
    return [(torch.randn(4, 6), torch.randn(4, 6)) for _ in range(count)]


def split(model: nn.Module, **given: Any) -> pd2bw_fx.Pipeline:
    return pd2bw_fx.split(model, batches(1)[0], cluster=2, num_stages=2, costs="analytic", **given)


def test_a_condition_on_the_number_of_calls_is_refused() -> None:
    with pytest.raises(TraceError, match=r"from call to call, by its attribute step \(0 before"):
        split(Counting(after_twenty))
    assert split(Counting()).plan.num_stages == 2


def test_a_counter_is_seen_where_a_layer_has_two_names() -> None:
    """torch's tracer then returns a new object each time that the layer, or what holds it, is read."""
    model = Counting(lambda model, _, loss: loss * model.step)
    model.also = model.first
    with pytest.raises(TraceError, match=r"from call to call, by its attribute step \(0 before"):
        split(model)


def test_what_is_read_beside_a_layer_with_two_names_is_not_told_as_written() -> None:
    model = Counting(lambda model, _, loss: loss + model.table.sum())
    model.also, model.table = model.first, torch.ones(3)

    report = split(model).trace_report
    assert report is not None
    assert "step" in str(report)
    assert "table" not in str(report)


def test_a_seed_that_a_forward_sets_is_not_lost() -> None:
    with pytest.raises(VerificationError, match=r"sets torch's random generator in its forward \(test_"):
        split(Counting(with_its_own_noise))


def test_a_parameter_that_is_none_of_the_models_is_refused() -> None:
    scale = nn.Parameter(torch.ones(()))
    with pytest.raises(TraceError, match=r"a trainable parameter of shape \(\) that is none of the model's"):
        split(Counting(lambda model, hidden, loss: loss * scale))
    assert split(Counting(lambda model, hidden, loss: loss * scale.detach())).plan.num_stages == 2


class Teaching(nn.Module):
    """A teacher that begins as a copy, and follows by one call for all its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            torch._foreach_lerp_(list(self.teacher.parameters()), list(self.student.parameters()), 0.5)
            wanted = self.teacher(x)
        return (self.student(x) - wanted - 1).square().mean()


def test_lists_that_are_written_by_one_call_are_written() -> None:
    torch.manual_seed(0)
    model = Teaching().double()
    drawn = [torch.randn(4, 6).double() for _ in range(4)]
    pipe = pd2bw_fx.split(copy.deepcopy(model), drawn[0], cluster=2, num_stages=2, costs="analytic")
    assert_trained_by_the_rule(model, pipe, drawn)


def test_what_runs_follows_writes_that_torch_does_not_count() -> None:
    model = Counting()
    pipe = split(model)
    (batch,) = batches(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=True)
    before = pipe.run(batch)["loss"].item()
    model(*batch).backward()
    optimizer.step()
    assert pipe.run(batch)["loss"].item() == pytest.approx(model(*batch).item(), rel=1e-6) != before
    model.first.weight.data.clamp_(-0.01, 0.01)
    assert pipe.run(batch)["loss"].item() == pytest.approx(model(*batch).item(), rel=1e-6)


def test_a_pipeline_has_copies_of_what_it_is_loaded_with() -> None:
    pipe, teacher = split(Counting()), Counting()
    pipe.load_state_dict(teacher.state_dict())
    before = pipe.state_dict()["first.weight"].clone()
    with torch.no_grad():
        teacher.first.weight.add_(1.0)
    assert torch.equal(pipe.state_dict()["first.weight"], before)


def test_numpys_false_ends_a_training_too() -> None:
    result = split(Counting()).train_local(
        batches(40),
        optimizer=SGD,
        microbatches_per_update=2,
        on_update=lambda update, loss: np.bool_(update < 1),
    )
    assert len(result.losses) < 40


def test_threads_and_modes_of_the_caller_do_not_meet_in_a_split() -> None:
    made: list[str] = []

    def work() -> None:
        with torch.no_grad():
            pipe = pd2bw_fx.split(Counting(), batches(1)[0], cluster=2, num_stages=2)
        assert pipe.batch_layout is not None
        made.append(str(pipe.batch_layout.microbatch_sizes))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == ["1 or more"] * 3
