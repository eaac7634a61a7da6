"""A scheduler whose rates are told by objects goes on with what they know."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LinearLR, LRScheduler, MultiplicativeLR, SequentialLR

from pd2bw_fx.errors import InputError
from pd2bw_fx.runtime.scheduler_state import plain_state, state_for_groups


class Counting:
    """Called like a function, and knows how often it was."""

    def __init__(self) -> None:
        self.calls, self.seen = 0, {0: (0, 0)}

    def __call__(self, step: int) -> float:
        self.calls += 1
        self.seen[self.calls] = (step, self.calls)
        assert len(self.seen) == self.calls + 1
        return 1 / (1 + self.calls)


class Asking(LRScheduler):
    """A user's own version of LambdaLR."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.ask = Counting()
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        factor = self.ask(self.last_epoch)
        return [base * factor for base in self.base_lrs]


def counting_after_a_warm_up(optimizer: torch.optim.Optimizer) -> LRScheduler:
    parts = [
        LinearLR(optimizer, total_iters=1),
        LambdaLR(optimizer, [Counting() for _ in optimizer.param_groups]),
    ]
    return SequentialLR(optimizer, parts, milestones=[1])


SCHEDULERS: dict[str, Any] = {
    "functions": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "objects": lambda optimizer: MultiplicativeLR(optimizer, [Counting() for _ in optimizer.param_groups]),
    "an object later": counting_after_a_warm_up,
    "an object of a scheduler of one's own": Asking,
}


def optimizer_of(num_groups: int) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [nn.Parameter(torch.ones(1))]} for _ in range(num_groups)], lr=0.5)


def rates(optimizer: torch.optim.Optimizer, scheduler: LRScheduler, num_steps: int) -> list[float]:
    found = []
    for _ in range(num_steps):
        optimizer.step()
        scheduler.step()
        found.append(optimizer.param_groups[0]["lr"])
    return found


@pytest.mark.parametrize("num_groups", [2, 3])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_what_objects_know_that_tell_rates_goes_on(name: str, num_groups: int) -> None:
    optimizer = optimizer_of(2)
    scheduler = SCHEDULERS[name](optimizer)
    rates(optimizer, scheduler, 3)
    saved = json.loads(json.dumps(plain_state(scheduler)))
    options = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}

    resumed = optimizer_of(num_groups)
    again = SCHEDULERS[name](resumed)
    for group in resumed.param_groups:
        group.update(options)
    state = state_for_groups(saved, again.state_dict(), resumed.param_groups, num_saved=2)
    again.load_state_dict(state)

    assert rates(resumed, again, 3) == rates(optimizer, scheduler, 3)


def test_what_json_cannot_hold_of_an_object_is_told() -> None:
    told = Counting()
    told.names = {"a", "b"}  # type: ignore[attr-defined]
    with pytest.raises(InputError, match=r"LambdaLR keeps a set as 'lr_lambdas\.names'; .* keep it so"):
        plain_state(LambdaLR(optimizer_of(1), told))
