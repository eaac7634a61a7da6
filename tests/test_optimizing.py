"""A rank's optimizer: the groups of the whole model everywhere, and resuming on another number of ranks."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    SequentialLR,
)

from pd2bw_fx.errors import InputError
from pd2bw_fx.runtime.optimizing import RankOptimizer, grouped
from tests.rank_optimizers import (
    EVERYWHERE,
    SHAPES,
    by_dimensions,
    one_group_each,
    parameters,
    run,
    saved,
    specs,
)


@pytest.mark.parametrize("names", [("embedding", "norm"), ("bias", "head"), ("norm",)])
def test_option_groups_are_those_of_the_whole_model(names: tuple[str, ...]) -> None:
    own = parameters(*names)

    groups = grouped(own, EVERYWHERE, by_dimensions)

    assert [group["lr"] for group in groups] == [0.1, 0.4]
    held = [{name for name in own if any(own[name] is p for p in group["params"])} for group in groups]
    assert held == [{n for n in names if len(SHAPES[n]) == size} for size in (2, 1)]


def warm_then_fall(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return SequentialLR(
        optimizer, [LinearLR(optimizer, total_iters=2), ExponentialLR(optimizer, 0.7)], milestones=[2]
    )


def fall_at_once_then_again(optimizer: torch.optim.Optimizer) -> LRScheduler:
    steps = MultiStepLR(optimizer, milestones=[2, 2, 4], gamma=0.3)
    return SequentialLR(optimizer, [LinearLR(optimizer, total_iters=1), steps], milestones=[1])


class Remembering(LRScheduler):
    """Its list has an entry for each step, and none for each group."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.seen: list[float] = []
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        self.seen.append(1 / (1 + len(self.seen)))
        return [base * self.seen[-1] for base in self.base_lrs]


SCHEDULERS: dict[str, Any] = {
    "exponential": functools.partial(ExponentialLR, gamma=0.9),
    "sequential": warm_then_fall,
    "milestones": functools.partial(MultiStepLR, milestones=[2, 4, 4]),
    "milestones later": fall_at_once_then_again,
    "remembering": Remembering,
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda t: 1 / (1 + t)),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_what_two_ranks_saved_goes_on_on_one(tmp_path: Path, scheduler: str) -> None:
    make = functools.partial(RankOptimizer, optimizer=one_group_each, scheduler=SCHEDULERS[scheduler])
    whole, parts = parameters(*SHAPES), [parameters("embedding", "norm"), parameters("bias", "head")]
    expected = make(whole, EVERYWHERE)
    run(expected, whole, 6)
    ranks = [(make(part, EVERYWHERE), part) for part in parts]
    for made, part in ranks:
        run(made, part, 3)
    checkpoint = saved(tmp_path, ranks)
    found = checkpoint.tensors([f"{kind}/{name}" for kind in ("weights_0", "optimizer") for name in SHAPES])
    weights = {name: nn.Parameter(found[f"weights_0/{name}"]) for name in SHAPES}

    resumed = make(weights, EVERYWHERE)
    resumed.load(checkpoint, found)
    run(resumed, weights, 3)

    for name, parameter in weights.items():
        assert torch.equal(parameter, whole[name]), name


