"""Folders that a pipeline was saved in, read back as they are or after a hand has been at them."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

import pd2bw_fx
from pd2bw_fx.models import build
from tests.stages import split_of_our_own


@pytest.fixture
def folder(mlp_folder: Path, tmp_path: Path) -> Path:
    """Returns the folder of a pipeline, which may be changed."""
    return shutil.copytree(mlp_folder, tmp_path / "mlp")


def test_a_folder_with_an_altered_stage(folder: Path) -> None:
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
def test_a_folder_edited_so_that_it_cannot_be_read(folder: Path, name: str, was: str, edit: str) -> None:
    text = (folder / f"{name}.json").read_text()
    assert was in text
    (folder / f"{name}.json").write_text(text.replace(was, edit, 1))

    with pytest.raises(pd2bw_fx.PlanMismatchError, match=rf"{name}\.json is (not as|no valid JSON)"):
        pd2bw_fx.load(folder, edited=True)


def test_a_folder_with_a_file_missing(folder: Path) -> None:
    (folder / "stage_1.safetensors").unlink()

    with pytest.raises(pd2bw_fx.PlanMismatchError, match=r"stage_1\.safetensors is missing"):
        pd2bw_fx.load(folder)


def test_a_folder_with_a_stage_that_does_more_than_compute(folder: Path) -> None:
    source = (folder / "stage_0.py").read_text()
    (folder / "stage_0.py").write_text(source.replace("import torch\n", "import torch\nimport os\n", 1))

    with pytest.raises(pd2bw_fx.PlanMismatchError, match="os"):
        _ = pd2bw_fx.load(folder, edited=True).stages[0].module


def test_an_edited_stage_that_is_no_python_is_named_with_its_line(folder: Path) -> None:
    stage = folder / "stage_1.py"
    lines = stage.read_text().splitlines()
    line = next(at for at, text in enumerate(lines) if text.strip().startswith("return "))
    lines[line] = lines[line].replace("return", "retrun")
    stage.write_text("\n".join(lines))

    with pytest.raises(pd2bw_fx.PlanMismatchError, match=rf"stage_1\.py, line {line + 1}: invalid syntax"):
        pd2bw_fx.load(folder, edited=True)


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
    split_of_our_own("mlp", cluster=2, num_stages=2).save(tmp_path / "saved")
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
    pipe = split_of_our_own("mlp", cluster=2, num_stages=2)
    with pytest.raises(pd2bw_fx.PlanMismatchError, match=message):
        pipe.check_plan(pd2bw_fx.Plan.from_json(pipe.plan.to_json() | changes))


class Shared(nn.Module):
    """Words are tied to the head, the first layer is the model's own, and the others are one."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(8, 8)
        shared = nn.Linear(8, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8), shared, shared, shared])
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.words(tokens)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return F.cross_entropy(self.head(hidden), tokens)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Shared, Path]:
    """The first use of the shared layer is on stage 0, the others are on stage 1."""
    torch.manual_seed(0)
    model, tokens = Shared(), torch.randint(8, (4,))
    constraints = pd2bw_fx.Constraints(stage_of={"words": 0, "layers.1": 0, "layers.2": 1, "head": 1})
    given: dict[str, Any] = {"costs": "analytic", "constraints": constraints}
    folder = tmp_path_factory.mktemp("shared") / "saved"
    pd2bw_fx.split(model, tokens, cluster=2, num_stages=2, **given).save(folder)
    return model, folder


def stage_at(folder: Path, stage: int) -> nn.Module:
    """Builds a stage from its file, as a reader of the folder would."""
    path = folder / f"stage_{stage}.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    built: nn.Module = getattr(module, f"SharedStage{stage}")()
    return built


@pytest.mark.parametrize("stage", [0, 1])
def test_the_file_beside_a_stage_is_the_state_dict_of_its_class(
    shared: tuple[Shared, Path], stage: int
) -> None:
    model, folder = shared
    built = stage_at(folder, stage)

    built.load_state_dict(load_file(folder / f"stage_{stage}.safetensors"))

    for name, tensor in built.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name
    loaded = pd2bw_fx.load(folder).state_dict()
    assert loaded.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in model.state_dict().items())


