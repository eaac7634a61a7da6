"""Optimizers and schedulers that no rank can train with, or that no checkpoint can hold, are refused."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, MultiStepLR, OneCycleLR

from pd2bw_fx.errors import InputError, PlanMismatchError
from pd2bw_fx.runtime.optimizing import RankOptimizer
from tests.rank_optimizers import EVERYWHERE, Momentous, one_group_each, parameters, run, saved, specs

OTHER_MODELS = {
    "it has no parameter 'bias'": {"embedding": (4, 3), "bias": (4,)},
    "its parameter 'embedding' has shape \\(4, 3\\), and the pipeline's \\(5, 3\\)": {"embedding": (5, 3)},
    "the pipeline has no parameter 'embedding'": {},
}


@pytest.mark.parametrize("complaint", OTHER_MODELS)
def test_another_model_s_checkpoint_is_told_by_its_tensors(tmp_path: Path, complaint: str) -> None:
    weights = parameters("embedding")
    made = RankOptimizer(weights, EVERYWHERE, one_group_each)
    checkpoint = saved(tmp_path, [(made, weights)])

    with pytest.raises(PlanMismatchError, match=complaint):
        checkpoint.require_model(specs(OTHER_MODELS[complaint]), [])


def test_an_optimizer_that_computes_losses_itself_is_refused() -> None:
    with pytest.raises(InputError, match="LBFGS computes the loss several times"):
        RankOptimizer(parameters("norm"), EVERYWHERE, torch.optim.LBFGS)


def test_a_scheduler_of_another_optimizer_is_refused() -> None:
    """It would step without an error, and no learning rate that trains would change."""
    another = torch.optim.SGD(parameters("norm").values(), lr=0.1)
    with pytest.raises(
        InputError, match="lr_scheduler gave a MultiStepLR of another optimizer than the one it"
    ):
        RankOptimizer(parameters("norm"), EVERYWHERE, torch.optim.SGD, lambda _: MultiStepLR(another, [1]))


class Sharp(torch.optim.SGD):
    """Steps as the authors of SAM do, whose closure computes the loss again."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None, "Sharpness Aware Minimization requires closure, but it was not provided"


def test_an_optimizer_that_wants_a_closure_is_told_in_one_line() -> None:
    made = RankOptimizer(parameters("norm"), EVERYWHERE, Sharp)
    with pytest.raises(InputError, match=r"Sharp wants a closure .*requires closure.* such as AdamW$"):
        made.step()


