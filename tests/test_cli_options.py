"""On the command line a model is split with the options that `split` has."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import pd2bw_fx
from pd2bw_fx.cli import main
from pd2bw_fx.models import build
from tests.stages import split_of_our_own

SPLIT = ["--cluster", "2", "--costs", "analytic"]


def planned(capsys: pytest.CaptureFixture[str], *words: str, model: str = "mlp") -> dict[str, Any]:
    assert main(["plan", model, *words, "--costs", "analytic", "--json"]) == 0
    plan: dict[str, Any] = json.loads(capsys.readouterr().out)
    return plan


@pytest.fixture(scope="module")
def mlp() -> pd2bw_fx.Pipeline:
    return pd2bw_fx.split(build("mlp"), cluster=2, costs="analytic", check=False)


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["--cluster", "2", "--method", "1f1b", "--microbatches", "6"], {}),
        (["--cluster", "2", "--method", "interleaved", "--chunks", "2"], {"chunks": 2}),
        (["--cluster", "4", "--num-stages", "2"], {"num_stages": 2}),
        (["--cluster", "3", "--num-stages", "auto"], {"num_stages": "auto"}),
        (["--cluster", "4", "--replicas", "2"], {"replicas": 2}),
        (["--cluster", "3", "--method", "pipedream", "--replicas", "2,1"], {"replicas": [2, 1]}),
        (["--cluster", "2", "--recompute", "always"], {"recompute": True}),
        (["--cluster", "2", "--recompute", "auto"], {"recompute": "auto"}),
        (["--cluster", "2", "--solver", "cbc", "--max-gap", "0.1", "--time-limit", "5"], {"max_gap": 0.1}),
    ],
)
def test_the_plan_is_the_one_of_split(
    words: list[str], options: dict[str, Any], mlp: pd2bw_fx.Pipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    given = dict(zip(words[::2], words[1::2], strict=True))
    options = options | {
        argument: convert(given[word])
        for word, argument, convert in (
            ("--method", "method", str),
            ("--microbatches", "microbatches_per_update", int),
            ("--solver", "solver", str),
        )
        if word in given
    }

    found = planned(capsys, *words)

    cluster = int(given["--cluster"])
    plan = pd2bw_fx.split(mlp, cluster=cluster, costs="analytic", check=False, **options).plan
    assert found["stages"] == json.loads(plan.dumps())["stages"]
    assert found["method"] == plan.method
    assert found["microbatches_per_update"] == plan.microbatches_per_update


def test_constraints_come_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "constraints.toml"
    file.write_text(
        'stage_of = { "blocks.2" = 0 }\ntogether = [["blocks.2", "blocks.3"]]\nwhole = ["head"]\n'
        'memory_bytes = { "cpu:1" = "1 GiB" }\n'
    )

    stages = planned(capsys, "--cluster", "2", "--constraints", str(file), model="gpt")["stages"]

    graph = split_of_our_own("gpt", cluster=2).graph
    third = {name for name, operator in graph.operators.items() if "blocks.3" in operator.module_path}
    assert third <= set(stages[0]["operators"])

    for text, said in (
        ("stages = 3", "has 'stages'; expected stage_of, device_of"),
        ("stage_of = ", "cannot be read"),
        ('whole = "head"', "a tuple was expected"),
    ):
        file.write_text(text)
        assert main(["plan", "gpt", *SPLIT, "--constraints", str(file)]) == 2
        assert said in capsys.readouterr().err


def test_stages_that_were_edited_are_used_where_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "mlp"
    assert main(["split", "mlp", *SPLIT, "-o", str(folder)]) == 0
    stage = folder / "stage_0.py"
    stage.write_text(stage.read_text() + "# looked at\n")

    assert main(["show", str(folder)]) == 1
    assert "stage_0.py is not the file that was saved" in (told := capsys.readouterr().err)
    assert "say so with --edited" in told
    assert main(["show", str(folder), "--edited"]) == 0
    assert "# looked at" in capsys.readouterr().out
    assert main(["simulate", "mlp", *SPLIT, "--edited"]) == 2
    assert "--edited is of a saved folder" in capsys.readouterr().err

    plan = folder / "plan.json"
    plan.write_text(plan.read_text() + " ")
    assert main(["simulate", str(folder)]) == 1
    assert "give the plan that you edited to split, with --plan and the model" in capsys.readouterr().err


def test_a_saved_pipeline_has_its_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "mlp")
    assert main(["split", "mlp", *SPLIT, "--method", "gpipe", "-o", folder]) == 0
    assert main(["plan", folder]) == 0
    assert "method gpipe" in capsys.readouterr().out

    for words in (
        ["plan", folder, "--method", "1f1b"],
        ["simulate", folder, "--num-stages", "1"],
        ["train", folder, "--chunks", "3"],
    ):
        assert main(words) == 2
        assert f"leave out {words[2]}" in capsys.readouterr().err
    assert main(["simulate", folder, "--method", "1f1b", "--microbatches", "6"]) == 0
    assert "1f1b, 6 microbatches an update" in capsys.readouterr().out


def test_a_workload_takes_the_options_of_the_search(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--workload", str(tmp_path / "w.json"), "--method", "1f1b"]) == 2
    assert "--solver, --max-gap and --time-limit are for it" in capsys.readouterr().err
    assert main(["plan", "--workload", str(tmp_path / "w.json"), "--max-gap", "0.01"]) == 2
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--num-stages", "some"], ["--replicas", "2,some"], ["--recompute", "x"]])
def test_what_no_option_can_be_is_wrong_use(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "gpt", *words])

    assert ended.value.code == 2
    assert f"argument {words[0]}: " in capsys.readouterr().err


def test_an_unknown_option_is_told_below_the_usage_of_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["show", "gpt", "--stages", "1"])

    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("usage: pd2bw-fx show ")
    assert "unrecognized arguments: --stages 1" in said
    assert "--stages is no option, did you mean --stage?" in said


def test_a_mistyped_option_is_named_also_where_it_is_the_one_that_is_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["split", "gpt", "--ouptut=there", "--cluster", "2"])

    assert ended.value.code == 2
    assert "--ouptut is no option, did you mean --output?" in capsys.readouterr().err


def test_copies_of_stages_are_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "mlp", *SPLIT, "--microbatches", "8", "--json", "--method"]
    speeds = {}
    for method, replicas, num_ranks in (("1f1b", "1", 2), ("1f1b", "2", 4), ("pipedream", "2,1", 3)):
        assert main([*words, method, "--replicas", replicas]) == 0
        told = json.loads(capsys.readouterr().out)
        assert len(told["in_flight_peak"]) == num_ranks
        speeds[replicas] = told["microbatches_per_s"]

    assert speeds["2"] > speeds["1"]


def test_a_plan_that_was_edited_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["mlp", "--cluster", "2", "--costs", "analytic"]
    assert main(["plan", *common, "--microbatches", "8", "--json"]) == 0
    (tmp_path / "plan.json").write_text(capsys.readouterr().out)

    assert main(["split", *common, "--plan", str(tmp_path / "plan.json"), "-o", str(tmp_path / "mlp")]) == 0
    assert pd2bw_fx.load(tmp_path / "mlp").plan.microbatches_per_update == 8

    assert main(["plan", *common, "--plan", str(tmp_path / "none.json")]) == 2
    assert "none.json cannot be read" in capsys.readouterr().err


def test_a_plan_and_why_are_one_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "mlp", "--cluster", "2", "--costs", "analytic", "--explain", "--json"]) == 0

    told = json.loads(capsys.readouterr().out)
    assert told["stages"]
    assert told["explanation"]["cuts"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--num-stages", "9"], "--num-stages 2"),
        (["--time-limit", "0"], "--time-limit is 0.0"),
        (["--chunks", "3"], "try --method interleaved"),
        (["--microbatches", "1"], "--microbatches 2"),
    ],
)
def test_errors_speak_of_options(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "mlp", "--cluster", "2", "--costs", "analytic", *words]) == 2

    said = capsys.readouterr().err
    assert told in said
    assert not re.search(r"num_stages|microbatches_per_update|time_limit_s|method=", said)


def test_training_that_cannot_run_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(["train", "mlp", "--cluster", "2", "--checkpoint", str(tmp_path / "file" / "run")]) == 2
    assert "cannot be a folder that is written to" in capsys.readouterr().err


def test_what_was_made_and_compared_is_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["split", "mlp", *SPLIT, "--json", "-o", str(tmp_path / "mlp")]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan == json.loads((tmp_path / "mlp" / "plan.json").read_text())

    assert main(["verify", str(tmp_path / "mlp"), "--against", "mlp", "--json"]) == 0
    compared = json.loads(capsys.readouterr().out)
    assert compared["exact"]
    assert set(compared["relative"].values()) == {0.0}

    words = ["export", str(tmp_path / "mlp"), "-o", str(tmp_path / "onnx"), "--training", "--json"]
    assert main(words) == 0
    manifest = json.loads(capsys.readouterr().out)
    written = json.loads((tmp_path / "onnx" / "manifest.json").read_text())
    assert manifest["mode"] == "training"
    assert manifest.items() <= written.items()
