"""The moving average of the weights is that of torch.optim.swa_utils, however the model is cut."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import pd2bw_fx
from pd2bw_fx.models.gpt import GPT, GPTConfig
from pd2bw_fx.runtime.reference import train_reference

pytestmark = pytest.mark.usefixtures("no_process_is_left")

DECAY, UPDATES = 0.8, 4
adamw = functools.partial(torch.optim.AdamW, lr=0.01)
sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Normed(nn.Module):
    """Has running statistics, and a layer that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(6, 8).requires_grad_(False)
        self.norm, self.last = nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.frozen(x)).relu()).square().mean()


def same(found: Any, expected: Any) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=1e-15, msg=name)


def test_a_plain_loop_with_torchs_averaged_model_gives_the_same() -> None:
    torch.manual_seed(0)
    model = Normed().double()
    batches = torch.randn(UPDATES, 8, 6, dtype=torch.float64)
    pipe = pd2bw_fx.split(copy.deepcopy(model), batches[0, :4], cluster=2, costs="analytic", method="1f1b")
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    stepped = adamw(parameter for parameter in model.parameters() if parameter.requires_grad)
    for batch in batches:
        stepped.zero_grad()
        for microbatch in batch.split(4):
            (model(microbatch) / 2).backward()
        stepped.step()
        averaged.update_parameters(model)

    result = pipe.train_local(batches, optimizer=adamw, microbatches_per_update=2, weight_average=DECAY)

    same(pipe.state_dict(), model.state_dict())
    same(result.averaged, averaged.module.state_dict())
    assert not torch.allclose(model.last.weight, averaged.module.last.weight)


def averaging(made: list[AveragedModel]) -> Callable[[Any], torch.optim.Optimizer]:
    """Returns an optimizer's function whose steps torch's AveragedModel follows."""

    def make(groups: Any) -> torch.optim.Optimizer:
        stepped = sgd(groups)
        weights = nn.ParameterList(p for group in stepped.param_groups for p in group["params"])
        made.append(AveragedModel(weights, multi_avg_fn=get_ema_multi_avg_fn(DECAY)))
        stepped.register_step_post_hook(lambda *_: made[0].update_parameters(weights))
        return stepped

    return make


@pytest.mark.parametrize(
    ("planned", "options"),
    [
        ({}, {}),
        ({"method": "interleaved"}, {}),
        ({}, {"method": "1f1b", "replicas": 2}),
    ],
)
def test_it_follows_every_update_of_tied_weights_on_several_ranks(
    planned: dict[str, Any], options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    config = GPTConfig(num_layers=2, width=16, num_heads=2, sequence_length=8, dropout=0.0)
    model = GPT.from_config(config).double()
    assert model.head.weight is model.tokens.weight
    drawn = model.example_inputs(batch_size=UPDATES * 8)
    batches = list(zip(*(tensor.split(8) for tensor in drawn), strict=True))
    pipe = pd2bw_fx.split(
        model, model.example_inputs(2), cluster=2, costs="analytic", microbatches_per_update=4, **planned
    )

    result = pipe.train_local(batches, optimizer=sgd, weight_average=DECAY, **options)

    assert result.averaged is not None
    copy.deepcopy(model).load_state_dict(result.averaged)
    made: list[AveragedModel] = []
    train_reference(
        model,
        batches,
        optimizer=averaging(made),
        microbatches_per_update=4,
        method="2bw" if options.get("method", pipe.plan.method) == "2bw" else "synchronous",
    )
    names = [name for name, _ in model.named_parameters()]
    expected = dict(zip(names, made[0].module, strict=True))
    same({name: result.averaged[name] for name in names}, expected)


@pytest.mark.parametrize("method", ["pipemare", "pipedream"])
def test_with_a_decay_of_0_it_is_the_newest_weights_whatever_the_stages_compute_with(method: str) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    options = {"costs": "analytic", "loss_fn": lambda output: output.square().mean()}
    pipe = pd2bw_fx.split(model, torch.randn(2, 6), cluster=2, **options)

    result = pipe.train_local(
        torch.randn(5, 2, 6), optimizer=adamw, method=method, microbatches_per_update=1, weight_average=0.0
    )

    assert result.averaged is not None
    for name, tensor in pipe.state_dict().items():
        assert torch.equal(result.averaged[name], tensor), name


def test_without_the_option_there_is_no_average() -> None:
    model = Normed()
    pipe = pd2bw_fx.split(model, torch.randn(2, 6), cluster=1, costs="analytic", method="1f1b")

    result = pipe.train_local([torch.randn(4, 6)], optimizer=adamw, microbatches_per_update=2)

    assert result.averaged is None


@pytest.mark.usefixtures("one_rank")
def test_an_engine_that_is_asked_for_an_average_it_does_not_keep_goes_on() -> None:
    x = torch.randn(4, 6)
    pipe = pd2bw_fx.split(Normed(), x[:2], cluster=1, costs="analytic", method="1f1b")

    with pipe.engine(optimizer=adamw, microbatches_per_update=2) as engine:
        engine.step(x)
        with pytest.raises(pd2bw_fx.InputError, match=r"no average .* weight_average=0\.999"):
            engine.averaged_state_dict()
        engine.step(x)

        assert engine.updates == 2


def test_one_more_optimizer_copy_in_a_plan_is_the_memory_of_the_average() -> None:
    x = torch.randn(4, 6)
    models = (pd2bw_fx.MemoryModel(), pd2bw_fx.MemoryModel(optimizer_copies=3))
    without, pipe = (
        pd2bw_fx.split(Normed(), x, cluster=2, method="1f1b", costs="analytic", memory_model=model)
        for model in models
    )

    result = pipe.train_local([torch.randn(8, 6)], optimizer=adamw, weight_average=DECAY)

    trained = {"norm.weight", "norm.bias", "last.weight", "last.bias"}
    average_bytes = sum(result.averaged[name].nbytes for name in trained)
    assert optimizer_bytes(pipe) - optimizer_bytes(without) == average_bytes


def optimizer_bytes(pipe: pd2bw_fx.Pipeline) -> int:
    return sum(stage.memory.optimizer_bytes for stage in pipe.plan.stages)