def test_a_module_that_a_stage_has_twice_is_one_though_its_first_name_is_another_stages(
    shared: tuple[Shared, Path],
) -> None:
    built = stage_at(shared[1], 1)
    layers = [built.get_submodule(name) for name in ("layers.2", "layers.3")]

    assert layers[0].weight is layers[1].weight
    assert layers[0].bias is layers[1].bias
    source = (shared[1] / "stage_1.py").read_text()
    assert f"Holds {sum(parameter.numel() for parameter in built.parameters())} parameters" in source
    assert "    layers.2.bias is tied to layers.1.bias, held by stage 0 too." in source
    assert "    layers.3.bias is tied to layers.2.bias." in source


@pytest.mark.parametrize("names", [("layers.3.bias",), ("layers.2.bias", "layers.3.bias")])
def test_weights_written_by_hand_are_loaded_and_unlike_ones_of_one_parameter_are_not(
    shared: tuple[Shared, Path], names: tuple[str, ...], tmp_path: Path
) -> None:
    folder = tmp_path / "saved"
    pd2bw_fx.load(shared[1]).save(folder)
    changes = {name: torch.ones(8) for name in names}
    weights = [load_file(folder / f"stage_{stage}.safetensors") for stage in (0, 1)]

    save_file(weights[1] | changes, folder / "stage_1.safetensors")
    with pytest.raises(pd2bw_fx.PlanMismatchError, match=r"values for 'layers\..* of one parameter"):
        pd2bw_fx.load(folder, edited=True)

    both = {name: torch.ones(8) for name in ("layers.2.bias", "layers.3.bias")}
    save_file(weights[0] | {"layers.1.bias": torch.ones(8)}, folder / "stage_0.safetensors")
    save_file(weights[1] | both, folder / "stage_1.safetensors")
    assert (pd2bw_fx.load(folder, edited=True).state_dict()["layers.3.bias"] == 1).all()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            {"layers.1.bias": torch.ones(9)},
            r"has 'layers\.1\.bias' as torch\.float32 \(9,\); expected: .* \(8,\)",
        ),
        (
            {"layers.1.bias": torch.ones(8).bfloat16()},
            r".* as torch\.bfloat16 \(8,\); expected: torch\.float32",
        ),
        ({"layers.1.bais": torch.ones(8)}, r"has 'layers\.1\.bais', which is none of the stage's"),
        ({"layers.1.bias": None}, r"has no 'layers\.1\.bias'; write every tensor"),
    ],
)
def test_weights_written_by_hand_that_do_not_fit_are_named(
    shared: tuple[Shared, Path], change: dict[str, Tensor | None], told: str, tmp_path: Path
) -> None:
    pd2bw_fx.load(shared[1]).save(tmp_path / "saved")
    file = tmp_path / "saved" / "stage_0.safetensors"
    edited = {**load_file(file), **change}
    save_file({name: tensor for name, tensor in edited.items() if tensor is not None}, file)

    with pytest.raises(pd2bw_fx.PlanMismatchError, match=rf"stage_0\.safetensors {told}"):
        pd2bw_fx.load(tmp_path / "saved", edited=True)


def test_a_tied_weight_may_be_no_number(shared: tuple[Shared, Path]) -> None:
    pipe, none = pd2bw_fx.load(shared[1]), torch.full((8, 8), torch.nan)

    pipe.load_state_dict({"words.weight": none, "head.weight": none.clone()})

    assert pipe.state_dict()["head.weight"].isnan().all()


def test_what_is_no_tensor_of_a_state_dict_stays_the_models(shared: tuple[Shared, Path]) -> None:
    pipe = pd2bw_fx.load(shared[1])

    pipe.load_state_dict({**pipe.state_dict(), "layers.0._extra_state": {"epoch": 3}})  # type: ignore[dict-item]

    assert "layers.0._extra_state" not in pipe.state_dict()
