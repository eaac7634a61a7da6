"""Checkpoints that cannot be written or read: one line that says why, and the ones before as they were."""

from __future__ import annotations

import functools
import json
import resource
import shutil
import signal
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, LinearLR, StepLR

import pd2bw_fx
from pd2bw_fx.errors import InputError, PlanMismatchError, WorkerError
from pd2bw_fx.runtime.rank_runner import RankRunner

pytestmark = pytest.mark.usefixtures("one_rank")


class Rooting(nn.Module):
    """The gradient of its first layer is not a number where an input begins with 0."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.last(hidden).square().mean() + ((hidden * x[:, :1]) ** 2).sum(1).sqrt().mean()


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


@functools.cache
def pipe() -> pd2bw_fx.Pipeline:
    torch.manual_seed(0)
    return pd2bw_fx.split(Rooting(), torch.randn(2, 4), cluster=1, costs="analytic", method="1f1b")


def engine(optimizer: Any = adam, **options: Any) -> pd2bw_fx.Engine:
    torch.manual_seed(0)
    return pipe().engine(optimizer=optimizer, microbatches_per_update=2, **options)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Returns a folder with the checkpoints of one update and of two."""
    with engine(lr_scheduler=lambda optimizer: StepLR(optimizer, 2)) as made:
        for _ in range(2):
            made.step(torch.randn(4, 4))
            made.save_checkpoint(tmp_path / "checkpoints")
    return tmp_path / "checkpoints"


def resumed(folder: Path, **options: Any) -> None:
    options.setdefault("lr_scheduler", lambda optimizer: StepLR(optimizer, 2))
    with engine(**options) as made:
        made.load_checkpoint(folder)


def test_weights_that_are_not_finite_do_not_take_the_place_of_good_ones(tmp_path: Path) -> None:
    bad = torch.randn(4, 4)
    bad[0, 0] = 0.0
    with pytest.raises(WorkerError, match=r"'first\.weight' is not finite after 2 updates"), engine() as made:
        made.step(torch.randn(4, 4))
        made.save_checkpoint(tmp_path)
        made.step(bad)
        made.save_checkpoint(tmp_path)
    assert (tmp_path / "latest").read_text() == "update_000001"

    with engine(stop_at_nan=False) as made:
        made.step(bad)
        made.save_checkpoint(tmp_path / "regardless")


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    told = r"no checkpoint can be written to .*file/in_it: Not a directory"
    with pytest.raises(InputError, match=told), engine() as made:
        made.step(torch.randn(4, 4))
        made.save_checkpoint(tmp_path / "file" / "in_it")


def test_training_goes_on_after_a_checkpoint_that_could_not_be_written(tmp_path: Path) -> None:
    scheduler = functools.partial(LambdaLR, lr_lambda=lambda step: 1 / (1 + step))
    weights = []
    for fails in (False, True):
        torch.manual_seed(1)
        with engine(lr_scheduler=scheduler) as made:
            for part in ("first", "second", "third"):
                made.step(torch.randn(4, 4))
                if fails:
                    (tmp_path / part).touch()
                    with pytest.raises(InputError, match="no checkpoint can be written"):
                        made.save_checkpoint(tmp_path / part)
            weights.append(made.state_dict())
            made.save_checkpoint(tmp_path / "good")
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


