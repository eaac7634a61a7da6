"""The engine on a device that is not the CPU, as GPUs are not: everything it needs is moved there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.torchrun import torchrun_of_forks


def test_training_on_another_device_is_that_on_the_cpu(tmp_path: Path) -> None:
    finished = torchrun_of_forks(2, "other_device.py", tmp_path / "found.json")

    assert finished.returncode == 0, finished.stderr
    for name, (on_cpu, elsewhere) in json.loads((tmp_path / "found.json").read_text()).items():
        assert elsewhere[:2] == [pytest.approx(on_cpu[0]), pytest.approx(on_cpu[1])], name
        assert on_cpu[0][0] > on_cpu[0][-1]
        assert (on_cpu[2], elsewhere[2]) == (["cpu"], ["elsewhere"])


def test_a_model_elsewhere_is_compared_there_on_values_that_its_kernels_take() -> None:
    finished = torchrun_of_forks(1, "model_elsewhere.py")

    assert finished.returncode == 0, finished.stderr