class Counting(torch.optim.SGD):
    """Counts its steps in an option that the first of them adds, as apex's FusedAdam does."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            group["lr"] = 0.1 / group["step"]
        super().step(closure)


def test_an_option_that_the_first_step_adds_goes_on(tmp_path: Path) -> None:
    own = parameters("embedding", "norm")
    made = RankOptimizer(own, EVERYWHERE, Counting)
    run(made, own, 3)
    checkpoint = saved(tmp_path, [(made, own)])

    resumed = RankOptimizer(own, EVERYWHERE, Counting)
    resumed.load(checkpoint, checkpoint.tensors(["optimizer/embedding", "optimizer/norm"]))
    run(resumed, own, 1)
    assert resumed.learning_rates == (0.1 / 4,)


def test_a_group_without_parameters_here_goes_on_with_its_options(tmp_path: Path) -> None:
    make = functools.partial(
        RankOptimizer, optimizer=torch.optim.SGD, scheduler=SCHEDULERS["exponential"], options=by_dimensions
    )
    own = parameters("embedding")
    made = make(own, EVERYWHERE)
    run(made, own, 3)
    checkpoint = saved(tmp_path, [(made, own)])

    resumed = make(own, EVERYWHERE)
    resumed.load(checkpoint, checkpoint.tensors(["optimizer/embedding"]))
    assert resumed.learning_rates == pytest.approx((0.1 * 0.9**3, 0.4 * 0.9**3))


@pytest.mark.parametrize("kind", [torch.optim.SGD, functools.partial(torch.optim.AdamW, fused=True)])
@pytest.mark.parametrize("options", [None, by_dimensions])
def test_a_rank_that_trains_nothing_tells_the_whole_model_s_rates(
    tmp_path: Path, kind: Any, options: Any
) -> None:
    make = functools.partial(
        RankOptimizer, optimizer=kind, scheduler=SCHEDULERS["sequential"], options=options
    )
    own = parameters("embedding")
    trains, idle = make(own, EVERYWHERE), make({}, EVERYWHERE)
    run(trains, own, 3)
    for _ in range(3):
        idle.step_scheduler()
    resumed = make({}, EVERYWHERE)
    resumed.load(saved(tmp_path, [(idle, {}), (trains, own)]), {})

    assert idle.learning_rates == resumed.learning_rates == trains.learning_rates
    assert len(idle.learning_rates) == (1 if options is None else 2)


def test_a_parameter_that_was_frozen_begins_anew(tmp_path: Path) -> None:
    make = functools.partial(RankOptimizer, optimizer=one_group_each)
    before = parameters("embedding")
    made = make(before, EVERYWHERE)
    run(made, before, 3)
    checkpoint = saved(tmp_path, [(made, before)])

    both = parameters("embedding", "norm")
    resumed = make(both, EVERYWHERE)
    resumed.load(checkpoint, checkpoint.tensors(["optimizer/embedding", "optimizer/norm"]))

    assert resumed.optimizer is not None
    assert resumed.optimizer.state[both["embedding"]]["scale"] == 1 / 3 / 3 / 3
    assert both["norm"] not in resumed.optimizer.state
    assert [group["lr"] for group in resumed.optimizer.param_groups] == [0.1, 0.4]


def by_weight_decay(name: str, parameter: nn.Parameter) -> dict[str, Any]:
    return {"weight_decay": 0.1} if parameter.dim() > 1 else {"weight_decay": 0.0, "lr": 0.02}


UNFROZEN: dict[str, Any] = {
    **{name: SCHEDULERS[name] for name in ("exponential", "sequential", "milestones", "lambda")},
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, 8),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=9),
}


@pytest.mark.parametrize("options", [None, by_weight_decay])
@pytest.mark.parametrize("scheduler", UNFROZEN)
def test_what_was_frozen_on_a_whole_rank_is_as_far_along_its_schedule(
    tmp_path: Path, scheduler: str, options: Any
) -> None:
    adam = functools.partial(torch.optim.AdamW, lr=0.1)
    make = functools.partial(RankOptimizer, optimizer=adam, scheduler=UNFROZEN[scheduler], options=options)
    head = parameters("head", "bias")
    made = make(head, [spec for spec in EVERYWHERE if spec.name in head])
    run(made, head, 4)
    checkpoint = saved(tmp_path, [(make({}, EVERYWHERE), {}), (made, head)])
    everything = parameters(*SHAPES)
    uninterrupted = make(everything, EVERYWHERE)
    run(uninterrupted, everything, 4)

    first = parameters("embedding", "norm")
    resumed = make(first, EVERYWHERE)
    resumed.load(checkpoint, {})

    for _ in range(3):
        assert resumed.optimizer is not None
        assert uninterrupted.optimizer is not None
        for own, other in zip(
            resumed.optimizer.param_groups, uninterrupted.optimizer.param_groups, strict=True
        ):
            assert own["lr"] == pytest.approx(other["lr"], rel=1e-9)
            assert tuple(own["betas"]) == pytest.approx(other["betas"], rel=1e-9)
        run(resumed, first, 1)
        run(uninterrupted, everything, 1)


def test_learning_rates_that_go_their_own_ways_tell_nothing_of_another(tmp_path: Path) -> None:
    def scheduled(optimizer: torch.optim.Optimizer) -> LRScheduler:
        ways = [lambda step: 1 / (1 + step), lambda step: 1.0]
        return LambdaLR(optimizer, ways[: len(optimizer.param_groups)])

    make = functools.partial(
        RankOptimizer, optimizer=torch.optim.SGD, scheduler=scheduled, options=by_dimensions
    )
    head = parameters("head", "bias")
    made = make(head, EVERYWHERE)
    run(made, head, 3)
    checkpoint = saved(tmp_path, [(made, head)])
    third = functools.partial(
        RankOptimizer,
        optimizer=torch.optim.SGD,
        scheduler=lambda o: LambdaLR(o, lambda t: 1.0),
        options=lambda name, parameter: {"lr": 0.7},
    )

    with pytest.raises(InputError, match=r"learning rates that are 0\.25 to 1 of their first ones"):
        third(parameters("embedding"), EVERYWHERE).load(checkpoint, {})


class Precise(torch.optim.Optimizer):
    """Sums in float64, at a learning rate that is a tensor."""

    def __init__(self, groups: Any, lr: float = 0.1) -> None:
        super().__init__(groups, {"lr": torch.tensor(lr)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                kept = self.state[parameter]
                kept["sum"] = kept.get("sum", 0.0) + parameter.grad.double() / 3
                parameter -= (group["lr"] * kept["sum"]).float()


def test_moments_lie_in_memory_as_their_parameter_does_which_fused_kernels_rely_on(tmp_path: Path) -> None:
    everywhere = specs({"filters": (2, 3, 4, 5)})
    adamw = functools.partial(torch.optim.AdamW, fused=True)
    drawn = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    weights = {"filters": nn.Parameter(drawn)}
    made = RankOptimizer(weights, everywhere, adamw)
    run(made, weights, 3)
    checkpoint = saved(tmp_path, [(made, weights)])
    copied = {"filters": nn.Parameter(weights["filters"].detach().clone())}
    resumed = RankOptimizer(copied, everywhere, adamw)
    resumed.load(checkpoint, checkpoint.tensors(["optimizer/filters"]))
    run(made, weights, 3)
    run(resumed, copied, 3)

    assert torch.equal(copied["filters"], weights["filters"])


def two_schedulers(optimizer: torch.optim.Optimizer) -> LRScheduler:
    parts = [LinearLR(optimizer, 0.1, total_iters=2), CosineAnnealingLR(optimizer, 10)]
    return SequentialLR(optimizer, parts, [2])


@pytest.mark.parametrize("scheduler", [None, two_schedulers])
def test_state_goes_on_in_its_own_type(tmp_path: Path, scheduler: Any) -> None:
    weights = parameters("norm")
    made = RankOptimizer(weights, EVERYWHERE, Precise, scheduler=scheduler)
    run(made, weights, 3)
    checkpoint = saved(tmp_path, [(made, weights)])

    resumed = RankOptimizer(weights, EVERYWHERE, Precise, scheduler=scheduler)
    resumed.load(checkpoint, checkpoint.tensors(["optimizer/norm"]))

    assert made.optimizer is not None
    assert resumed.optimizer is not None
    before, after = (m.optimizer.state[weights["norm"]]["sum"] for m in (made, resumed))
    assert after.dtype == torch.float64
    assert torch.equal(before, after)
    assert isinstance(resumed.optimizer.param_groups[0]["lr"], torch.Tensor)
    for _ in range(3):
        assert resumed.learning_rates == made.learning_rates
        for one in (made, resumed):
            one.step_scheduler()


class Relative(torch.optim.SGD):
    """Finds its rate itself, as transformers' Adafactor does."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, lr=0.1)
        self.param_groups[0]["lr"] = None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(parameter.grad)


def test_an_optimizer_may_have_no_learning_rate() -> None:
    weights = parameters("norm")
    made = RankOptimizer(weights, EVERYWHERE, Relative)

    run(made, weights, 1)

    assert made.learning_rates == ()


@pytest.mark.parametrize(
    "kind",
    [
        torch.optim.SGD,
        torch.optim.AdamW,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.ASGD,
        functools.partial(torch.optim.AdamW, fused=True),
        functools.partial(torch.optim.AdamW, foreach=True),
    ],
)
def test_a_group_may_be_empty_on_a_rank(kind: Any) -> None:
    weights = parameters("norm")
    made = RankOptimizer(weights, EVERYWHERE, kind, options=by_dimensions)

    run(made, weights, 2)

    assert made.learning_rates == (0.1, 0.4)
    assert not torch.equal(weights["norm"], torch.ones(3))
