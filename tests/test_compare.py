"""All methods side by side: whoever is registered is there, with figures or with a reason."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from pd2bw_fx.cli import main
from pd2bw_fx.cluster import Cluster
from pd2bw_fx.commands.work import comparing
from pd2bw_fx.compare import Figures, LeftOut, Training, compare
from pd2bw_fx.errors import InputError
from pd2bw_fx.models import build
from pd2bw_fx.passes.schedule import METHODS
from pd2bw_fx.pipeline import Pipeline
from pd2bw_fx.report.compared import compared_svg

FAST = {"bytes_per_s": 1e12, "latency_s": 1e-9, "memory_bytes": "1 GiB"}


def test_every_method_that_trains_has_figures_or_a_reason() -> None:
    found = list(compare(build("mlp"), Cluster.uniform(3, **FAST), costs="analytic", check=False))

    assert [each.method for each in found] == [n for n, method in METHODS.items() if method.trains]
    figures = {each.method: each for each in found if isinstance(each, Figures)}
    assert all(each.reason for each in found if isinstance(each, LeftOut))
    assert (figures["2bw"].versions, figures["2bw"].delays) == (2, (1, 1))
    assert (figures["1f1b"].versions, figures["1f1b"].delays) == (1, (0, 0))
    assert figures["2bw"].microbatches_per_s > figures["gpipe"].microbatches_per_s
    assert figures["2bw"].bubble < figures["gpipe"].bubble
    assert len(figures["2bw"].memory) == 3
    assert json.loads(json.dumps(figures["2bw"].to_json()))["delays"] == [1, 1]
    assert {each.timeline.microbatches_per_update for each in figures.values()} == {6}


def test_a_method_that_does_not_fit_is_told_apart() -> None:
    small = Cluster.uniform(2, **(FAST | {"memory_bytes": "1 KiB"}))

    (found,) = compare(build("mlp"), small, methods=["2bw"], costs="analytic", check=False)

    assert isinstance(found, LeftOut)
    assert not found.fits


def test_training_adds_loss_and_speed_or_says_why_not() -> None:
    batch = (torch.zeros(8, 32), torch.zeros(8, dtype=torch.long))

    def batches(pipe: Pipeline) -> list[tuple[torch.Tensor, ...]]:
        if pipe.plan.method == "1f1b":
            raise InputError("no data for it")
        return [batch] * 2

    training = Training(batches, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    first, second = compare(
        build("mlp"),
        Cluster.uniform(2, **FAST),
        methods=["1f1b", "gpipe"],
        training=training,
        costs="analytic",
        check=False,
    )

    assert isinstance(first, Figures)
    assert isinstance(second, Figures)
    assert first.loss is None
    assert first.not_trained == "no data for it"
    assert second.loss is not None
    assert second.measured_per_s is not None
    assert len(second.to_json()["losses"]) == 2


def test_rounds_take_turns_and_begin_from_the_same_weights() -> None:
    model = build("mlp")
    initial = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    batch = (torch.ones(8, 32), torch.zeros(8, dtype=torch.long))
    turns, changed = [], []

    def batches(pipe: Pipeline) -> list[tuple[torch.Tensor, ...]]:
        changed.append(any((tensor != initial[name]).any() for name, tensor in pipe.state_dict().items()))
        return [batch] * 4

    training = Training(batches, lambda parameters: torch.optim.SGD(parameters, lr=0.1), rounds=3)
    found = compare(
        model,
        Cluster.uniform(2, **FAST),
        methods=["1f1b", "gpipe"],
        training=training,
        on_run=turns.append,
        costs="analytic",
        check=False,
    )

    figures = [each for each in found if isinstance(each, Figures)]
    assert turns == ["1f1b", "gpipe"] * 3
    assert changed == [False] * 6
    assert [each.method for each in figures] == ["1f1b", "gpipe"]
    assert all(len(each.measured) == 3 for each in figures)
    assert all(each.measured_per_s == sorted(each.measured)[1] for each in figures)
    assert figures[0].loss == pytest.approx(figures[1].loss)


def test_timelines_stand_above_one_another_on_one_axis() -> None:
    two = Cluster.uniform(2, **FAST)
    found = compare(build("mlp"), two, methods=["2bw", "gpipe"], costs="analytic", check=False)
    timelines = [each.timeline for each in found if isinstance(each, Figures)]

    picture = ElementTree.fromstring(compared_svg(timelines))

    namespace = "{http://www.w3.org/2000/svg}"
    groups = picture.findall(f"{namespace}g")
    assert len(groups) == len(timelines)
    ticks = [
        [(text.get("x"), text.text) for text in group.iter(f"{namespace}text") if text.get("text-anchor")]
        for group in groups
    ]
    axes = [{tick for tick in own if tick[0] and tick[1] in ("0", "ms", "us")} for own in ticks]
    assert all(axis & axes[0] for axis in axes)


def test_the_command_prints_a_table_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["compare", "mlp", "--cluster", "2", "--simulate", "--methods", "2bw", "gpipe"]

    assert main([*arguments, "-o", str(tmp_path / "compare.png")]) == 0
    table = capsys.readouterr().out

    assert "simulated/s" in table
    assert "gpipe" in table
    assert "1f1b" not in table
    assert (tmp_path / "compare.png").stat().st_size > 5000
    assert main(["compare", str(tmp_path), "--simulate"]) == 2
    assert "name the model itself" in capsys.readouterr().err


def of_mlp() -> list[tuple[torch.Tensor, ...]]:
    return [(torch.ones(8, 32), torch.zeros(8, dtype=torch.long))] * 3


def test_the_command_draws_the_losses_of_methods_with_commas_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn: dict[str, Any] = {}
    monkeypatch.setattr(comparing, "loss_curves", lambda curves, path: drawn.update(curves))
    words = ["compare", "mlp", "--cluster", "2", "--methods", "gpipe,1f1b", "gpipe", "--updates", "2"]
    words += ["--data", f"{__name__}:of_mlp"]
    losses = ["--losses", str(tmp_path / "losses.svg")]

    assert main([*words, *losses, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["methods"]

    assert [each["method"] for each in told] == ["gpipe", "1f1b"]
    assert drawn == {each["method"]: tuple(each["losses"]) for each in told}
    assert [len(curve) for curve in drawn.values()] == [2, 2]
    for wrong, said in (
        ([*words, "--methods", "2bw,1f1"], "method is '1f1'; expected one of"),
        ([*words, "--methods", "inference"], "inference does not train"),
        ([*words, *losses, "--simulate"], "leave out --simulate"),
    ):
        assert main(wrong) == 2
        assert said in capsys.readouterr().err


def test_the_command_takes_what_is_wished_of_every_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    constraints = tmp_path / "constraints.toml"
    constraints.write_text('memory_bytes = { "cpu:0" = "1 MiB" }')
    words = [
        "compare",
        "gpt",
        "--cluster",
        "3",
        "--simulate",
        "--json",
        "--methods",
        "2bw",
        "interleaved",
        "ddp",
    ]
    words += ["--costs", "analytic", "--num-stages", "2", "--recompute", "always", "--max-gap", "0.01"]

    assert main([*words, "--constraints", str(constraints)]) == 0

    told = json.loads(capsys.readouterr().out)
    two_stages, *_ = told["methods"]
    assert {*two_stages["memory"]} == {"cpu:1", "cpu:2"}  # the first has too little left
    assert [each["method"] for each in told["left_out"]] == ["interleaved", "ddp"]
    assert "cpu:0 has least" in told["left_out"][1]["reason"]
    constraints.write_text('memory_bytes = { "cpu:0" = "1 KiB", "cpu:1" = "1 KiB", "cpu:2" = "1 KiB" }')
    assert main([*words, "--constraints", str(constraints)]) == 1, "no method can be used"
