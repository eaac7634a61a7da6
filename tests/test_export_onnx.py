"""Stages as ONNX files: they compute what the eager model computes, or they are not there."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from pd2bw_fx.errors import ExportError, InputError, PlanMismatchError
from pd2bw_fx.passes.export_onnx import export_onnx, run_onnx
from pd2bw_fx.stage import Port, StageProgram
from tests.three_stages import (
    TIME,
    VOCABULARY,
    WIDTH,
    Block,
    Embed,
    Head,
    Whole,
    batch_of,
    programs,
    spec,
    whole,
)


@pytest.fixture(scope="module")
def model() -> Whole:
    return whole()


@pytest.fixture(scope="module")
def exported(model: Whole, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("onnx") / "model"
    export_onnx(programs(), list(model.stages), batch_of(2), folder)
    return folder


def eager(model: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    model.eval()
    with torch.no_grad():
        logits, loss = model(**inputs)
    model.train()
    return {"logits": logits.numpy(), "loss": loss.numpy()}


@pytest.mark.parametrize("batch_size", [1, 2, 3, 7])
def test_the_files_one_after_another_give_the_eager_models_outputs(
    model: Whole, exported: Path, batch_size: int
) -> None:
    inputs = batch_of(batch_size, seed=5)

    found = run_onnx(exported, inputs)

    expected = eager(model, inputs)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=2e-5, atol=2e-6)


def test_each_file_is_a_valid_model_with_the_original_parameters_as_initialisers(
    model: Whole, exported: Path
) -> None:
    for stage, program in enumerate(programs()):
        file = onnx.load(exported / f"stage_{stage}.onnx")
        onnx.checker.check_model(file, full_check=True)

        held = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in file.graph.initializer}
        state = model.stages[stage].state_dict()
        for name in program.parameters:
            np.testing.assert_array_equal(held[name], state[name].numpy())
        assert [opset.version for opset in file.opset_import if opset.domain == ""] == [20]


def test_a_boundary_has_the_same_name_on_both_sides_and_a_batch_axis_by_name(exported: Path) -> None:
    def ports(file: onnx.ModelProto, side: str) -> dict[str, list[int | str]]:
        return {
            value.name: [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]
            for value in getattr(file.graph, side)
        }

    first, second, third = (onnx.load(exported / f"stage_{stage}.onnx") for stage in range(3))

    assert ports(first, "input") == {"tokens": ["batch", TIME]}
    assert ports(first, "output") == {"embedding": ["batch", TIME, WIDTH], "gt": ["batch", TIME]}
    assert ports(second, "input") == {"embedding": ["batch", TIME, WIDTH]}
    assert ports(third, "input").keys() == {"add", "gt", "labels"}
    assert ports(third, "output") == {"logits": ["batch", TIME, VOCABULARY], "loss": []}


def test_the_manifest_says_what_connects_to_what_and_how_exact_it_is(exported: Path) -> None:
    manifest = json.loads((exported / "manifest.json").read_text())

    assert [(entry["name"], entry["tensor"]) for entry in manifest["outputs"]] == [
        ("logits", "logits"),
        ("loss", "loss"),
    ]
    mask = manifest["stages"][0]["outputs"][1]
    assert mask == {
        "tensor": "gt", "dtype": "bool", "shape": ["batch", TIME], "targets": [2], "model_output": None,
    }  # fmt: skip
    assert [entry["source"] for entry in manifest["stages"][2]["inputs"]] == [1, 0, None]
    assert manifest["batch_sizes_checked"] == [2, 5]
    assert manifest["largest_differences"].keys() == {"embedding", "gt", "add", "logits", "loss"}
    assert all(difference < 1e-5 for difference in manifest["largest_differences"].values())
    assert manifest["files"].keys() == {"stage_0.onnx", "stage_1.onnx", "stage_2.onnx"}


def test_onnxruntime_alone_runs_a_stage(exported: Path) -> None:
    session = onnxruntime.InferenceSession(str(exported / "stage_0.onnx"), providers=["CPUExecutionProvider"])

    embedding, mask = session.run(["embedding", "gt"], {"tokens": np.full((4, TIME), 3, dtype=np.int64)})

    assert embedding.shape == (4, TIME, WIDTH)
    assert mask.all()


def test_exporting_leaves_the_modules_in_the_mode_they_were_in(tmp_path: Path) -> None:
    torch.manual_seed(0)
    modules: list[nn.Module] = [Embed(), Block(), Head()]
    modules[1].norm.eval()  # type: ignore[operator, union-attr]
    before = {name: value.clone() for name, value in modules[1].state_dict().items()}

    export_onnx(programs(), modules, batch_of(2), tmp_path / "onnx")

    assert [module.training for module in modules] == [True, True, True]
    assert not modules[1].norm.training  # type: ignore[union-attr]
    for name, value in modules[1].state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


def test_a_float64_model_is_exported_as_it_is(tmp_path: Path) -> None:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    row = spec("batch", 4, dtype=torch.float64)
    names = ("0.weight", "0.bias", "2.weight", "2.bias")
    output = Port("y", "y", spec("batch", 2, dtype=torch.float64), model_output="y")
    program = StageProgram(0, "Sequential", "", (Port("x", "x", row),), (output,), names, (), {})
    inputs = {"x": torch.randn(3, 4, dtype=torch.float64)}

    export_onnx([program], [module], inputs, tmp_path / "onnx")

    found = run_onnx(tmp_path / "onnx", inputs)["y"]
    assert found.dtype == np.float64
    with torch.no_grad():
        np.testing.assert_allclose(found, module(inputs["x"]).numpy(), rtol=1e-12, atol=1e-14)


def test_what_onnxruntime_cannot_run_is_refused_in_its_own_words(tmp_path: Path) -> None:
    # onnxruntime computes GELU in float32 only.
    stages = list(Whole().double().stages)

    with pytest.raises(ExportError, match=r"cannot run stage 1: .*implementation for Erf.*model\.float"):
        export_onnx(programs(torch.float64), stages, batch_of(2), tmp_path / "onnx")

    assert list(tmp_path.iterdir()) == []


def test_a_single_sample_as_example_still_gives_a_dynamic_batch(tmp_path: Path, model: Whole) -> None:
    manifest = export_onnx(programs(), list(model.stages), batch_of(1), tmp_path / "onnx")

    inputs = batch_of(4, seed=3)
    assert manifest["batch_sizes_checked"] == [1, 3]
    assert manifest == json.loads((tmp_path / "onnx" / "manifest.json").read_text())
    found, expected = run_onnx(tmp_path / "onnx", inputs), eager(model, inputs)
    np.testing.assert_allclose(found["logits"], expected["logits"], rtol=2e-5, atol=2e-6)


def test_a_model_of_one_size_is_exported_and_checked_at_that_size(tmp_path: Path, model: Whole) -> None:
    manifest = export_onnx(programs(batch=2), list(model.stages), batch_of(2), tmp_path / "onnx")

    assert manifest["batch_sizes_checked"] == [2]
    assert manifest["inputs"][0]["shape"] == [2, TIME]


def test_large_parameters_stand_in_a_file_of_their_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = nn.Linear(64, 64)
    x = spec("batch", 64)
    program = StageProgram(
        0, "Linear", "", (Port("x", "x", x),), (Port("linear", "y", x, model_output="y"),),
        ("weight", "bias"), (), {},
    )  # fmt: skip
    inputs = {"x": torch.randn(2, 64)}

    manifest = export_onnx([program], [module], inputs, tmp_path / "onnx", external_above_bytes=10_000)

    assert (tmp_path / "onnx" / "stage_0.onnx").stat().st_size < 10_000
    assert (tmp_path / "onnx" / "stage_0.onnx.data").stat().st_size >= 64 * 64 * 4
    assert manifest["stages"][0]["parameters"] == ["bias", "weight"]
    with torch.no_grad():
        expected = module(inputs["x"]).numpy()
    np.testing.assert_allclose(run_onnx(tmp_path / "onnx", inputs)["y"], expected, rtol=1e-4, atol=1e-5)


class Tied(nn.Module):
    """Embedding and head are one tensor with two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens))


