"""The command line: what it prints, what it writes, and its exit codes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import pd2bw_fx
from pd2bw_fx.cli import main
from pd2bw_fx.files import MANIFEST
from pd2bw_fx.models import build

PACKAGE = Path(pd2bw_fx.__file__).parent


def test_split_saves_a_folder_that_the_other_commands_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["split", "mlp", "--cluster", "2", "-o", str(tmp_path / "mlp")]) == 0
    assert "bottleneck" in capsys.readouterr().out

    assert main(["plan", str(tmp_path / "mlp"), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)

    assert len(plan["stages"]) == 2
    assert plan["gap"] <= 1e-4 * (1 + 1e-9)


def test_a_model_of_ours_has_the_same_fresh_weights_in_every_command(tmp_path: Path) -> None:
    for name in ("first", "second"):
        torch.rand(1)
        assert main(["split", "mlp", "--cluster", "2", "-o", str(tmp_path / name)]) == 0

    first, second = (pd2bw_fx.load(tmp_path / name).state_dict() for name in ("first", "second"))

    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_plan_places_a_published_workload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chain = {
        "maxSizePerFPGA": 100,
        "maxFPGAs": 2,
        "maxCPUs": 0,
        "nodes": [
            {"id": n, "supportedOnFpga": 1, "cpuLatency": 9, "fpgaLatency": 2, "isBackwardNode": 0, "size": 1}
            for n in range(4)
        ],
        "edges": [{"sourceId": n, "destId": n + 1, "cost": 0} for n in range(3)],
    }
    (tmp_path / "chain.json").write_text(json.dumps(chain))

    assert main(["plan", "--workload", str(tmp_path / "chain.json"), "--accelerators-only", "--json"]) == 0

    placement = json.loads(capsys.readouterr().out)
    assert placement["objective"] == pytest.approx(4.0)
    assert placement["gap"] <= 1e-5
    assert placement["assignment"]["0"] != placement["assignment"]["3"]


STEPS = """
import contextlib, io, json, sys

HEAVY = {"torch", "numpy", "networkx", "pulp", "highspy", "rich", "matplotlib", "sympy", "onnx"}
imported = []
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        with contextlib.suppress(SystemExit):
            if words is None:
                import pd2bw_fx
            else:
                from pd2bw_fx.cli import main
                main(words)
    imported.append(sorted(HEAVY & sys.modules.keys()))
