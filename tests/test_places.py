"""Which GPU each rank of a method is planned for."""

from __future__ import annotations

from typing import Any

import pytest

import pd2bw_fx
from pd2bw_fx.actions import RunRequest
from pd2bw_fx.runtime.job import jobs, work_for
from tests.stages import split_of_our_own


@pytest.mark.parametrize(
    ("method", "split", "replicas", "expected"),
    [
        ("2bw", {}, None, [0, 1, 2, 3]),
        ("ddp", {}, None, [0, 1, 2, 3]),
        ("chimera", {}, None, [0, 1, 2, 3]),
        ("interleaved", {"num_stages": 4}, None, [0, 1]),
        ("2bw", {"num_stages": 2, "replicas": 2}, None, [0, 1, 2, 3]),
        ("2bw", {"num_stages": 2}, 2, [0, 1, 2, 3]),
    ],
)
def test_every_rank_has_a_gpu_of_its_own(
    method: str, split: dict[str, Any], replicas: int | None, expected: list[int]
) -> None:
    gpus = pd2bw_fx.Cluster.uniform(4, kind="cuda", memory_bytes="1 GiB")
    options = {"cluster": gpus, "method": method, "microbatches_per_update": 4, **split}
    pipe = split_of_our_own("mlp", **options)

    made = jobs(pipe, work_for(pipe, RunRequest(method, 4, 0.0, replicas, False)))

    assert [job.device.index for job in made] == expected
    assert {job.device.ranks_of_host for job in made} == {len(expected)}
