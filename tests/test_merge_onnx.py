"""ONNX folders of whole models: merged, annotated, run in processes; held against the original model."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import transformers
from torch import Tensor, nn

from pd2bw_fx.errors import ExportError, InputError, PlanMismatchError
from pd2bw_fx.models import MODELS, build
from pd2bw_fx.passes.export_onnx import (
    check_annotation,
    export_onnx,
    merge_onnx,
    run_onnx,
    run_onnx_processes,
)
from tests.onnx_stages import Cut, cut, run
from tests.slow import slow


@pytest.fixture(scope="module")
def gpt() -> Cut:
    torch.manual_seed(0)
    model = build("gpt")
    return cut(model, model.example_inputs(), {}, 3)  # type: ignore[operator]


@pytest.fixture(scope="module")
def folder(gpt: Cut, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("onnx") / "gpt"
    gpt.export(path, form="both")
    return path


@pytest.mark.parametrize("size", [1, 6])
def test_the_merged_model_gives_the_original_models_loss(gpt: Cut, folder: Path, size: int) -> None:
    model = merge_onnx(folder)

    onnx.checker.check_model(model, full_check=True)
    found = run(model, gpt.batch(size), ["loss"])
    np.testing.assert_allclose(found["loss"], gpt.eager(gpt.batch(size))["loss"], rtol=1e-5)


def test_the_merged_model_has_each_parameter_once_and_takes_the_models_inputs(
    gpt: Cut, folder: Path, tmp_path: Path
) -> None:
    merge_onnx(folder, tmp_path / "whole.onnx")

    model = onnx.load(tmp_path / "whole.onnx")
    held = [tensor.name for tensor in model.graph.initializer]
    parameters = dict(gpt.model.named_parameters())
    assert len(held) == len(set(held))
    assert sorted(name for name in held if name in parameters) == sorted(parameters)
    assert {value.name for value in model.graph.input} == gpt.example.keys()


def test_the_annotated_model_runs_and_puts_each_node_on_a_stage(gpt: Cut, folder: Path) -> None:
    model = onnx.load(folder / "model.onnx")
    stages = [node.device_configurations[0].pipeline_stage for node in model.graph.node]

    assert model.ir_version == 11
    assert list(model.configuration[0].device) == ["cpu:0", "cpu:1", "cpu:2"]
    assert stages == sorted(stages)
    assert set(stages) == {0, 1, 2}
    assert check_annotation(folder / "model.onnx") == 3
    found = run(folder / "model.onnx", gpt.batch(5), ["loss"])
    np.testing.assert_allclose(found["loss"], gpt.eager(gpt.batch(5))["loss"], rtol=1e-5)


def test_nodes_know_the_module_and_the_line_that_they_come_from(gpt: Cut, folder: Path) -> None:
    nodes = [
        {entry.key: entry.value for entry in node.metadata_props}
        for stage in range(3)
        for node in onnx.load(folder / f"stage_{stage}.onnx").graph.node
    ]

    modules = dict(gpt.model.named_modules())
    assert all(notes["pd2bw_fx.module"] in modules for notes in nodes)
    lines = [notes["pd2bw_fx.source"] for notes in nodes if "pd2bw_fx.source" in notes]
    assert len(lines) > 0.9 * len(nodes)
    assert {line.split(":")[0] for line in lines} <= {"gpt.py", "text.py"}
    assert not any("stack_trace" in key for notes in nodes for key in notes)


def dangling(model: onnx.ModelProto) -> None:
    model.graph.node[4].device_configurations[0].configuration_id = "elsewhere"


def negative(model: onnx.ModelProto) -> None:
    model.graph.node[4].device_configurations[0].pipeline_stage = -1


def too_large(model: onnx.ModelProto) -> None:
    model.graph.node[-1].device_configurations[0].pipeline_stage = 3


def missing(model: onnx.ModelProto) -> None:
    del model.graph.node[4].device_configurations[:]


def backwards(model: onnx.ModelProto) -> None:
    model.graph.node[0].device_configurations[0].pipeline_stage = 2


def unconfigured(model: onnx.ModelProto) -> None:
    del model.configuration[:]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (dangling, "names the configuration 'elsewhere', which the model does not have"),
        (negative, "is in stage -1, and the configuration has stages 0 to 2"),
        (too_large, "is in stage 3, and the configuration has stages 0 to 2"),
        (missing, "has no stage; every node has exactly one"),
        (backwards, "which stage 2 makes; values flow to later stages only"),
        (unconfigured, "has no device configuration"),
    ],
)
def test_an_annotation_that_onnx_accepts_and_that_makes_no_sense_is_refused(
    folder: Path, tmp_path: Path, spoil: Any, said: str
) -> None:
    model = onnx.load(folder / "model.onnx")
    spoil(model)
    onnx.checker.check_model(model)  # sees nothing wrong
    onnx.save(model, tmp_path / "spoilt.onnx")

    with pytest.raises(ExportError, match=said):
        check_annotation(tmp_path / "spoilt.onnx")


def test_one_process_a_stage_puts_microbatches_together_where_outputs_have_a_batch_axis(
    tmp_path: Path, folder: Path, gpt: Cut
) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    two = cut(net, (torch.randn(4, 4),), {}, 2)
    two.export(tmp_path / "onnx")
    x = torch.randn(7, 4)

    found = run_onnx_processes(tmp_path / "onnx", {"input": x}, num_microbatches=3)

    np.testing.assert_allclose(found["output"], net(x).detach().numpy(), rtol=1e-4, atol=1e-6)
    with pytest.raises(InputError, match="output 'loss' has no batch axis"):
        run_onnx_processes(folder, gpt.batch(2), num_microbatches=2)


def test_an_annotated_folder_runs_and_says_that_it_has_no_stages(gpt: Cut, tmp_path: Path) -> None:
    manifest = gpt.export(tmp_path / "onnx", form="annotated")

    assert manifest["stages"] == []
    assert manifest["annotated"]["largest_differences"]["loss"] < 1e-5
    assert sorted(path.name for path in (tmp_path / "onnx").iterdir()) == ["manifest.json", "model.onnx"]
    found = run_onnx(tmp_path / "onnx", gpt.batch(2))
    np.testing.assert_allclose(found["loss"], gpt.eager(gpt.batch(2))["loss"], rtol=1e-5)
    with pytest.raises(ExportError, match="holds no stages"):
        merge_onnx(tmp_path / "onnx")


def test_weights_beside_the_stages_are_in_the_merged_model(gpt: Cut, tmp_path: Path) -> None:
    manifest = gpt.export(tmp_path / "onnx", form="both", external_above_bytes=1000)

    assert {"stage_0.onnx.data", "model.onnx.data"} <= {path.name for path in (tmp_path / "onnx").iterdir()}
    assert manifest["annotated"]["num_stages"] == 3
    found = run(merge_onnx(tmp_path / "onnx"), gpt.batch(2), ["loss"])
    np.testing.assert_allclose(found["loss"], gpt.eager(gpt.batch(2))["loss"], rtol=1e-5)


class Pair(nn.Module):
    """Outputs and loss in a tuple, as many small GPTs return them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.second(self.first(x).relu())
        return logits, nn.functional.cross_entropy(logits, targets)


