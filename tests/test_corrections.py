"""Published identities and stability limits of delayed updates, on the runtime's own weights and updates."""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor, nn

import pd2bw_fx
from pd2bw_fx.runtime.corrections import (
    Correction,
    Corrector,
    PipeMare,
    SpikeCompensation,
    WeightPrediction,
    spike_coefficients,
)
from pd2bw_fx.runtime.weights import WeightStore


class Quadratic(nn.Module):
    """w squared, over 2: the gradient of what was computed with w is w."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        outcome = x * self.weight
        return (outcome * outcome).sum() / 2


X = torch.ones(1, dtype=torch.float64)


@pytest.fixture(scope="module")
def pipeline() -> pd2bw_fx.Pipeline:
    return pd2bw_fx.split(Quadratic(), (X,), cluster=1, costs="analytic", check=False)


def store_for(
    pipe: pd2bw_fx.Pipeline, optimizer: object, delay: int, corrections: Sequence[Correction] | None
) -> WeightStore:
    """Makes a store with a version for each update of delay, or with one version and `corrections`."""
    store = WeightStore(
        pipe.programs,
        pipe.tensors(),
        trainable=["weight"],
        num_versions=delay + 1 if corrections is None else 1,
        keeps_versions=corrections is None,
        device=torch.device("cpu"),
        corrector=None if corrections is None else Corrector(corrections, delay),
    )
    store.optimize_with(optimizer, None)  # type: ignore[arg-type]
    return store


def sizes(store: WeightStore, delay: int) -> Iterator[float]:
    """Yields the size of the weight after each update, with gradients that are `delay` updates old."""
    in_flight: deque[tuple[Tensor, int]] = deque()
    stashes = store.num_versions > 1 or delay == 0
    while True:
        module = store.begin_forward(0, store.newest, in_flight=True)
        in_flight.append((module(X), store.newest))
        if len(in_flight) <= delay:
            continue
        loss, version = in_flight.popleft()
        ran_on = version if stashes else store.newest
        store.begin_backward(0, ran_on)
        loss.backward()  # type: ignore[no-untyped-call]
        store.end_backward(ran_on)
        store.update(store.newest + 1)
        yield abs(store.tensors()["weight"].item())


LIMITS = [
    # method, momentum, delay, corrections, largest learning rate on the unit quadratic
    ("synchronous", 0.0, 0, None, 2.0),
    ("2bw", 0.0, 1, None, 1.0),
    ("2bw", 0.9, 1, None, 0.1),
    ("synchronous", 0.9, 0, None, 3.8),
    ("pb", 0.9, 1, (), 0.1),
    ("pb", 0.9, 1, (SpikeCompensation(),), 0.2531),
    ("pb", 0.9, 1, (WeightPrediction(),), 0.2702),
    ("pb", 0.9, 1, (WeightPrediction("weights"),), 0.2702),
    ("pb", 0.9, 1, (SpikeCompensation(), WeightPrediction()), 0.2917),
    ("pipemare", 0.0, 2, (PipeMare(decay=None),), 0.618034),
    ("pipemare", 0.0, 3, (PipeMare(decay=None),), 0.445042),
]


@pytest.mark.parametrize(("method", "momentum", "delay", "corrections", "limit"), LIMITS)
def test_the_largest_stable_learning_rate_is_the_published_one(
    pipeline: pd2bw_fx.Pipeline,
    method: str,
    momentum: float,
    delay: int,
    corrections: Sequence[Correction] | None,
    limit: float,
) -> None:
    def grows(lr: float) -> bool:
        optimizer = functools.partial(torch.optim.SGD, lr=lr, momentum=momentum)
        store = store_for(pipeline, optimizer, delay, corrections)
        after = sizes(store, delay)
        next(itertools.islice(after, 500, None))
        early = max(itertools.islice(after, 60))
        next(itertools.islice(after, 1000, None))
        return max(itertools.islice(after, 60)) > early

    assert not grows(limit - 1e-3)
    assert grows(limit + 1e-3)


@pytest.mark.parametrize("momentum", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("delay", [0, 1, 2, 5])
def test_spike_compensation_neither_adds_nor_loses_gradient(momentum: float, delay: int) -> None:
    a, b = spike_coefficients(momentum, delay)

    assert a / (1 - momentum) + b == pytest.approx(1 / (1 - momentum), rel=1e-12)


def test_spike_compensation_of_one_update_is_nesterovs_momentum() -> None:
    torch.manual_seed(0)
    start, gradients = torch.randn(5, dtype=torch.float64), torch.randn(10, 5, dtype=torch.float64)
    nesterov = nn.Parameter(start.clone())
    theirs = torch.optim.SGD([nesterov], lr=0.1, momentum=0.9, nesterov=True)
    mine = nn.Parameter(start.clone())
    plain = torch.optim.SGD([mine], lr=0.1, momentum=0.9)
    corrector = Corrector([SpikeCompensation()], 1)
    corrector.watch({}, {})

    for gradient in gradients:
        nesterov.grad, mine.grad = gradient.clone(), gradient.clone()
        theirs.step()
        corrector.step(plain, plain.step)

    assert torch.allclose(mine, nesterov, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    "optimizer",
    [
        functools.partial(torch.optim.AdamW, lr=0.1),
        functools.partial(torch.optim.SGD, lr=0.1),
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    ],
)
def test_spike_compensation_refuses_other_optimizers(pipeline: pd2bw_fx.Pipeline, optimizer: object) -> None:
    with pytest.raises(pd2bw_fx.InputError, match=r"is made for torch\.optim\.SGD with momentum"):
        store_for(pipeline, optimizer, 1, [SpikeCompensation()])