class Noisy(torch.optim.SGD):
    """Adds noise of torch's own generator to the weights, as Langevin dynamics does."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data += torch.randn_like(parameter)


def test_an_optimizer_whose_noise_would_drive_copies_apart_is_refused() -> None:
    RankOptimizer(parameters("norm", "head"), EVERYWHERE, Noisy).step()  # nobody else holds these
    made = RankOptimizer(parameters("norm", "head"), EVERYWHERE, Noisy)
    with pytest.raises(InputError, match=r"Noisy draws random numbers in its step, .* 'norm' is held by sev"):
        made.step(held_elsewhere=["norm"])


def test_an_error_of_an_optimizers_own_is_left_as_it_is() -> None:
    class Faulty(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise RuntimeError("no kernel")

    with pytest.raises(RuntimeError, match="no kernel"):
        RankOptimizer(parameters("norm"), EVERYWHERE, Faulty).step()


def test_a_scheduler_past_its_end_is_told_in_one_line() -> None:
    weights = parameters("norm")
    made = RankOptimizer(
        weights, EVERYWHERE, torch.optim.SGD, lambda o: OneCycleLR(o, max_lr=0.1, total_steps=3)
    )
    run(made, weights, 3)
    with pytest.raises(
        InputError, match=r"OneCycleLR is at its end \(.*steps is 3\); it steps once an update"
    ):
        made.step_scheduler()


NAMED = {
    "pairs": lambda given: torch.optim.SGD([p for name, p in given if "bias" not in name]),
    "a model": lambda given: torch.optim.SGD(given.parameters()),
    "a rate below 0": lambda given: torch.optim.SGD(given, lr=-1.0),
}


@pytest.mark.parametrize("wants", NAMED)
def test_an_optimizers_function_that_fails_is_told_what_it_is_given(wants: str) -> None:
    told = (
        r"given as optimizer failed at test_optimizing_refused.py:\d+ with \w+Error: .+; it is given a list"
    )
    with pytest.raises(InputError, match=told):
        RankOptimizer(parameters("norm", "head"), EVERYWHERE, NAMED[wants])


def test_a_schedulers_function_that_fails_is_told_what_it_is_given() -> None:
    with pytest.raises(InputError, match=r"given as lr_scheduler failed at .*; it is given this rank's opti"):
        RankOptimizer(parameters("norm"), EVERYWHERE, torch.optim.SGD, lambda o: OneCycleLR(o, max_lr=0.1))


def test_parameters_that_an_optimizer_leaves_out_are_named() -> None:
    weights = parameters("embedding", "norm", "bias")
    with pytest.warns(
        UserWarning, match="leaves out 2 parameters of the 3 .* as they are: norm, bias; freeze"
    ):
        RankOptimizer(weights, EVERYWHERE, lambda given: torch.optim.SGD([p for p in given if p.ndim > 1]))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RankOptimizer(weights, EVERYWHERE, torch.optim.SGD)


def test_options_of_groups_that_the_optimizer_does_not_have_are_told() -> None:
    """torch puts them in the groups and says nothing: weights would decay that were not to."""

    def made(option: str) -> None:
        of_vectors = {option: 0.0}
        RankOptimizer(
            parameters("norm"),
            EVERYWHERE,
            torch.optim.AdamW,
            options=lambda name, parameter: of_vectors if parameter.ndim < 2 else {},
        )

    with pytest.raises(InputError, match=r"'weigth_decay', and AdamW has no such .* mean 'weight_decay'"):
        made("weigth_decay")
    with pytest.warns(UserWarning, match="'momentum', and AdamW has no such .* no step; its options are lr"):
        made("momentum")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made("weight_decay")


def test_an_optimizer_of_sparse_gradients_is_refused() -> None:
    with pytest.raises(InputError, match="SparseAdam takes sparse gradients"):
        RankOptimizer(parameters("norm"), EVERYWHERE, torch.optim.SparseAdam)


def test_a_hook_on_a_parameter_that_no_backward_would_call_is_refused() -> None:
    def clamping(given: list[nn.Parameter]) -> torch.optim.Optimizer:
        given[0].register_hook(lambda gradient: gradient.clamp(-1, 1))
        return torch.optim.SGD(given)

    with pytest.raises(InputError, match=r"a hook on norm, .*register_step_pre_hook"):
        RankOptimizer(parameters("norm"), EVERYWHERE, clamping)


@pytest.mark.parametrize(
    ("keeps", "told"),
    [
        (lambda state, own: state[own].update(past=[own.grad]), "keeps for norm a list as 'past'"),
        (lambda state, own: state["all"].update(count=1), "keeps for 'all', which is no parameter"),
    ],
)
def test_state_that_a_checkpoint_cannot_hold_is_told(keeps: Any, told: str) -> None:
    weights = parameters("norm")
    made = RankOptimizer(weights, EVERYWHERE, torch.optim.SGD)
    run(made, weights, 1)
    assert made.optimizer is not None
    keeps(made.optimizer.state, weights["norm"])

    with pytest.raises(InputError, match=told):
        made.state()


class Lookahead(Momentous):
    """Has something beside what torch keeps, and says so itself."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "slow": 1}


class Decaying(ExponentialLR):
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.factor = torch.tensor(0.5)
        super().__init__(optimizer, 0.5)


@pytest.mark.parametrize(
    ("optimizer", "scheduler", "told"),
    [
        (Lookahead, None, "Lookahead keeps what its own state_dict alone knows"),
        (torch.optim.SGD, Decaying, "Decaying keeps a Tensor as 'factor'"),
    ],
)
def test_what_would_be_lost_in_a_checkpoint_is_told(optimizer: Any, scheduler: Any, told: str) -> None:
    made = RankOptimizer(parameters("norm"), EVERYWHERE, optimizer, scheduler)

    with pytest.raises(InputError, match=told):
        made.state()
