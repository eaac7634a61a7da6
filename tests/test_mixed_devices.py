"""Stages of one pipeline on devices that are not alike, in the memory of one host."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import pd2bw_fx
from pd2bw_fx.runtime.groups import require_gpus
from tests.torchrun import torchrun_of_forks


def test_a_cpu_and_another_device_train_together_as_cpus_do(tmp_path: Path) -> None:
    finished = torchrun_of_forks(2, "mixed_devices.py", tmp_path / "found.json")

    assert finished.returncode == 0, finished.stderr
    on_cpus, *mixed = json.loads((tmp_path / "found.json").read_text())
    assert on_cpus[0][0] > on_cpus[0][-1]
    for losses, weights in mixed:
        assert [losses, weights] == [pytest.approx(on_cpus[0]), pytest.approx(on_cpus[1])]


def test_nccl_wants_a_gpu_for_each_rank() -> None:
    require_gpus("nccl", ["gpu 0", "gpu 1"])
    require_gpus("auto", ["gpu 0", None, "gpu 0"])
    for gpus, found in (
        (["gpu 0", None], "rank 1 computes on the CPU"),
        ([0, 1, 0], "ranks 0 and 2 share one"),
    ):
        with pytest.raises(pd2bw_fx.InputError, match=found):
            require_gpus("nccl", gpus)