def test_a_tied_parameter_is_stored_once_under_its_first_name(tmp_path: Path) -> None:
    logits = Port("linear", "y", spec("batch", TIME, VOCABULARY), model_output="logits")
    tokens = Port("tokens", "tokens", spec("batch", TIME, dtype=torch.int64))
    program = StageProgram(
        0, "Tied", "", (tokens,), (logits,), ("embed.weight",), (), {"head.weight": "embed.weight"}
    )

    export_onnx([program], [Tied()], {"tokens": batch_of(2)["tokens"]}, tmp_path / "onnx")

    file = onnx.load(tmp_path / "onnx" / "stage_0.onnx")
    assert [tensor.name for tensor in file.graph.initializer if len(tensor.dims) == 2] == ["embed.weight"]


class Awkward(nn.Module):
    """Returns its input, a parameter and one tensor twice; one input is called like its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(3.0))

    def forward(self, weight: Tensor, relu: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        doubled = torch.relu(weight) * self.weight
        return weight, self.weight * 1.0, doubled, doubled


def test_names_that_would_collide_are_made_unique(tmp_path: Path) -> None:
    row, vector = spec("batch", 3), spec(3)
    program = StageProgram(
        0, "Awkward", "", (Port("weight", "a", row), Port("relu", "b", row)),
        (
            Port("weight", "a", row, model_output="same"),
            Port("mul", "c", vector, model_output="parameter"),
            Port("mul_1", "d", row, model_output="relu"),
            Port("alias", "e", row, model_output="twice"),
        ),
        ("weight",), (), {},
    )  # fmt: skip
    inputs = {"weight": torch.randn(2, 3), "relu": torch.randn(2, 3)}

    export_onnx([program], [Awkward()], inputs, tmp_path / "onnx")

    found = run_onnx(tmp_path / "onnx", inputs)
    expected = torch.relu(inputs["weight"]) * torch.arange(3.0)
    np.testing.assert_allclose(found["same"], inputs["weight"].numpy())
    np.testing.assert_allclose(found["parameter"], [0, 1, 2])
    np.testing.assert_allclose(found["relu"], expected.numpy())
    np.testing.assert_allclose(found["twice"], expected.numpy())


def test_running_needs_every_input_by_name_and_files_as_they_were_written(
    exported: Path, tmp_path: Path
) -> None:
    inputs = batch_of(2)
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in exported.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    (copy / "stage_1.onnx").write_bytes(b"")

    with pytest.raises(InputError, match="input 'labels' is missing"):
        run_onnx(exported, {"tokens": inputs["tokens"]})
    with pytest.raises(InputError, match="'mask' is no input of the model"):
        run_onnx(exported, inputs | {"mask": inputs["tokens"]})
    with pytest.raises(InputError, match=r"'tokens' is int32 \(2, \d+\); .* takes int64 \(batch, \d+\)"):
        run_onnx(exported, inputs | {"tokens": inputs["tokens"].int()})
    with pytest.raises(InputError, match=r"'tokens' is int64 \(2,\); .* takes int64 \(batch, \d+\)"):
        run_onnx(exported, inputs | {"tokens": inputs["tokens"][:, 0]})
    with pytest.raises(PlanMismatchError, match=r"stage_1\.onnx"):
        run_onnx(copy, inputs)
