"""What a script sets for its whole process: in its workers it is set as it was set there."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pd2bw_fx
from pd2bw_fx.process_settings import ProcessSettings
from pd2bw_fx.runtime.draws import Draws

BACKENDS: Any = torch.backends
ASKED: list[Callable[[], Any]] = [
    torch.get_float32_matmul_precision,
    lambda: BACKENDS.cuda.matmul.allow_tf32,
    lambda: BACKENDS.cudnn.allow_tf32,
    lambda: BACKENDS.fp32_precision,
    lambda: BACKENDS.cudnn.fp32_precision,
    lambda: BACKENDS.cudnn.conv.fp32_precision,
    lambda: BACKENDS.cudnn.rnn.fp32_precision,
    lambda: BACKENDS.cuda.matmul.fp32_precision,
    lambda: torch._C._get_cublas_allow_bf16_reduced_precision_reduction(),
    lambda: BACKENDS.cuda.matmul.allow_fp16_accumulation,
    lambda: BACKENDS.mkldnn.deterministic,
]
SET: dict[str, dict[str, Any]] = {
    "nothing": {},
    "the older switch for TF32 off": {"cudnn.allow_tf32": False, "cuda.matmul.allow_tf32": False},
    "the older switch for TF32 on": {"cudnn.allow_tf32": True, "cuda.matmul.allow_tf32": True},
    "everything exact": {"fp32_precision": "ieee"},
    "convolutions exact": {"cudnn.conv.fp32_precision": "ieee"},
    "products in TF32": {"cuda.matmul.fp32_precision": "tf32"},
    "sums": {
        "cuda.matmul.allow_bf16_reduced_precision_reduction": (False, False),
        "cuda.matmul.allow_fp16_accumulation": True,
        "mkldnn.deterministic": True,
    },
}


def change(flags: dict[str, Any]) -> None:
    for name, value in flags.items():
        holder, _, attribute = name.rpartition(".")
        backend = BACKENDS
        for part in holder.split(".") if holder else ():
            backend = getattr(backend, part)
        setattr(backend, attribute, value)


def answers() -> list[Any]:
    """Returns the answers of all getters; old ones raise where they cannot express what new ones have set."""
    found: list[Any] = []
    for ask in ASKED:
        try:
            found.append(ask())
        except RuntimeError:
            found.append("raises")
    return found


def in_a_fork(work: Callable[[], Any]) -> Any:
    """Returns what `work` returns in a forked process, whose settings are its own."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, pickle.dumps(work()))
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        data = file.read()
    os.waitpid(child, 0)
    return pickle.loads(data)


@pytest.mark.parametrize("name", SET)
def test_a_worker_has_the_flags_of_the_script_by_the_older_and_the_newer_names(name: str) -> None:
    def script() -> tuple[ProcessSettings, list[Any]]:
        change(SET[name])
        return ProcessSettings.of_this_process(), answers()

    def worker() -> list[Any]:
        settings.take_over()
        return answers()

    settings, expected = in_a_fork(script)
    assert in_a_fork(worker) == expected


@pytest.fixture
def exact() -> Iterator[None]:
    """The older switch for TF32 raises."""
    parts = (BACKENDS.cudnn.conv, BACKENDS.cudnn.rnn)
    for part in parts:  # whoever has used that switch in this process has set them
        part.fp32_precision = "none"
    BACKENDS.fp32_precision = "ieee"
    yield
    BACKENDS.fp32_precision = "none"
    for part in parts:
        part.fp32_precision = "tf32"


@pytest.mark.usefixtures("exact")
def test_models_are_split_and_layers_draw_where_the_older_switch_cannot_tell() -> None:
    before = answers()
    assert before[2] == "raises"
    model, x = nn.LSTM(4, 4, num_layers=2, dropout=0.5), torch.randn(3, 2, 4)
    pipe = pd2bw_fx.split(model, (x,), cluster=1, costs="analytic")
    assert pipe.trace_report is not None
    assert pipe.trace_report.tracer.startswith("export")
    with Draws(0, [1], torch.device("cpu")).of(0):
        model(x)
    assert answers() == before
    assert BACKENDS.cudnn.enabled
    assert BACKENDS.mkldnn.enabled


class Ramp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).relu() * ((x > 0) / 3) * torch.ones(8) @ (torch.arange(64).view(8, 8) / 3)
        h = self.second(h) + torch.zeros(8, dtype=torch.float32) + torch.arange(8)
        return (h @ torch.linspace(0, 1, 8)).square().mean()


@pytest.fixture
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("float64")
def test_stages_keep_the_default_type_that_their_model_was_split_under(tmp_path: Path) -> None:
    x, model = torch.randn(4, 8), Ramp()
    pipeline = pd2bw_fx.split(model, x, cluster=2, num_stages=2, costs="analytic")
    pipeline.save(tmp_path / "ramp")
    expected = model(x)

    torch.set_default_dtype(torch.float32)

    assert torch.equal(pd2bw_fx.load(tmp_path / "ramp").run(x)["loss"], expected)
    source = "".join(stage.source for stage in pipeline.stages)
    assert "torch.linspace(0, 1, 8, dtype=torch.float64, device=" in source
    assert "torch.arange(8, device=" in source


def test_a_model_goes_through_where_torchs_test_tools_have_frozen_the_flags(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = BACKENDS.disable_global_flags.__globals__
    monkeypatch.setitem(held, "__allow_nonbracketed_mutation_flag", False)
    with pytest.raises(RuntimeError, match="not allowed to set"):
        BACKENDS.mkldnn.enabled = False

    pipe = pd2bw_fx.split(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.rand(2, 4), costs="analytic")

    assert pipe.trace_report.tracer == "export"
