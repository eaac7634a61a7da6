"""What ranks tell each other outside of training: jobs and weights."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from pd2bw_fx.errors import InputError
from pd2bw_fx.runtime.meeting import meet
from pd2bw_fx.runtime.world import collected


@pytest.fixture
def alone() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert group is not None
        yield group
    finally:
        dist.destroy_process_group()


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


@pytest.mark.usefixtures("alone")
def test_a_group_for_gpus_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cuda:nccl")  # which no machine without one makes

    with pytest.raises(
        InputError, match=r"initialised for cuda:nccl.*init_process_group\('cpu:gloo,cuda:nccl'\)"
    ):
        meet(timeout_s=1.0)
