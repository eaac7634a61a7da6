"""Every method of the field, trained on real processes, equals a reference of its own rule."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.torchrun import torchrun


@pytest.mark.parametrize(("num_ranks", "num_runs"), [(2, 28), (3, 24), (4, 28)])
def test_losses_and_weights_of_every_method_equal_a_reference_of_its_rule(
    num_ranks: int, num_runs: int, tmp_path: Path
) -> None:
    finished = torchrun(num_ranks, "equals_methods.py", tmp_path / "result.json")

    assert finished.returncode == 0, finished.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert len(result) == num_runs
    for run, difference in result.items():
        assert difference["loss"] <= 1e-12, run
        assert difference["weights"] <= 1e-12, run


def test_precision_is_that_of_torchs_autocast_and_loss_scale(tmp_path: Path) -> None:
    finished = torchrun(2, "precision.py", tmp_path / "result.json")

    assert finished.returncode == 0, finished.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert len(result) == 3
    for run, (found, expected) in ((run, r["losses"]) for run, r in result.items()):
        assert found == pytest.approx(expected, rel=1e-6), run
    for run, r in result.items():
        assert r["scales"][0] == r["scales"][1], run
        assert r["weights"] <= 1e-6, run
    assert result["fp16 64.0"]["scales"][0] < result["fp16 1.0"]["scales"][0]
