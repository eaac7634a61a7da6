"""What ranks tell each other outside of training: jobs and weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pd2bw_fx
from pd2bw_fx.errors import InputError
from pd2bw_fx.models import build
from pd2bw_fx.runtime.job import Planned
from pd2bw_fx.runtime.meeting import meet
from pd2bw_fx.runtime.world import collected, local_device


@pytest.fixture
def alone(one_rank: None) -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def test_weights_that_share_a_block_are_collected_without_the_block(alone: dist.ProcessGroup) -> None:
    block = torch.arange(24.0)
    own = {
        "weight": block[:12].view(3, 4),
        "bias": block[12:15],
        "turned": block[:12].view(3, 4).t(),
        "repeated": block[20:21].expand(3),
        "mask": torch.tensor([True, False]),
        "count": torch.tensor(7),
        "rotation": torch.view_as_complex(block[:8].view(4, 2)).conj(),
        "nothing": torch.empty(0, 3),
        "channels last": torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
    }

    found = collected(own, alone)

    assert found.keys() == own.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, own[name]), name
        assert tensor.untyped_storage().nbytes() == own[name].nbytes, name
        assert own[name].numel() == 0 or tensor.data_ptr() != own[name].data_ptr(), name
    assert found["channels last"].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("planned", "local", "visible", "expected"),
    [
        (Planned("big:0", "cuda", 0, 2), {}, 4, "cuda:0"),
        (Planned("cuda:3", "cuda", 3, 2), {}, 4, "cuda:3"),
        (Planned("cuda:0@nodea", "cuda", 0, 2), {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, 4, "cuda:0"),
        # Torchrun has put more ranks here, or shows each of them one GPU: they take those that there are.
        (Planned("cuda:0", "cuda", 0, 1), {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, 4, "cuda:1"),
        (Planned("cuda:1", "cuda", 1, 2), {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, 1, "cuda:0"),
        (Planned("cuda:1", "cuda", 1, 2), {}, 1, "cuda:0"),
        (Planned("cuda, by name alone", "cpu", 0, 1), {}, 4, "cpu"),
    ],
)
def test_a_rank_computes_on_the_gpu_it_was_planned_for(
    planned: Planned, local: dict[str, str], visible: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in local.items():
        monkeypatch.setenv(name, value)

    assert str(local_device(planned)) == expected
    assert str(local_device(planned, "cpu")) == "cpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs")
def test_a_plan_for_gpus_is_not_trained_on_a_cpu_unasked() -> None:
    cluster = pd2bw_fx.Cluster.uniform(2, kind="cuda", memory_bytes="1 GiB")
    named = replace(
        cluster, devices=tuple(replace(d, name=f"big:{at}") for at, d in enumerate(cluster.devices))
    )
    pipe = pd2bw_fx.split(build("mlp"), cluster=named, costs="analytic", check=False)
    batches = [build("mlp").example_inputs(8)]

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    with pytest.raises(
        InputError, match=r'planned for big:[01], a GPU, and this process sees none; device="cpu"'
    ):
        pipe.train_local(batches, optimizer=sgd, microbatches_per_update=4)
    assert pipe.train_local(batches, optimizer=sgd, microbatches_per_update=4, device="cpu").losses


@pytest.mark.usefixtures("alone")
def test_a_group_for_gpus_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cuda:nccl")  # which no machine without one makes

    with pytest.raises(
        InputError, match=r"initialised for cuda:nccl.*init_process_group\('cpu:gloo,cuda:nccl'\)"
    ):
        meet(timeout_s=1.0)
