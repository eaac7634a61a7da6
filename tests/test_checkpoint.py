"""Checkpoints: a run that was stopped goes on as if it had not been, by itself and on other machines."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import pd2bw_fx
from pd2bw_fx.models.gpt import GPT, GPTConfig
from pd2bw_fx.runtime.checkpoint import Checkpoint, _publish
from tests.torchrun import all_succeed, free_port, start_forks, torchrun_of_forks


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same GPT in one stage, in two (with dropout) and in three, in folders of these names."""
    folder = tmp_path_factory.mktemp("pipelines")
    for dropout, stages in ((0.0, (1, 3)), (0.1, (2,))):
        torch.manual_seed(0)
        model = GPT.from_config(GPTConfig(num_layers=2, width=32, dropout=dropout))
        inputs = model.example_inputs(2)
        uncut = pd2bw_fx.split(model, inputs, cluster=1, costs="analytic", check=False)
        for num_stages in stages:
            pipe = pd2bw_fx.split(uncut, cluster=num_stages, costs="analytic", check=False)
            pipe.save(folder / str(num_stages))
    return folder


@pytest.fixture(scope="module")
def whole(pipelines: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs six updates on two stages without a stop; returns the folder of what they leave."""
    folder = tmp_path_factory.mktemp("whole")
    run(pipelines / "2", folder, folder / "checkpoints", 6)
    return folder


def run(
    pipeline: Path,
    folder: Path,
    checkpoints: Path,
    num_updates: int,
    *kill_at: int,
    options: Sequence[str] = (),
) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    arguments = [pipeline, folder, checkpoints, num_updates, *kill_at]
    finished = torchrun_of_forks(int(pipeline.name), "resumes.py", *map(str, arguments), options=options)
    assert finished.returncode == 0 or kill_at, finished.stderr
    return finished


def losses(folder: Path) -> list[float]:
    found: list[float] = json.loads((folder / "losses.json").read_text())["losses"]
    return found


def first(folder: Path) -> int:
    found: int = json.loads((folder / "losses.json").read_text())["first"]
    return found


def test_a_run_killed_while_writing_resumes_bit_for_bit_from_the_last_good_checkpoint(
    pipelines: Path, whole: Path, tmp_path: Path
) -> None:
    broken, resumed, checkpoints = (tmp_path / name for name in ("broken", "resumed", "checkpoints"))

    assert run(pipelines / "2", broken, checkpoints, 6, 4).returncode != 0
    assert Checkpoint(checkpoints).header.updates == 2
    run(pipelines / "2", resumed, checkpoints, 6)

    assert first(resumed) == 2
    assert losses(resumed) == losses(whole)[2:]
    for file in ("weights.safetensors", "averaged.safetensors"):
        found = load_file(resumed / file)
        for name, tensor in load_file(whole / file).items():
            assert torch.equal(found[name], tensor), (file, name)
    weights = load_file(whole / "weights.safetensors")
    assert not any(torch.equal(found[name], weights[name]) for name in found if name.endswith("norm.weight"))


def test_torchrun_begins_again_from_the_last_checkpoint(pipelines: Path, whole: Path, tmp_path: Path) -> None:
    restarted = tmp_path / "restarted"

    finished = run(pipelines / "2", restarted, tmp_path / "saved", 6, 4, options=("--max-restarts", "1"))

    assert finished.returncode == 0, finished.stderr
    assert first(restarted) == 2
    assert losses(restarted) == losses(whole)[2:]


def test_a_checkpoint_of_three_stages_resumes_on_one(pipelines: Path, tmp_path: Path) -> None:
    three, one, checkpoints = (tmp_path / name for name in ("three", "one", "checkpoints"))
    run(pipelines / "3", three, checkpoints, 8)

    run(pipelines / "1", one, checkpoints, 8)

    assert first(one) == 4
    assert losses(one) == pytest.approx(losses(three)[4:], rel=1e-5)
    averages = load_file(one / "averaged.safetensors")
    for name, tensor in load_file(three / "averaged.safetensors").items():
        torch.testing.assert_close(averages[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


def test_two_nodes_meet_and_train_as_one_does(pipelines: Path, whole: Path, tmp_path: Path) -> None:
    meeting = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    arguments = [pipelines / "2", tmp_path, tmp_path / "saved", "3"]

    nodes = [
        start_forks(
            1,
            "resumes.py",
            *arguments,
            options=[*meeting, "--local-addr", f"127.0.0.{k}"],
            GLOO_SOCKET_IFNAME="lo",
        )
        for k in (1, 2)
    ]
    all_succeed(nodes)
    assert losses(tmp_path) == losses(whole)[:3]


def test_a_folder_without_a_checkpoint_says_so(tmp_path: Path) -> None:
    with pytest.raises(pd2bw_fx.InputError, match=r"holds no checkpoint; .* begin without loading"):
        Checkpoint(tmp_path)


def test_a_checkpoint_with_a_file_missing_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "update_000002"
    folder.mkdir()
    (tmp_path / "latest").write_text(folder.name)

    with pytest.raises(pd2bw_fx.PlanMismatchError, match=r"checkpoint\.json"):
        Checkpoint(tmp_path)


def published(folder: Path, update: int) -> list[str]:
    name = f"update_{update:06d}"
    partial = folder / f".{name}.partial"
    partial.mkdir()
    (partial / "checkpoint.json").write_text(str(update))
    _publish(folder, partial, name)
    assert (folder / "latest").read_text() == name
    assert (folder / name / "checkpoint.json").read_text() == str(update)
    return sorted(path.name for path in folder.iterdir() if path.name != "latest")


def test_a_checkpoint_is_never_deleted_for_one_that_is_called_later(tmp_path: Path) -> None:
    assert published(tmp_path, 3) == ["update_000003"]
    assert published(tmp_path, 6) == ["update_000003", "update_000006"]
    assert published(tmp_path, 1) == ["update_000001", "update_000003", "update_000006"]  # of a new run
    assert published(tmp_path, 1) == ["update_000001", "update_000003", "update_000006"]  # once more
    published(tmp_path, 999_999)
    assert published(tmp_path, 1_000_000) == ["update_1000000", "update_999999"]


@pytest.mark.parametrize("num_renames", [0, 1, 2])
def test_a_kill_while_one_takes_the_place_of_another_of_the_same_update_leaves_one(
    num_renames: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "update_000004"

    def written(seed: int) -> Path:
        partial = tmp_path / f".{name}.partial"
        partial.mkdir()
        header = {"updates": 4, "method": "2bw", "num_stages": 1, "num_ranks": 0, "seed": seed}
        (partial / "checkpoint.json").write_text(json.dumps({"schema": 4} | header))
        return partial

    rename, left = Path.rename, iter(range(num_renames))

    def killed(path: Path, target: Path) -> Path:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return rename(path, target)

    _publish(tmp_path, written(seed=1), name)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", killed)
        partial = written(seed=2)
        if num_renames < 2:
            with pytest.raises(KeyboardInterrupt):
                _publish(tmp_path, partial, name)
        else:
            _publish(tmp_path, partial, name)

    assert Checkpoint(tmp_path).header.seed == (2 if num_renames == 2 else 1)
    shutil.rmtree(partial, ignore_errors=True)
    _publish(tmp_path, written(seed=3), name)
    assert Checkpoint(tmp_path).header.seed == 3
    assert not list(tmp_path.glob(".update*"))
