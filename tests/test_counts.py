"""Counts that go on from call to call, wherever a model or its loss keeps them, and what depends on them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pd2bw_fx
from pd2bw_fx.errors import TraceError
from pd2bw_fx.passes.trace import trace
from pd2bw_fx.passes.trace.checks.followed_numbers import Reads, far_states, next_states

CALLS = [0]


class _Counting(nn.Module):
    """Says which call it is, by a count that is kept somewhere."""

    calls: ClassVar[int] = 0

    def __init__(self, place: str, asks: Callable[[Any], bool]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.place, self.asks = place, asks
        self.step, self.wrapped, self.state, self.history = 0, 0, {"step": 0}, list[int]()
        self.settings, self.numbers, self.counter = SimpleNamespace(step=0), np.zeros(1), itertools.count(1)

    def count(self) -> Any:
        match self.place:
            case "attribute":
                self.step += 1
                return self.step
            case "attribute that begins again":
                self.wrapped = (self.wrapped + 1) % 100
                return self.wrapped
            case "dict":
                self.state["step"] += 1
                return self.state["step"]
            case "object":
                self.settings.step += 1
                return self.settings.step
            case "length of a list":
                self.history.append(1)
                return len(self.history)
            case "array":
                self.numbers += 1
                return self.numbers[0]
            case "itertools":
                return next(self.counter)
            case "class":
                _Counting.calls += 1
                return _Counting.calls
            case _:
                CALLS[0] += 1
                return CALLS[0]

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        if self.asks(self.count()):
            hidden = self.last(hidden)
        return hidden.square().mean()


_PLACES = {
    "attribute": "attribute step",
    "attribute that begins again": "attribute wrapped",
    "dict": r"attribute state\['step'\]",
    "object": r"attribute settings\.step",
    "length of a list": "how far history has gone",
    "array": "how far numbers has gone",
    "itertools": "how far counter has gone",
    "class": r"_Counting\.calls",
    "file": r"CALLS of .*test_counts\[0\]",
}


@pytest.mark.parametrize("place", _PLACES)
def test_what_depends_on_a_count_is_refused_wherever_that_is_kept(place: str) -> None:
    model = _Counting(place, lambda count: count > 40)

    with pytest.raises(TraceError, match=f"something else from call to call, by .*{_PLACES[place]}"):
        trace(model, (torch.randn(3, 4),))
    assert (model.step, model.state, model.history, model.numbers[0]) == (0, {"step": 0}, [], 0)
    assert (_Counting.calls, CALLS, next(model.counter)) == (0, [0], 1)


@pytest.mark.parametrize("tracer", ["export", "fx"])
@pytest.mark.parametrize(
    "asks",
    [
        lambda count: count % 4 == 0,
        lambda count: not count % 16,
        lambda count: count % 100_000 == 99_999,
        lambda count: count in (7, 8),
        lambda count: count // 10 % 2 == 1 and count > 50,
        lambda count: max(0.0, 1 - count / 3000) == 0,
        lambda count: int(count) % 250 == 0,
        lambda count: (count - 2000) * count > 0,
    ],
)
def test_a_condition_that_a_later_call_answers_otherwise_is_refused(
    asks: Callable[[Any], bool], tracer: str
) -> None:
    with pytest.raises(TraceError, match="something else from call to call, by its attribute step"):
        trace(_Counting("attribute", asks), (torch.randn(3, 4),), tracer=tracer)


@pytest.mark.parametrize("place", _PLACES)
def test_a_count_that_is_only_reported_is_let_pass(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    def asks(count: Any) -> bool:
        if count % 100 == 0 or count < 3:
            print(f"call {count}")
        return False

    model, x = _Counting(place, asks), torch.randn(3, 4)
    traced = trace(model, (x,))

    assert "call 1\n" in capsys.readouterr().out.replace("1.0", "1")
    assert traced.call is not None
    assert torch.equal(traced.call({"x": x})["loss"], model(x))
    if "attribute" in place:
        assert any("the trace is the same after other calls" in note for note in traced.report.notes)


def test_a_count_that_ends_asks_for_nothing_that_no_call_comes_to() -> None:
    class Ending(_Counting):
        def count(self) -> Any:
            self.wrapped = (self.wrapped + 1) % 3
            return self.wrapped

    model, x = Ending("attribute", lambda count: count >= 3), torch.randn(3, 4)
    traced = trace(model, (x,))

    assert traced.call is not None
    assert torch.equal(traced.call({"x": x})["loss"], model(x))


def test_followed_numbers_are_numbers_and_know_what_is_asked_of_them() -> None:
    reads = Reads()
    (count,) = reads.followed([4])

    assert isinstance(count, int)
    assert (repr(count), f"{count:03d}", [10, 11, 12, 13, 14][count]) == ("4", "004", 14)
    assert (count + 1, 1 - count, -count / 8, divmod(count, 3), round(count * 1.5)) == (
        5,
        -3,
        -0.5,
        (1, 1),
        6,
    )
    reads.questions.clear()
    assert (count + 1) % 4 != 0
    assert reads.answers([4]) == (True,)
    assert reads.answers([7]) == (False,)
    left = [count + 2]
    assert [state for state, _ in zip(next_states([4], left, [2]), range(3), strict=False)] == [
        [6],
        [8],
        [10],
    ]
    assert not (count > 10**9)
    assert [10**9 + 2] in list(far_states([4], left, [2], reads))


class _Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return _loss(output, target, self.calls)


class _Trainer:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return _loss(output, target, self.calls)


def _loss(output: Tensor, target: Tensor, calls: int) -> Tensor:
    return (output - target).square().mean() * (3 if calls > 3 else 1)


def _counted_in_a_dict(state: dict[str, int], output: Tensor, target: Tensor) -> Tensor:
    state["calls"] += 1
    return _loss(output, target, state["calls"])


def _of_a_closure() -> Callable[[Tensor, Tensor], Tensor]:
    calls = 0

    def loss(output: Tensor, target: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return _loss(output, target, calls)

    return loss


def _that_begins_otherwise() -> Callable[[Tensor, Tensor], Tensor]:
    begun = list[bool]()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        is_first = not begun
        begun.append(True)
        return _loss(output, target, 4 if is_first else 1)

    return loss


_LOSSES: dict[str, Callable[[], Callable[..., Tensor]]] = {
    "module": _Loss,
    "object": _Trainer,
    "method": lambda: _Trainer().__call__,
    "partial": lambda: functools.partial(_counted_in_a_dict, {"calls": 0}),
    "closure": _of_a_closure,
    "first call": _that_begins_otherwise,
}


@pytest.mark.parametrize("kind", _LOSSES)
def test_a_loss_that_counts_its_calls_is_watched_as_the_model_is(kind: str) -> None:
    loss_fn, (x, y) = _LOSSES[kind](), torch.randn(2, 3, 4)

    with pytest.raises(TraceError, match=r"something else from call to call, by .*loss_fn"):
        trace(nn.Linear(4, 4), (x,), loss_fn=loss_fn, targets=y)
    expected = (x - y).square().mean() * (3 if kind == "first call" else 1)
    assert torch.equal(loss_fn(x, y), expected)  # as its first call


@pytest.mark.parametrize("loss", [_Loss(), _Trainer()])
def test_splitting_leaves_the_loss_as_it_was(loss: Any) -> None:
    x, y = torch.randn(2, 3, 4)
    loss.calls = 10

    pd2bw_fx.split(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        x,
        loss_fn=lambda output, target: loss(output, target) * 0 + (output - target).square().mean(),
        example_targets=y,
        cluster=2,
        costs="analytic",
    )

    assert loss.calls == 10
