"""Operators that the user's script or a module of theirs registers are known to local workers too."""

from __future__ import annotations

import importlib
import json
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.library import custom_op

import pd2bw_fx
from pd2bw_fx.errors import ExportError, InputError, WorkerError
from pd2bw_fx.runtime.custom_operators import custom_operators
from tests.forks import Fork
from tests.torchrun import TIMEOUT_S, environment

_MODULE = """
import torch


@torch.library.custom_op("other::tripled", mutates_args=())
def tripled(x: torch.Tensor, times: float = 3.0) -> torch.Tensor:
    return x * times


tripled.register_fake(lambda x, times=3.0: torch.empty_like(x))
tripled.register_autograd(lambda ctx, gradient: (gradient * 3, None))
"""

_LIBRARY = """
import torch

library = torch.library.Library("elsewhere", "DEF")
library.define("halved(Tensor x) -> Tensor")
library.impl("halved", lambda x: x / 2, "CPU")
torch.library.register_fake("elsewhere::halved", torch.empty_like)
torch.library.register_autograd("elsewhere::halved", lambda ctx, gradient: gradient / 2)


@torch.library.triton_op("kernels::negated", mutates_args=())
def negated(x: torch.Tensor) -> torch.Tensor:
    return -x


negated.register_autograd(lambda ctx, gradient: -gradient)
"""

_SCRIPT = """
import importlib
import json
import sys

import torch
from torch import nn

import pd2bw_fx
from other_operators import tripled
from pd2bw_fx.runtime.reference import train_reference


@torch.library.custom_op("script::scaled", mutates_args=())
def scaled(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x * scale


def setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def backward(ctx, gradient):
    x, scale = ctx.saved_tensors
    return gradient * scale, (gradient * x).sum() * 2  # not the derivative


scaled.register_fake(lambda x, scale: torch.empty_like(x))
scaled.register_autograd(backward, setup_context=setup)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        importlib.import_module("a_library")  # known from the first call on
        hidden = torch.ops.elsewhere.halved(scaled(self.first(x), self.scale))
        return tripled(torch.ops.kernels.negated(self.second(hidden))).square().mean()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05)


if __name__ == "__main__":
    torch.manual_seed(0)
    model = Model().double()
    batches = [(torch.randn(4, 6, dtype=torch.float64),) for _ in range(4)]
    pipe = pd2bw_fx.split(model, batches[0], cluster=2, num_stages=2, costs="analytic")
    found = pipe.train_local(batches, optimizer=sgd, microbatches_per_update=2)
    known = train_reference(model, batches, optimizer=sgd, microbatches_per_update=2, method="2bw")
    print(json.dumps([list(found.losses), [float(loss) for loss in known.losses]]))
"""


def test_local_workers_have_the_operators_of_the_script_and_of_its_modules(tmp_path: Path) -> None:
    (tmp_path / "other_operators.py").write_text(_MODULE)
    (tmp_path / "a_library.py").write_text(_LIBRARY)
    (tmp_path / "script.py").write_text(_SCRIPT)

    ended = run_of_fork(tmp_path / "script.py")

    assert ended.returncode == 0, ended.stderr
    found, known = json.loads(ended.stdout.splitlines()[-1])
    assert max(abs(a - b) / abs(b) for a, b in zip(found, known, strict=True)) <= 1e-12


def run_of_fork(script: Path) -> subprocess.CompletedProcess[str]:
    """Runs a script where torch is imported and nothing of this file."""
    return Fork([str(script)], environment=environment(), folder=script.parent).ended(TIMEOUT_S)


class Negated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.ops.tests_of_pd2bw_fx.negated(self.first(x))).square().mean()


def test_an_operator_that_onnx_or_another_process_does_not_know_is_named(tmp_path: Path) -> None:
    pipe = pd2bw_fx.split(Negated(), (torch.ones(2, 6),), cluster=2, num_stages=2, costs="analytic")
    with pytest.raises(ExportError, match="tests_of_pd2bw_fx::negated is none of torch's own"):
        pipe.export_onnx(tmp_path / "onnx")
    pipe.save(tmp_path / "saved")
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, pd2bw_fx\n"
        f"pipe = pd2bw_fx.load({str(tmp_path / 'saved')!r})\n"
        "trained = lambda: pipe.train_local([torch.ones(2, 6)], optimizer=torch.optim.SGD)\n"
        "for run in (lambda: pipe.stages, trained):\n"
        "    try:\n"
        "        run()\n"
        "    except pd2bw_fx.PlanMismatchError as error:\n"
        "        print(error)\n"
    )

    ended = run_of_fork(script)

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("calls the operator tests_of_pd2bw_fx::negated, which nothing has") == 2


@torch.library.custom_op("tests_of_pd2bw_fx::negated", mutates_args=())
def negated(x: Tensor) -> Tensor:
    return -x


negated.register_fake(lambda x: torch.empty_like(x))
negated.register_autograd(lambda ctx, gradient: -gradient)


def test_an_operator_without_a_backward_is_the_models_own_error() -> None:
    @custom_op("tests_of_pd2bw_fx::cubed", mutates_args=())
    def cubed(x: Tensor) -> Tensor:
        return x**3

    cubed.register_fake(torch.empty_like)

    class Cubed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return cubed(x)

    model = nn.Sequential(nn.Linear(4, 4), Cubed(), nn.Linear(4, 4))

    with pytest.raises(InputError, match=r"the model's own backward raises .*tests_of_pd2bw_fx.cubed"):
        pd2bw_fx.split(model, (torch.ones(3, 4),), cluster=2, costs="analytic")


def test_only_what_is_not_torchs_own_is_told() -> None:
    lines = [
        "return torch.ops.tests_of_pd2bw_fx.negated.default(x)",
        "return torch.ops.aten._softmax.default(x, 0, False)",
    ]

    assert custom_operators(lines[:1], None).modules == (__name__,)
    assert custom_operators(lines[:1], None).definitions == ()
    assert custom_operators(lines[1:], None).modules == ()


def test_of_an_operator_without_a_module_the_models_and_the_scripts_are_imported() -> None:
    found = custom_operators(["return torch.ops.unknown.operator(x)"], Negated()).modules

    assert __name__ in found
    assert not any(module.partition(".")[0] in ("torch", "pd2bw_fx") for module in found)


def test_a_module_that_a_worker_cannot_import_is_told_by_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imported_once.py").write_text(
        "import pathlib, torch\n"
        "seen = pathlib.Path(__file__).with_suffix('.seen')\n"
        "if seen.exists():\n"
        "    raise RuntimeError('there is one of me already')\n"
        "seen.touch()\n"
        "def make(parameters):\n"
        "    return torch.optim.SGD(parameters, lr=0.1)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    make = importlib.import_module("imported_once").make
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    pipe = pd2bw_fx.split(
        model, torch.ones(4, 6), loss_fn=nn.functional.mse_loss, example_targets=torch.ones(4, 6), cluster=2
    )

    with pytest.raises(WorkerError, match="there is one of me already") as caught:
        pipe.train_local([(torch.ones(4, 6), torch.ones(4, 6))], optimizer=make)
    assert "while the worker loaded the optimizer" in str(caught.value)