def test_a_loss_in_a_tuple_is_exported_as_what_it_is(tmp_path: Path) -> None:
    model, batch = Pair(), (torch.randn(4, 4), torch.tensor([0, 1, 2, 0]))

    found = cut(model, batch, {}, 2)
    found.export(tmp_path / "onnx")

    made = run_onnx(tmp_path / "onnx", dict(zip(("x", "targets"), batch, strict=True)))
    logits, loss = model(*batch)
    np.testing.assert_allclose(made["loss"], loss.detach(), rtol=1e-5)
    np.testing.assert_allclose(made["output_0"], logits.detach(), rtol=1e-5, atol=1e-6)


def test_a_folder_with_an_altered_stage_is_not_merged(folder: Path, tmp_path: Path) -> None:
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "stage_1.onnx").write_bytes(b"")

    with pytest.raises(PlanMismatchError, match=r"stage_1\.onnx is not the file.*export it again"):
        merge_onnx(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 2}, "has schema 2, and this version reads 1"),
        ({"files": {"../elsewhere": "0"}}, "lists files of another folder"),
        ({"stages": [{"stage": 0, "file": "other.onnx"}]}, "names 'other.onnx', which is no file of it"),
    ],
)
def test_a_manifest_that_points_elsewhere_is_refused(
    folder: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps(manifest | change))

    with pytest.raises(PlanMismatchError, match=message):
        run_onnx(tmp_path, {})


def test_weights_that_were_trained_since_are_what_is_exported(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    two = cut(net, (torch.randn(4, 4),), {}, 2)
    with torch.no_grad():
        two.modules[0].get_parameter("0.weight").mul_(3)
    before = {name: value.clone() for name, value in net.state_dict().items()}

    two.export(tmp_path / "onnx")

    for name, value in net.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    with torch.no_grad():
        net[0].weight.mul_(3)
    x = two.batch(3)
    np.testing.assert_allclose(
        run_onnx(tmp_path / "onnx", x)["output"], two.eager(x)["output"], rtol=1e-4, atol=1e-6
    )


def test_a_form_that_is_unknown_or_lacks_the_plan_is_refused(gpt: Cut, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="form is 'one'"):
        gpt.export(tmp_path / "onnx", form="one")
    with pytest.raises(InputError, match="form='annotated' names the devices"):
        export_onnx(gpt.programs, gpt.modules, gpt.example, tmp_path / "onnx", form="annotated")


@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"gpt"}))
def test_each_of_our_models_is_exported_as_the_original_computes(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = build(name)
    two = cut(model, model.example_inputs(), {}, 2)  # type: ignore[operator]

    manifest = two.export(tmp_path / "onnx")

    assert manifest["compared_with"] == "the original model"
    assert len(set(manifest["batch_sizes_checked"])) == 2
    inputs = {entry["name"]: two.example[entry["name"]] for entry in manifest["inputs"]}
    found, expected = run_onnx(tmp_path / "onnx", inputs), two.eager(two.example)
    assert found.keys() == expected.keys()
    for output, value in expected.items():
        np.testing.assert_allclose(found[output], value, rtol=1e-4, atol=1e-5)


def hugging_face(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    ids = torch.randint(0, 50, (3, 6))
    if name == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
        )
        return transformers.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}
    config = transformers.T5Config(
        vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config), {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("name", ["t5", *slow(["gpt2"])])
def test_hugging_face_models_are_exported_and_merged_as_the_original_computes(
    name: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, kwargs = hugging_face(name)
    two = cut(model, (), kwargs, 2)

    manifest = two.export(tmp_path / "onnx")

    merged = merge_onnx(tmp_path / "onnx")
    names = [output.name for output in merged.graph.output]
    assert names == [entry["name"] for entry in manifest["outputs"]]
    model.eval()
    with torch.no_grad():
        expected = model(**kwargs)
    given = {entry["name"]: two.example[entry["name"]] for entry in manifest["inputs"]}
    found = run(merged, given, names)
    np.testing.assert_allclose(found["loss"], expected.loss.numpy(), rtol=1e-5)
    np.testing.assert_allclose(found["logits"], expected.logits.numpy(), rtol=1e-4, atol=1e-5)