print(json.dumps(imported))
"""


def test_help_mistakes_and_workloads_are_answered_without_torch(tmp_path: Path) -> None:
    workload = PACKAGE.parent / "benchmarks/workloads/layers_bert24_inference.json"
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / MANIFEST).write_text("{}")
    (saved / "plan.json").write_text('{"stages": 3}')
    light = [
        None,  # `import pd2bw_fx`
        *([], ["--help"], ["--version"], ["train", "--help"], ["show", "gpt", "--stages", "1"]),
        *(["train", "gpt", "--lr", "-1"], ["plan", "nothing"], ["plan", "nothing.onnx"]),
        *(["plan", "gpt", "--cluster", "nothing.toml"], ["train", "gpt", "--method", "2bx"]),
        *(["check", str(saved)], ["check", str(saved / "plan.json")]),
    ]
    steps = [*light, ["plan", "--workload", str(workload)]]
    path = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}

    told = subprocess.run(
        [sys.executable, "-c", STEPS, json.dumps(steps)],
        cwd=tmp_path,
        env=path,
        capture_output=True,
        check=True,
    )

    *of_light, of_workload = json.loads(told.stdout)
    assert of_light == [[]] * len(light)
    assert of_workload == ["highspy", "networkx", "numpy", "pulp"]


def test_check_prices_a_plan_again_and_names_what_is_wrong_with_it(
    mlp_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "a copy"
    shutil.copytree(mlp_folder, copy)
    assert main(["check", str(copy / "plan.json")]) == 0
    said = capsys.readouterr().out
    assert "(proven): no plan of 2 stages is faster" in said or "proven optimal" in said
    advice = f"to have its stages: pd2bw-fx split MODEL --plan '{copy}/plan.json' -o FOLDER"
    assert f"the plan is valid; {advice}" in said

    data = json.loads((copy / "plan.json").read_text())
    data["stages"][0]["operators"].append(data["stages"][1]["operators"].pop())
    (copy / "plan.json").write_text(json.dumps(data))

    assert main(["check", str(copy)]) == 1
    assert "nothing runs to an earlier stage" in capsys.readouterr().err


def test_an_output_that_is_closed_is_no_error(mlp_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)

    assert main(["plan", str(mlp_folder)]) == 0


def test_plan_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "mlp", "--cluster", "2", "--explain"]) == 0

    out = capsys.readouterr().out
    assert "next best cut" in out
    assert "what binds" in out


def test_show_prints_the_code_of_a_stage(mlp_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(mlp_folder), "--stage", "1"]) == 0

    assert capsys.readouterr().out == (mlp_folder / "stage_1.py").read_text()


def test_verify_compares_with_the_model(mlp_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "mlp", "--cluster", "2"]) == 0
    assert "bit for bit" in capsys.readouterr().out

    assert main(["verify", str(mlp_folder), "--against", "mlp"]) == 0
    assert "bit for bit" in capsys.readouterr().out
    assert main(["verify", str(mlp_folder)]) == 2
    assert "name it with --against" in capsys.readouterr().err


def test_exported_stages_run_in_processes_and_merge_into_one_file(
    mlp_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    features, labels = build("mlp").example_inputs(batch_size=4)
    np.savez(tmp_path / "x.npz", features=features.numpy(), labels=labels.numpy())
    with torch.no_grad():
        expected = float(model_of(mlp_folder)(features, labels))

    assert main(["export", str(mlp_folder), "-o", str(tmp_path / "onnx")]) == 0
    arguments = ["run-onnx", str(tmp_path / "onnx"), "--input", str(tmp_path / "x.npz")]
    assert main([*arguments, "-o", str(tmp_path / "y.npz")]) == 0
    assert main(["merge", str(tmp_path / "onnx"), "-o", str(tmp_path / "mlp.onnx")]) == 0

    assert "stage_0.onnx, stage_1.onnx" in capsys.readouterr().out
    assert float(np.load(tmp_path / "y.npz")["loss"]) == pytest.approx(expected, rel=1e-5)
    onnx.checker.check_model(onnx.load(tmp_path / "mlp.onnx"), full_check=True)

    parts = str(tmp_path / "parts")
    assert main(["split", str(tmp_path / "mlp.onnx"), "--cluster", "3", "-o", parts]) == 0
    assert main(["run-onnx", parts, "--input", str(tmp_path / "x.npz"), "-o", str(tmp_path / "z.npz")]) == 0
    assert float(np.load(tmp_path / "z.npz")["loss"]) == pytest.approx(expected, rel=1e-5)


def test_commands_take_an_onnx_file(
    mlp_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pd2bw_fx.load(mlp_folder).export_onnx(tmp_path / "onnx")
    path = str(tmp_path / "mlp.onnx")
    pd2bw_fx.merge_onnx(tmp_path / "onnx", path)

    assert main(["plan", path, "--cluster", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["method"] == "inference"
    assert main(["show", path, "--cluster", "2", "--stage", "1"]) == 0
    assert "= Gemm" in capsys.readouterr().out
    assert main(["verify", path, "--cluster", "2"]) == 0
    assert "loss: at most" in capsys.readouterr().out
    assert main(["report", path, "--cluster", "2", "-o", str(tmp_path / "report.html")]) == 0
    assert "on 2 stages, for inference" in (tmp_path / "report.html").read_text()
    assert main(["train", path, "--cluster", "2"]) == 2
    assert "is an ONNX file" in capsys.readouterr().err


def model_of(folder: Path) -> nn.Module:
    model = build("mlp").eval()
    model.load_state_dict(pd2bw_fx.load(folder).state_dict())
    return model


def test_simulate_gives_figures_and_a_timeline(
    mlp_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", str(mlp_folder), "--json", "-o", str(tmp_path / "trace.json")]) == 0
    own = json.loads(capsys.readouterr().out)
    assert main(["simulate", str(mlp_folder), "--json", "--method", "1f1b"]) == 0
    flushed = json.loads(capsys.readouterr().out)

    assert main(["simulate", str(mlp_folder), "--json", "--slack", "auto"]) == 0
    as_run = json.loads(capsys.readouterr().out)

    assert own["microbatches_per_s"] > flushed["microbatches_per_s"]
    assert (own["in_flight_peak"], as_run["in_flight_peak"]) == ([2, 1], [3, 1])
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert main(["simulate", str(mlp_folder)]) == 0
    assert "microbatches/s" in capsys.readouterr().out


def test_the_demo_goes_the_whole_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--updates", "3", "-o", str(tmp_path / "out")]) == 0

    out = capsys.readouterr().out
    assert "class GPTStage1(nn.Module):" in out
    assert "in onnxruntime" in out
    assert (tmp_path / "out" / "loss.png").stat().st_size > 10_000
    assert (tmp_path / "out" / "timeline.svg").read_text().startswith("<svg")
    assert "Predicted and measured" in (tmp_path / "out" / "report.html").read_text()
    assert len(pd2bw_fx.load(tmp_path / "out" / "pipeline").stages) == 2


def test_report_writes_one_page(mlp_folder: Path, tmp_path: Path) -> None:
    assert main(["report", str(mlp_folder), "-o", str(tmp_path / "report.html")]) == 0

    page = (tmp_path / "report.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "MLPStage1" in page
    assert "Predicted and measured" not in page

    metrics = pd2bw_fx.Metrics("1f1b", 4, (3.0, 2.0), (0.2, 0.1))
    metrics.save(tmp_path / "run.json")
    arguments = ["report", str(mlp_folder), "--metrics", str(tmp_path / "run.json")]
    assert main([*arguments, "-o", str(tmp_path / "report.html")]) == 0
    assert "Predicted and measured" in (tmp_path / "report.html").read_text()
    for part, suffix in (("graph", "svg"), ("memory", "png"), ("loss", "png"), ("timeline", "json")):
        assert main([*arguments, "--part", part, "-o", str(tmp_path / f"{part}.{suffix}")]) == 0
        assert (tmp_path / f"{part}.{suffix}").stat().st_size > 500


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["plan", "nothing"], 2, "no model of ours"),
        (["plan", "gptt"], 2, "file.py:callable; did you mean 'gpt'?"),
        (["plan"], 2, "give one of them"),
        (["plan", "json:nothing"], 2, "cannot be imported"),
        (["plan", "nowhere.py:build"], 2, "there is no file nowhere.py"),
        (["plan", "json:dumps", "--cluster", "2"], 2, "cannot be called without arguments"),
        (["plan", "json:__doc__", "--cluster", "2"], 2, "something to call was expected"),
        (
            ["plan", "builtins:dict", "--cluster", "2"],
            2,
            "an nn.Module was expected, whose example_inputs() ",
        ),
        (["plan", "asyncio:get_running_loop"], 2, "raises RuntimeError: no running event loop (/"),
        (["plan", "mlp", "--cluster", "nowhere.toml"], 2, "nowhere.toml"),
        (["show", "mlp", "--cluster", "2", "--stage", "7"], 2, "stages 0 to 1"),
        (["simulate", "mlp", "--cluster", "2", "--microbatches", "1"], 2, "microbatches"),
        (["demo", "--updates", "0"], 2, "at least one"),
        (["train", "gpt", "--record", "0"], 2, "--record is 0"),
        (["train", "gpt", "--trace", "trace.txt"], 2, "ends with .json, .svg or .png"),
        (["train", "gpt", "-o", "nowhere/w.safetensors"], 2, "cannot be written"),
        (["train", "gpt", "-o", "w.pt"], 2, "--output is w.pt; a name that ends with .safetensors"),
        (["report", "gpt", "-o", "nowhere/report.html"], 2, "cannot be written"),
        (["train", "gpt", "--replicas", "0"], 2, "--replicas is 0"),
        (["check", "nowhere.json"], 2, "nowhere.json is not there"),
        (["check", __file__], 2, "is in no folder written by split"),
        (["plan", "tests", "--cluster", "2"], 1, "tests has no manifest.json"),
        (["verify", "gpt", "--against", "gpt"], 2, "for a saved folder"),
        (["run-onnx", "nowhere", "--input", __file__], 2, "holds no arrays by name"),
        (["run-onnx", "nowhere", "--input", "nothing.npz"], 2, "nothing.npz is no file"),
    ],
)
def test_a_mistake_is_one_line_and_its_exit_code_says_whose(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == code

    error = capsys.readouterr().err
    assert "Error: " in error
    assert "Traceback" not in error
    assert message in error


def test_a_model_comes_from_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "from_a_file.py").write_text(
        "from torch import nn\ndef build():\n    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))\n"
    )
    (tmp_path / "json.py").write_text("def build(): ...\n")

    assert main(["plan", f"{tmp_path / 'from_a_file.py'}:build", "--cluster", "2"]) == 0
    assert "Sequential: 2 operators on 2 stages" in capsys.readouterr().out
    assert main(["plan", f"{tmp_path / 'json.py'}:build", "--cluster", "2"]) == 2
    assert "another module is called json; rename the file" in capsys.readouterr().err


def test_wrong_use_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["nothing"])

    assert ended.value.code == 2
    assert "invalid choice" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        "demo",
        "plan",
        "show",
        "split",
        "export",
        "merge",
        "run-onnx",
        "simulate",
        "train",
        "report",
        "check",
        "compare",
        "verify",
        "probe",
    ],
)
def test_every_command_has_help_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])

    assert ended.value.code == 0
    assert f"pd2bw-fx {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "mlp", "--lr", "-1"], "--lr is -1.0; 0 or more was expected"),
        (["simulate", "mlp", "--updates", "0"], "--updates is 0; at least one was expected"),
        (["report", "mlp", "-o", "report.txt"], "the page is HTML: a name that ends with .html"),
        (
            ["plan", "gpt", "--accelerators-only"],
            "--accelerators-only is for a --workload; a model is planned",
        ),
        (["plan", "--workload", "w.json", "--cluster", "3"], "--workload has its own devices"),
        (["plan", "--workload", "w.json", "--edited"], "--workload has its own devices"),
    ],
)
def test_options_that_would_be_ignored_are_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) != 0

    assert said in capsys.readouterr().err
