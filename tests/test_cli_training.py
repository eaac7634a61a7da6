"""`pd2bw-fx train`: what it prints and writes, where it goes on, and what ranks need of a model's file."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

import pd2bw_fx
from pd2bw_fx.cli import main, parser
from pd2bw_fx.commands.work import training
from pd2bw_fx.errors import InputError, UsageError
from pd2bw_fx.models import build
from pd2bw_fx.rank_processes import _reason
from pd2bw_fx.runtime.launcher import STARTED_BY
from tests.stages import split_of_our_own
from tests.torchrun import TIMEOUT_S, torchrun_of_forks

PACKAGE = Path(pd2bw_fx.__file__).parent

OWN = """
import torch
from torch import Tensor, nn

import pd2bw_fx


@torch.library.custom_op("of_a_file::double", mutates_args=())
def double(x: Tensor) -> Tensor:
    return x * 2


@double.register_fake
def _(x):
    return torch.empty_like(x)


double.register_autograd(lambda ctx, gradient: gradient * 2)


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.worst = pd2bw_fx.untraced(lambda x: max(x.square().mean(1)), name="worst_of_a_file")

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.worst(torch.ops.of_a_file.double(x))

    def example_inputs(self, batch_size=2):
        return (torch.randn(batch_size, 8),)
"""


@pytest.mark.usefixtures("ranks_are_forks")
def test_ranks_know_what_the_model_s_own_file_defines_and_take_its_chunks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own_of_ranks.py"
    own.write_text(OWN)
    (tmp_path / "ones.py").write_text("import torch\n\ngiven = lambda: [torch.ones(8, 8)] * 3\n")
    words = ["--cluster", "2", "--method", "interleaved", "--chunks", "2", "--microbatches", "4", "--json"]
    words += [
        "--costs",
        "analytic",
        "--optimizer",
        "sgd",
        "--data",
        f"{tmp_path}/ones.py:given",
        "--updates",
        "3",
    ]

    assert main(["train", f"{own}:Own", *words]) == 0

    losses = [json.loads(line)["loss"] for line in capfd.readouterr().out.splitlines()]
    assert losses == sorted(losses, reverse=True)
    assert len(losses) == 3


@pytest.fixture(scope="module")
def mlp_in_one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved pipeline of the model `mlp` in one stage, which one rank trains."""
    folder = tmp_path_factory.mktemp("saved") / "mlp_in_one"
    pd2bw_fx.split(build("mlp"), cluster=1, costs="analytic", check=False).save(folder)
    return folder


@pytest.mark.usefixtures("one_rank")
def test_a_loss_that_is_not_a_number_is_null_in_json(
    mlp_in_one: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "none.py").write_text(
        "import torch\n\n\ndef batches():\n"
        "    yield torch.full((8, 32), torch.nan), torch.zeros(8, dtype=torch.long)\n"
    )
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")

    main(
        [
            "train",
            str(mlp_in_one),
            "--data",
            f"{tmp_path / 'none.py'}:batches",
            "--updates",
            "1",
            "--json",
            "--metrics",
            str(tmp_path / "metrics.json"),
        ]
    )

    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line, parse_constant=pytest.fail)["loss"] is None


def test_the_traceback_of_an_error_is_shown_wherever_that_is_said() -> None:
    for words in (["--debug", "show", "nowhere"], ["show", "nowhere", "--debug"]):
        with pytest.raises(UsageError, match="'nowhere' is no model of ours"):
            main(words)


def test_a_run_of_other_stages_is_told_by_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, page = tmp_path / "mlp", str(tmp_path / "page.html")
    split_of_our_own("mlp", cluster=3).save(folder)
    pd2bw_fx.Metrics("1f1b", 4, (1.0,), (1.0,), replicas=(2, 2)).save(folder / "metrics.json")

    assert main(["report", str(folder), "-o", page]) == 2

    assert "metrics.json is of a run of other stages (replicas is (2, 2)" in capsys.readouterr().err


