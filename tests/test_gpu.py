"""What runs on a GPU that several ranks share. `pytest --device cuda` runs other tests' engines there too."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pd2bw_fx
from pd2bw_fx.errors import WorkerError
from pd2bw_fx.models.gpt import GPT, GPTConfig
from tests.torchrun import torchrun

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

SGD = functools.partial(torch.optim.SGD, lr=0.05)
ADAM = functools.partial(torch.optim.AdamW, lr=1e-3)
GPUS = pd2bw_fx.Cluster.uniform(2, kind="cuda", memory_bytes="4 GiB")


@pytest.mark.parametrize("num_ranks", [4, 3, 2])
@pytest.mark.parametrize("program", ["equals_methods.py", "equals_reference.py"])
@pytest.mark.parametrize("where", ["cuda", "nccl"])
def test_training_on_a_gpu_equals_the_reference(
    where: str, program: str, num_ranks: int, tmp_path: Path
) -> None:
    finished = torchrun(num_ranks, "with_backend.py", where, program, tmp_path / "result.json")

    assert finished.returncode == 0, finished.stderr
    for run, difference in json.loads((tmp_path / "result.json").read_text()).items():
        within = 2e-2 if "muon" in run else 1e-12  # Muon's iteration is in bf16
        assert difference["loss"] <= within, run
        assert difference["weights"] <= within, run


def gpt(**given: Any) -> GPT:
    torch.manual_seed(0)
    return GPT.from_config(GPTConfig(num_layers=4, width=64, num_heads=4, **given))


@pytest.mark.parametrize("precision", ["bf16", "fp16", None])
def test_a_precision_is_that_of_torchs_autocast(precision: Any) -> None:
    model, dtype = (
        gpt(dropout=0.0, tied=False),
        {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision),
    )
    batches = [model.example_inputs(batch_size=8) for _ in range(8)]
    pipe = pd2bw_fx.split(model, model.example_inputs(batch_size=4), cluster=GPUS, costs="analytic")
    alone = gpt(dropout=0.0, tied=False).cuda()
    optimizer, expected = SGD(alone.parameters()), []
    for batch in batches:
        total = 0.0
        for part in zip(*(tensor.cuda().chunk(2) for tensor in batch), strict=True):
            with torch.autocast("cuda", dtype, enabled=dtype is not None):
                loss = alone(*part)
            (loss / 2).backward()
            total += loss.item() / 2
        optimizer.step()
        optimizer.zero_grad()
        expected.append(total)

    result = pipe.train_local(
        batches, optimizer=SGD, microbatches_per_update=2, method="1f1b", precision=precision
    )

    assert result.losses == pytest.approx(expected, rel=1e-4 if dtype is None else 5e-3)
    assert result.losses[-1] < result.losses[0]


def test_what_is_drawn_on_a_gpu_depends_on_the_microbatch_alone() -> None:
    losses = []
    for num_stages, recompute in ((1, False), (2, False), (2, True)):
        model = gpt(dropout=0.2).double()
        batches = [model.example_inputs(batch_size=8)] * 3
        pipe = pd2bw_fx.split(
            model, cluster=GPUS, num_stages=num_stages, recompute=recompute, costs="analytic", check=False
        )
        losses.append(
            pipe.train_local(batches, optimizer=ADAM, method="1f1b", microbatches_per_update=4, seed=3).losses
        )
    assert losses[0] != pytest.approx([losses[0][0]] * 3, rel=1e-6)
    assert losses[1:] == [pytest.approx(losses[0], rel=1e-12)] * 2


def test_a_model_on_a_gpu_is_split_trained_and_exported(tmp_path: Path) -> None:
    model = gpt(dropout=0.0).cuda()
    inputs = tuple(tensor.cuda() for tensor in model.example_inputs(batch_size=4))
    pipe = pd2bw_fx.split(model, inputs, cluster=GPUS, check="full")
    before = model(*inputs).item()
    result = pipe.train_local([inputs] * 8, optimizer=ADAM, microbatches_per_update=2)

    assert result.losses[0] == pytest.approx(before, rel=1e-4)
    assert result.losses[-1] < before
    assert {tensor.device.type for tensor in pipe.state_dict().values()} == {"cuda"}
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"cuda"}
    model.load_state_dict(pipe.state_dict())
    assert pipe.run(inputs)["loss"].item() == pytest.approx(model(*inputs).item(), rel=1e-5)
    assert len(pipe.export_onnx(tmp_path)["stages"]) == 2


def test_recurrent_layers_of_cudnn_are_split_and_trained() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 8)
            self.lstm = nn.LSTM(8, 8, 2, batch_first=True, bidirectional=True)
            self.gru = nn.GRU(16, 6, batch_first=True)
            self.head = nn.Linear(6, 11)

        def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
            hidden, _ = self.gru(self.lstm(self.embed(tokens))[0])
            return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())

    torch.manual_seed(0)
    model = Recurrent().double().cuda()
    tokens = torch.randint(11, (8, 5), device="cuda")
    alone, expected = copy.deepcopy(model), []
    optimizer = SGD(alone.parameters())
    for _ in range(3):
        expected.append(loss := alone(tokens, tokens))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    pipe = pd2bw_fx.split(model, (tokens[:4], tokens[:4]), cluster=GPUS, costs="analytic", check="full")

    result = pipe.train_local([(tokens, tokens)] * 3, optimizer=SGD, microbatches_per_update=2, method="1f1b")

    assert result.losses == pytest.approx([loss.item() for loss in expected], rel=1e-12)


class Columns(nn.Module):
    """Two columns with vocabularies of their own; keeps what it saw in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.few, self.many, self.last = nn.Embedding(3, 8), nn.Embedding(500, 8), nn.Linear(8, 2)
        self.seen: list[Any] = [None]

    def forward(self, columns: Tensor, targets: Tensor) -> Tensor:
        hidden = self.few(columns[:, 0]) + self.many(columns[:, 1])
        self.seen[0] = hidden.detach()
        return nn.functional.cross_entropy(self.last(hidden), targets)


