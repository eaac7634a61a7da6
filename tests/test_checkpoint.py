"""Checkpoints: a run that was stopped goes on as if it had not been."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import pd2bw_fx
from pd2bw_fx.runtime.checkpoint import Checkpoint
from tests.torchrun import torchrun


def run(folder: Path, checkpoints: Path, num_updates: int, *kill_at: int, num_processes: int = 2) -> int:
    folder.mkdir()
    arguments = [folder, checkpoints, num_updates, *kill_at]
    finished = torchrun(num_processes, "resumes.py", *map(str, arguments))
    assert finished.returncode == 0 or kill_at, finished.stderr
    return finished.returncode


def test_a_run_killed_while_writing_resumes_bit_for_bit_from_the_last_good_checkpoint(tmp_path: Path) -> None:
    whole, broken, resumed, checkpoints = (
        tmp_path / n for n in ("whole", "broken", "resumed", "checkpoints")
    )
    run(whole, tmp_path / "others", 6)

    assert run(broken, checkpoints, 6, 4) != 0
    assert Checkpoint(checkpoints).header.updates == 2
    run(resumed, checkpoints, 6)

    expected, found = (json.loads((f / "losses.json").read_text()) for f in (whole, resumed))
    assert found["first"] == 2
    assert found["losses"] == expected["losses"][2:]
    weights = load_file(resumed / "weights.safetensors")
    for name, tensor in load_file(whole / "weights.safetensors").items():
        assert torch.equal(weights[name], tensor), name


def test_a_checkpoint_of_three_stages_resumes_on_one(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    run(tmp_path / "whole", tmp_path / "others", 6, num_processes=3)
    run(tmp_path / "three", checkpoints, 4, num_processes=3)

    run(tmp_path / "one", checkpoints, 6, num_processes=1)

    expected = json.loads((tmp_path / "whole" / "losses.json").read_text())
    found = json.loads((tmp_path / "one" / "losses.json").read_text())
    assert found["losses"] == pytest.approx(expected["losses"][4:], rel=1e-5)


def test_a_folder_without_a_checkpoint_says_so(tmp_path: Path) -> None:
    with pytest.raises(pd2bw_fx.InputError, match="holds no checkpoint"):
        Checkpoint(tmp_path)


def test_a_checkpoint_with_a_file_missing_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "update_000002"
    folder.mkdir()
    (tmp_path / "latest").write_text(folder.name)

    with pytest.raises(pd2bw_fx.PlanMismatchError, match=r"checkpoint\.json"):
        Checkpoint(tmp_path)
