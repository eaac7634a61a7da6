"""Tensors between processes of one host: they arrive as they were sent, and nothing is left behind."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

import pd2bw_fx
from pd2bw_fx.models import build
from pd2bw_fx.runtime.reference import train_reference
from pd2bw_fx.runtime.shared_memory import NO_BUFFER, SharedBuffers
from tests.torchrun import torchrun
from tests.trained import sgd

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="files without a name are Linux's")


def test_links_carry_the_same_with_and_without_a_free_buffer(tmp_path: Path) -> None:
    ran = torchrun(2, "transport.py", tmp_path / "result.json")

    assert ran.returncode == 0, ran.stderr[-2000:]
    told = json.loads((tmp_path / "result.json").read_text())
    assert told == {"reach": [0], "differing": [], "shared": [1, 2, 3, 5, 6], "late": True}


def test_buffers_are_given_out_until_none_is_free() -> None:
    sender = SharedBuffers.make(torch.float32, (10, 100))
    receiver = SharedBuffers.attach(sender.ticket, torch.float32, (10, 100))
    tensors = [torch.randn(10, 100) for _ in range(4)]

    buffers = [sender.put(tensor) for tensor in tensors]
    taken = receiver.take(buffers[1])

    assert buffers == [0, 1, 2, NO_BUFFER]
    assert torch.equal(taken, tensors[1])
    assert sender.put(tensors[3]) == 1


def test_training_with_large_activations_equals_the_reference() -> None:
    torch.manual_seed(0)
    model, m = build("mlp").double(), 2
    rows = 2**20 // (64 * 8)
    batches = [model.example_inputs(batch_size=rows * m) for _ in range(4)]
    pipe = pd2bw_fx.split(model, model.example_inputs(batch_size=2), cluster=2, costs="analytic", check=False)

    result = pipe.train_local(batches, optimizer=sgd, microbatches_per_update=m)

    reference = train_reference(model, batches, optimizer=sgd, microbatches_per_update=m)
    assert result.losses == pytest.approx(reference.losses, rel=1e-12)