@pytest.mark.parametrize("default", ["cpu", "cuda"])
def test_what_split_and_verify_try_out_is_nothing_that_a_kernel_refuses(default: str, tmp_path: Path) -> None:
    few, many = torch.arange(8) % 3, torch.arange(400, 408)
    inputs = torch.stack([few, many], dim=1).cuda(), (few > 0).long().cuda()
    model = Columns().cuda()
    with torch.device(default):
        pipe = pd2bw_fx.split(model, inputs, cluster=GPUS, costs="analytic", check="full")
        pipe.save(tmp_path / "kept")
        loaded = pd2bw_fx.load(tmp_path / "kept")
        assert loaded.verify(model).worst.relative < 1e-5
        assert loaded.verify(model, example_args=inputs).worst.relative < 1e-5
    assert torch.ones(3, device="cuda").sum().item() == 3


def test_a_gpu_whose_memory_is_full_is_told_with_what_to_try() -> None:
    def little_memory(parameters: Any) -> torch.optim.Optimizer:
        torch.cuda.set_per_process_memory_fraction(0.001)
        return torch.optim.SGD(parameters, lr=0.05)

    layers = [layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.ReLU())]
    x = torch.randn(40_000, 512)
    model, few, loss_fn = nn.Sequential(*layers), x[:64], nn.functional.mse_loss
    pipe = pd2bw_fx.split(model, (few,), loss_fn=loss_fn, example_targets=few, cluster=GPUS, costs="analytic")
    with pytest.raises(WorkerError, match="the device's memory is full: try smaller") as raised:
        pipe.train_local([(x, x)] * 2, optimizer=little_memory, microbatches_per_update=2)
    assert "failed with OutOfMemoryError" in str(raised.value)
