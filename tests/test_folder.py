"""Folders that a pipeline was saved in, read back as they are or after a hand has been at them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import pd2bw_fx
from pd2bw_fx.models import build


def test_a_folder_with_an_altered_stage(tmp_path: Path) -> None:
    folder = tmp_path / "mlp"
    pd2bw_fx.split(build("mlp"), cluster=2, costs="analytic").save(folder)
    source = (folder / "stage_0.py").read_text()
    (folder / "stage_0.py").write_text(source + "\n# edited\n")

    with pytest.raises(pd2bw_fx.PlanMismatchError, match=r"stage_0\.py"):
        pd2bw_fx.load(folder)

    assert pd2bw_fx.load(folder, edited=True).programs[0].source.endswith("# edited\n")


@pytest.mark.parametrize(
    ("name", "was", "edit"),
    [
        ("stages", '"parameters"', '"parametres"'),
        ("batch", '"dtype": "', '"dtype": "no_'),
        ("cluster", '"devices": [', '"devices": [1, '),
        ("schedule", '"method"', '"methods"'),
        ("costs", "{", ""),
    ],
)
def test_a_folder_edited_so_that_it_cannot_be_read(tmp_path: Path, name: str, was: str, edit: str) -> None:
    folder = tmp_path / "mlp"
    pd2bw_fx.split(build("mlp"), cluster=2, costs="analytic").save(folder)
    text = (folder / f"{name}.json").read_text()
    assert was in text
    (folder / f"{name}.json").write_text(text.replace(was, edit, 1))

    with pytest.raises(pd2bw_fx.PlanMismatchError, match=rf"{name}\.json is (not as|no valid JSON)"):
        pd2bw_fx.load(folder, edited=True)


def test_a_folder_with_a_file_missing(tmp_path: Path) -> None:
    folder = tmp_path / "mlp"
    pd2bw_fx.split(build("mlp"), cluster=2, costs="analytic").save(folder)
    (folder / "stage_1.safetensors").unlink()

    with pytest.raises(pd2bw_fx.PlanMismatchError, match=r"stage_1\.safetensors is missing"):
        pd2bw_fx.load(folder)


def test_a_folder_with_a_stage_that_does_more_than_compute(tmp_path: Path) -> None:
    folder = tmp_path / "mlp"
    pd2bw_fx.split(build("mlp"), cluster=2, costs="analytic").save(folder)
    source = (folder / "stage_0.py").read_text()
    (folder / "stage_0.py").write_text(source.replace("import torch\n", "import torch\nimport os\n", 1))

    with pytest.raises(pd2bw_fx.PlanMismatchError, match="os"):
        _ = pd2bw_fx.load(folder, edited=True).stages[0].module


def test_an_edited_stage_that_is_no_python_is_named_with_its_line(tmp_path: Path) -> None:
    pd2bw_fx.split(build("mlp"), cluster=2, costs="analytic", check=False).save(tmp_path / "saved")
    stage = tmp_path / "saved" / "stage_1.py"
    lines = stage.read_text().splitlines()
    line = next(at for at, text in enumerate(lines) if "return" in text)
    lines[line] = lines[line].replace("return", "retrun")
    stage.write_text("\n".join(lines))

    with pytest.raises(pd2bw_fx.PlanMismatchError, match=rf"stage_1\.py, line {line + 1}: invalid syntax"):
        pd2bw_fx.load(tmp_path / "saved", edited=True)


@pytest.mark.parametrize(
    ("was", "edit", "message"),
    [
        ("from torch import Tensor, nn\n", "from torch import Tensor\n", r"stage_1\.py, line \d+: NameError"),
        ("return ", "return 1.0, ", r"stage_1\.py returns 2 values; expected were loss"),
        ("nn.Linear(", "nn.Linear('wide', ", r"stage_1\.py, line \d+: TypeError"),
    ],
)
def test_an_edited_stage_that_does_not_run_is_named(
    tmp_path: Path, was: str, edit: str, message: str
) -> None:
    model = build("mlp")
    pd2bw_fx.split(model, cluster=2, num_stages=2, costs="analytic", check=False).save(tmp_path / "saved")
    stage = tmp_path / "saved" / "stage_1.py"
    head, found, rest = stage.read_text().partition(was)
    assert found
    stage.write_text(head + edit + rest)

    with pytest.raises(pd2bw_fx.PlanMismatchError, match=message):
        pd2bw_fx.load(tmp_path / "saved", edited=True).verify(model)


def test_a_plan_that_was_edited_beside_its_stages_is_sent_to_split(tmp_path: Path) -> None:
    pd2bw_fx.split(build("mlp"), cluster=2, num_stages=2, costs="analytic", check=False).save(
        tmp_path / "saved"
    )
    plan = tmp_path / "saved" / "plan.json"
    data = json.loads(plan.read_text())
    data["stages"][0]["operators"].append(data["stages"][1]["operators"].pop(0))
    plan.write_text(json.dumps(data))

    with pytest.raises(pd2bw_fx.PlanMismatchError, match=r"plan\.json was edited, and the stages beside it"):
        pd2bw_fx.load(tmp_path / "saved", edited=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages": []}, "has no stages"),
        ({"microbatches_per_update": 10**9}, "1000000000 microbatches an update"),
    ],
)
def test_plans_that_cannot_be_priced_are_refused(changes: dict[str, object], message: str) -> None:
    pipe = pd2bw_fx.split(build("mlp"), cluster=2, num_stages=2, costs="analytic", check=False)
    with pytest.raises(pd2bw_fx.PlanMismatchError, match=message):
        pipe.check_plan(pd2bw_fx.Plan.from_json(pipe.plan.to_json() | changes))
