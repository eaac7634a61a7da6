"""What no worker is started for, or what workers refuse: options, batches and models that cannot train."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pd2bw_fx
from pd2bw_fx.models import build
from tests.local_runs import mlp_batches
from tests.trained import sgd

pytestmark = pytest.mark.usefixtures("no_process_is_left")

ELSEWHERE = list(nn.Linear(2, 2).parameters())


def noisy(parameters: Any) -> torch.optim.Optimizer:
    def draw(*_: Any) -> None:
        torch.rand(1)

    made = sgd(parameters)
    made.register_step_pre_hook(draw)
    return made


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return build("mlp").double()


@pytest.fixture(scope="module")
def pipe(model: nn.Module) -> pd2bw_fx.Pipeline:
    return pd2bw_fx.split(model, cluster=2, costs="analytic", microbatches_per_update=2, check=False)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"optimizer": lambda parameters: None}, "optimizer gave a NoneType; a function was expected"),
        (
            {"optimizer": lambda parameters: [sgd(parameters)]},
            "optimizer gave a list; .*; one optimizer steps",
        ),
        ({"lr_scheduler": lambda optimizer: None}, "lr_scheduler gave a NoneType; a function was expected"),
        (
            {"optimizer": lambda parameters: sgd(ELSEWHERE)},
            "optimizer steps parameters that it was not given",
        ),
        (
            {"optimizer": noisy, "method": "1f1b", "replicas": 2},
            "SGD draws random numbers in its step, .* is held by several ranks",
        ),
    ],
)
def test_an_option_that_cannot_be_is_refused_by_the_engine(
    model: nn.Module, pipe: pd2bw_fx.Pipeline, options: dict[str, Any], error: str
) -> None:
    with pytest.raises(pd2bw_fx.WorkerError, match=rf"rank \d .* failed with InputError:\n{error}"):
        pipe.train_local(mlp_batches(model), **{"optimizer": sgd} | options)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"optimizer": None}, "optimizer is of type NoneType; a function was expected"),
        ({"optimizer": [sgd, sgd]}, "optimizer is of type list; .*; one optimizer steps all parameters, and"),
        ({"lr_scheduler": 3}, "lr_scheduler is 3; a function that makes a scheduler of the optimizer"),
        ({"max_gradient_norm": -1.0}, "max_gradient_norm is -1.0; a number above 0 was expected"),
        ({"max_gradient_norm": "1"}, "max_gradient_norm is '1'; a number above 0 was expected"),
        ({"precision": "int8"}, "precision is 'int8'; None or 'bf16' or 'fp16' was expected"),
        ({"compile": "yes"}, "compile is 'yes'; True, False or torch.compile's own options was expected"),
        (
            {"compile": {"mode": "fastest"}},
            "torch.compile does not take compile={'mode': 'fastest'}: .*reduce",
        ),
        (
            {"compile": {"mode": "reduce-overhead"}},
            "compile={'mode': 'reduce-overhead'} makes CUDA graphs, which",
        ),
        ({"backend": "mpi"}, "backend is 'mpi'; 'auto' or 'gloo' or 'nccl' was expected"),
        (
            {"backend": "nccl", "device": "cpu"},
            "backend='nccl' moves tensors between GPUs, and rank 0 computes",
        ),
        ({"weight_average": 1.0}, "weight_average is 1.0; a decay from 0 to below 1, such as 0.999, was"),
        (
            {"scaler": None},
            'scaler is no option of training; precision="fp16" scales the loss, "bf16" is auto',
        ),
        ({"criterion": None}, r"criterion is no option of training; .*: split\(model, .., loss_fn=..\)"),
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps is no .*; microbatches_per_update"),
        ({"gradient_clip_val": 1.0}, r"gradient_clip_val is no option .*; did you mean max_gradient_norm\?"),
        ({"ema": 0.99}, "ema is no option of training; weight_average=0.999, say, is the decay of a moving"),
        ({"record": -1}, "record is -1; a whole number of zero or more was expected"),
        ({"seed": "x"}, "seed is 'x'; a whole number or None was expected"),
        ({"seed": 2**64}, "seed is 18446744073709551616; torch's generators take up to 64 bits"),
        ({"device": "gpu7"}, "device is 'gpu7'; a device such as 'cpu' or 'cuda:0' was expected"),
        ({"on_update": 3}, "on_update is 3; a function of the update's number and its loss"),
        (
            {"on_update": lambda update: None},
            "on_update takes update; a function of the update's",
        ),
        ({"parameter_options": lambda p: {}}, "parameter_options takes p; a function of a"),
        ({"method": ["2bw"]}, r"method is \['2bw'\]; the name of a method"),
        ({"threads_per_worker": 0}, "threads_per_worker is 0; a whole number of one or more"),
        ({"slack": "x"}, "slack is 'x'; a number or \"auto\" was expected"),
        ({"microbatches": 4}, "microbatches is no option of training; did you mean microbatches_per_update?"),
        ({"device": "cuda:99"}, "this stage is to run on cuda:99, and this process sees (no GPU|1 GPU)"),
        ({"lr": 0.1}, r"lr is no option of training; the optimizer has it: .*AdamW\(parameters, lr=3e-4\)"),
        ({"epochs": 2}, "epochs is no option of training; batches are gone through once: .*chain"),
        (
            {"colour": 1},
            "colour is no option of training; known are optimizer, lr_scheduler, .* threads_per_worker",
        ),
    ],
)
def test_an_option_that_cannot_be_is_refused_before_there_is_a_process(
    pipe: pd2bw_fx.Pipeline, options: dict[str, Any], error: str
) -> None:
    with pytest.raises(pd2bw_fx.InputError, match=rf"^{error}"):
        pipe.train_local([], **{"optimizer": sgd} | options)


@pytest.mark.parametrize("count", [0, "4", True])
def test_microbatches_that_cannot_be_counted_are_refused(pipe: pd2bw_fx.Pipeline, count: Any) -> None:
    with pytest.raises(pd2bw_fx.InputError, match=f"microbatches_per_update is {count!r}; a whole number"):
        pipe.train_local([], optimizer=sgd, microbatches_per_update=count)


def wrong_batches() -> dict[str, tuple[Callable[[Any], Any], str]]:
    return {
        "too few": (lambda b: tuple(t[:3] for t in b), "cannot be cut into 2"),
        "a type": (lambda b: (b[0].float(), b[1]), "float32"),
        "an argument": (lambda b: b[:1], "has no 'labels'"),
    }


@pytest.mark.parametrize("wrong", sorted(wrong_batches()))
def test_a_batch_that_does_not_fit_is_refused(model: nn.Module, pipe: pd2bw_fx.Pipeline, wrong: str) -> None:
    change, message = wrong_batches()[wrong]

    with pytest.raises(pd2bw_fx.InputError, match=message):
        pipe.train_local([change(mlp_batches(model)[0])], optimizer=sgd)


def test_a_loss_that_is_no_scalar_is_told_with_what_to_try() -> None:
    class InATuple(nn.Linear):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return super().forward(x).square().mean(0), x

    pipe = pd2bw_fx.split(InATuple(4, 1), torch.randn(2, 4), cluster=1, costs="analytic")

    with pytest.raises(
        pd2bw_fx.InputError, match=r"^what InATuple returns as '0' has shape \(1,\), .*\.mean"
    ):
        pipe.train_local([], optimizer=sgd)


def test_what_cannot_train_is_refused_before_a_worker_starts(pipe: pd2bw_fx.Pipeline) -> None:
    with pytest.raises(pd2bw_fx.InputError, match="2bw with 1 microbatch an update on 2 stages"):
        pipe.train_local([], optimizer=sgd, microbatches_per_update=1)

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    silent = pd2bw_fx.split(model, (torch.randn(2, 8),), cluster=2, costs="analytic")
    with pytest.raises(pd2bw_fx.InputError, match="returns no loss"):
        silent.train_local([], optimizer=sgd)

    shapeless = pd2bw_fx.split(model, cluster=2)
    with pytest.raises(pd2bw_fx.InputError, match="example"):
        shapeless.train_local([], optimizer=sgd)

    lock = threading.Lock()
    with pytest.raises(pd2bw_fx.InputError, match="sent to the workers"):
        pipe.train_local(mlp_batches(build("mlp")), optimizer=lambda parameters: (lock, sgd(parameters))[1])


def test_what_is_not_many_batches_is_told() -> None:
    pipe = pd2bw_fx.split(build("mlp"), cluster=1, costs="analytic", check=False, method="1f1b")
    batch = build("mlp").example_inputs(4)

    def train(batches: Any) -> None:
        pipe.train_local(batches, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))

    with pytest.raises(
        pd2bw_fx.InputError, match="batches is a single batch; one for each update was expected"
    ):
        train(batch)
    with pytest.raises(
        pd2bw_fx.InputError, match="batches gave none; a generator can be gone through only once"
    ):
        train(each for each in ())


def test_no_worker_is_started_for_no_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = pd2bw_fx.split(build("mlp"), cluster=1, costs="analytic", check=False, method="1f1b")
    monkeypatch.setattr("pd2bw_fx.runtime.local.LocalRun", lambda *_: pytest.fail("workers were started"))
    with pytest.raises(pd2bw_fx.InputError, match="batches gave none"):
        pipe.train_local([], optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