def test_train_starts_processes_tells_the_loss_and_goes_on_from_a_checkpoint(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    common = ["--cluster", "2", "--costs", "analytic", "--microbatches", "2", "--json"]
    common += ["--optimizer", "muon", "--lr", "1e-3", "--checkpoint", str(tmp_path / "run"), "--every", "5"]

    assert main(["train", "gpt", *common, "--updates", "10"]) == 0
    first = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert STARTED_BY not in os.environ  # which would keep the ranks of another run silent
    request.getfixturevalue("ranks_are_forks")
    common += ["--trace", str(tmp_path / "trace.json"), "-o", str(tmp_path / "w.safetensors")]
    assert main(["train", "gpt", *common, "--updates", "15"]) == 0
    second = [json.loads(line) for line in capfd.readouterr().out.splitlines()]

    assert [report["update"] for report in first] == list(range(1, 11))
    assert [report["update"] for report in second] == list(range(11, 16))
    assert second[-1]["loss"] < first[0]["loss"] - 0.3
    metrics = pd2bw_fx.Metrics.load(tmp_path / "run")
    assert metrics.losses == tuple(report["loss"] for report in first + second)
    build("gpt").load_state_dict(load_file(tmp_path / "w.safetensors"))
    assert metrics.timeline is not None
    assert metrics.timeline.num_ranks == 2
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    took = {(e["tid"], e["name"]): (e["ts"], e["ts"] + e["dur"]) for e in trace if e["ph"] == "X"}
    assert {f"{kind}{microbatch}" for kind in "FB" for microbatch in (22, 29)} <= {name for _, name in took}
    for microbatch in range(22, 30):  # on one clock nobody reads what is not written yet
        assert took[0, f"F{microbatch}"][1] <= took[1, f"F{microbatch}"][1]
        assert took[1, f"B{microbatch}"][1] <= took[0, f"B{microbatch}"][1]


def test_torchruns_summary_ends_with_the_mistake(mlp_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "wide.py").write_text(
        "import torch\ndef batches():\n    yield torch.zeros(8, 33), torch.zeros(8, dtype=torch.long)\n"
    )
    words = [str(mlp_folder), "--data", "wide:batches", "--updates", "2"]
    path = os.pathsep.join([str(PACKAGE.parent), str(tmp_path)])

    ended = torchrun_of_forks(2, PACKAGE / "__main__.py", "train", *words, PYTHONPATH=path)

    assert ended.returncode == 1
    last = [line.strip() for line in ended.stderr.splitlines() if line.strip("= ")][-1]
    assert last.startswith("traceback : InputError: batch 0: the batch's features has shape (8, 33)")


def test_a_mistake_in_training_is_one_line(
    mlp_in_one: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wide.py").write_text(
        "import torch\ndef batches():\n    yield torch.zeros(8, 33), torch.zeros(8, dtype=torch.long)\n"
    )

    assert main(["train", str(mlp_in_one), "--data", "wide:batches", "--updates", "2"]) == 2

    error = capfd.readouterr().err
    assert error.startswith("InputError: batch 0: the batch's features has shape (8, 33)")
    assert len(error.splitlines()) == 1


def test_of_ranks_that_failed_the_first_cause_is_told(tmp_path: Path) -> None:
    """Neither what followed from it, however early that was told, nor what the launcher has ended."""
    told = {
        0: (1, "WorkerError: rank 1 failed", 10),
        1: (1, "InputError: batch 0: of rank 1", 30),
        2: (1, "InputError: batch 0: of rank 2", 20),
        3: (-signal.SIGTERM, None, 5),
    }
    failures = {}
    for rank, (code, message, second) in told.items():
        file = tmp_path / str(rank)
        if message is not None:
            about = {"py_callstack": "", "timestamp": str(second)}
            file.write_text(json.dumps({"message": {"message": message, "extraInfo": about}}))
        failures[rank] = ProcessFailure(rank, rank, code, str(file))

    reason = _reason(failures)

    assert isinstance(reason, InputError)
    assert str(reason) == "batch 0: of rank 2"


def test_training_goes_on_where_its_reader_has_seen_enough_and_in_any_folder(
    mlp_in_one: Path, tmp_path: Path
) -> None:
    (tmp_path / "selectors.py").write_text("raise ImportError('not the one of Python')")
    (tmp_path / "many.py").write_text(
        "import torch\nbatches = lambda: [(torch.zeros(16, 32), torch.zeros(16, dtype=torch.long))] * 40\n"
    )
    shutil.copytree(mlp_in_one, tmp_path / "saved")
    words = "train saved --data many.py:batches --updates 40 -o w.safetensors"

    ended = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{Path(sys.executable).parent}/pd2bw-fx {words} | head -n 1"],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )

    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("update 2: loss ")
    assert (tmp_path / "w.safetensors").is_file()


@pytest.mark.usefixtures("one_rank")
def test_training_writes_a_last_checkpoint_and_says_where_it_goes_on(
    mlp_in_one: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows.py").write_text(
        "import torch\n\n\ndef batches():\n"
        "    for _ in range(9):\n        yield torch.zeros(8, 32), torch.zeros(8, dtype=torch.long)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    words = [
        "train",
        str(mlp_in_one),
        "--data",
        "rows:batches",
        "--checkpoint",
        str(tmp_path / "run"),
    ]
    words += ["--metrics", str(tmp_path / "metrics.json")]

    for updates, said in ((3, ""), (4, "has 3 updates: goes on"), (4, "has 4 updates: nothing is left")):
        assert main([*words, "--updates", str(updates)]) == 0
        assert said in capsys.readouterr().out
    assert main([*words, "--updates", "5", "--optimizer", "sgd"]) != 0
    assert "is of a run with AdamW, and this one has SGD; go on with" in capsys.readouterr().err


def test_a_rank_has_the_options_of_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(training, "start_processes", lambda number, words: started.append(words))
    of_the_plan = ["--cluster", "2", "--costs", "analytic"]
    given = ["--method", "1f1b", "--microbatches", "8", "--precision", "bf16", "--compile", "--json"]
    given += ["--optimizer", "sgd", "--lr", "0.1", "--updates", "7", "--seed", "3", "--every", "5"]
    given += ["--record", "4", "--output", str(tmp_path / "weights.safetensors")]
    folders = ["--checkpoint", str(tmp_path / "run"), "--metrics", str(tmp_path / "metrics.json")]

    assert main(["train", "gpt", *of_the_plan, *given, *folders]) == 0

    (words,) = started
    asked = vars(parser().parse_args(["train", "gpt", *given, *folders]))
    found = vars(parser().parse_args(words))
    of_where = ("model", "command")
    assert {name: found[name] for name in asked if name not in of_where} == {
        name: value for name, value in asked.items() if name not in of_where
    }