def test_a_disk_that_is_full_is_not_left_full(folder: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with pytest.raises(InputError, match=r"no checkpoint can be written to .*too large"), engine() as made:
        for _ in range(3):
            made.step(torch.randn(4, 4))
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
        try:
            made.save_checkpoint(folder)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    assert list(folder.rglob(".update_000003.partial/*")) == []
    resumed(folder)


def test_a_checkpoint_without_hashes_in_its_json_is_an_earlier_version_s(folder: Path) -> None:
    for name in ("checkpoint.json", "rank_0.json"):
        file = folder / "update_000002" / name
        data = json.loads(file.read_text())
        del data["hash"]
        file.write_text(json.dumps(data))
    resumed(folder)


def test_a_folder_that_is_no_path_leaves_the_engine_as_it_was() -> None:
    with engine() as made:
        for call in (made.save_checkpoint, made.load_checkpoint):
            with pytest.raises(InputError, match="folder is None; a path, as a text or a Path, was expected"):
                call(None)  # type: ignore[arg-type]
        made.step(torch.randn(4, 4))


def test_a_call_is_named_while_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    with engine() as made:
        monkeypatch.setattr(RankRunner, "settle", lambda runner: told.append(made.doing()))
        made.step(torch.randn(4, 4))
        made.eval(torch.randn(4, 4))
        told.append(made.doing())
        assert [*dict.fromkeys(told)] == ["at the end of the pipeline", "in an evaluation", "after 1 update"]


def test_a_name_of_the_newest_that_is_none_is_told(folder: Path) -> None:
    (folder / "latest").write_bytes(b"\xff\xfe")
    with pytest.raises(PlanMismatchError, match=r"latest cannot be read .*write the name of a checkpoint"):
        resumed(folder)


def test_copies_of_checkpoints_are_the_users(folder: Path) -> None:
    for name in ("update_000001_1", "update_best"):
        shutil.copytree(folder / "update_000001", folder / name)
    (folder / "update_notes.txt").write_text("the first is the best")

    with engine(lr_scheduler=lambda optimizer: StepLR(optimizer, 2)) as made:
        made.load_checkpoint(folder)
        made.step(torch.randn(4, 4))
        made.save_checkpoint(folder)

    left = sorted(path.name for path in folder.glob("update_*"))
    assert left == ["update_000001_1", "update_000002", "update_000003", "update_best", "update_notes.txt"]


def test_a_bit_that_has_turned_is_noticed(folder: Path) -> None:
    file = folder / "update_000002" / "rank_0.safetensors"
    data = bytearray(file.read_bytes())
    begin = 8 + struct.unpack("<Q", data[:8])[0]
    at = json.loads(data[8:begin])["weights_0/last.weight"]["data_offsets"][0]
    data[begin + at + 3] ^= 0x40
    file.write_bytes(data)

    with pytest.raises(PlanMismatchError, match=r"is damaged \(its hash.*to go on from update_000001, write"):
        resumed(folder)
    (folder / "latest").write_text("update_000001")
    resumed(folder)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("rank_0.json", lambda data: {key: data[key] for key in data if key != "options"}),
        ("checkpoint.json", lambda data: data | {"colour": "red"}),
        ("checkpoint.json", lambda data: [data]),
        ("checkpoint.json", lambda data: data | {"updates": 3}),
        ("rank_0.json", lambda data: data | {"groups": [data["groups"][0] | {"lr": 0.02}]}),
    ],
)
def test_files_that_say_something_else_are_damaged(
    folder: Path, name: str, change: Callable[[Any], Any]
) -> None:
    file = folder / "update_000002" / name
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    with pytest.raises(PlanMismatchError, match=f"{name} is damaged"):
        resumed(folder)


def test_another_scheduler_is_refused(folder: Path) -> None:
    with pytest.raises(InputError, match="of a run with StepLR, and this one has ExponentialLR"):
        resumed(folder, lr_scheduler=lambda optimizer: ExponentialLR(optimizer, 0.5))
    with pytest.raises(InputError, match="of a run with StepLR, and this one has no lr_scheduler"):
        resumed(folder, lr_scheduler=None)


def test_another_optimizer_and_a_scheduler_that_was_not_there_are_refused(tmp_path: Path) -> None:
    """Adam's options have AdamW's names, and a warm-up begun at the checkpoint's rate would go beyond."""
    with engine() as made:
        made.step(torch.randn(4, 4))
        made.save_checkpoint(tmp_path)

    with pytest.raises(InputError, match="of a run with Adam, and this one has AdamW"):
        resumed(tmp_path, optimizer=torch.optim.AdamW, lr_scheduler=None)
    with pytest.raises(InputError, match="of a run with no lr_scheduler, and this one has LinearLR"):
        resumed(tmp_path, lr_scheduler=lambda optimizer: LinearLR(optimizer, 0.1))
    resumed(tmp_path, lr_scheduler=None)


def test_whoever_may_read_other_files_may_read_checkpoints(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    mode = stat.S_IMODE((tmp_path / "other").stat().st_mode)
    for file in (folder / "update_000002").iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == mode, file


def test_options_that_are_none_are_told() -> None:
    with pytest.raises(InputError, match=r"parameter_options gave None for .*; options of the optimizer"):
        engine(parameter_options=lambda name, parameter: None)


def test_an_engine_goes_on_where_there_is_no_checkpoint(tmp_path: Path) -> None:
    with engine() as made:
        with pytest.raises(InputError, match="holds no checkpoint"):
            made.load_checkpoint(tmp_path)
        assert made.step(torch.randn(4, 4)) > 0
        assert made.updates == 1


def test_a_pointer_to_no_checkpoint_is_named_also_by_later_calls(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("update_9")
    named = "latest names 'update_9', which .* does not hold; write the name"

    with pytest.raises(WorkerError, match=f"torn; make a new one: rank 0 .*{named}"), engine() as made:
        with pytest.raises(PlanMismatchError, match=named):
            made.load_checkpoint(tmp_path)
        made.step(torch.randn(4, 4))
