"""`pd2bw-fx train` of a model whose own file the ranks need, which load its saved stages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import pd2bw_fx
from pd2bw_fx.cli import main
from pd2bw_fx.errors import UsageError
from pd2bw_fx.models import build

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


@pytest.mark.usefixtures("one_rank")
def test_a_loss_that_is_not_a_number_is_null_in_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "none.py").write_text(
        "import torch\n\n\ndef batches():\n"
        "    yield torch.full((8, 32), torch.nan), torch.zeros(8, dtype=torch.long)\n"
    )
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    pd2bw_fx.split(build("mlp"), cluster=1, costs="analytic", check=False).save(tmp_path / "whole")

    main(
        [
            "train",
            str(tmp_path / "whole"),
            "--data",
            f"{tmp_path / 'none.py'}:batches",
            "--updates",
            "1",
            "--json",
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
    pd2bw_fx.split(build("mlp"), cluster=3, costs="analytic", check=False).save(folder)
    pd2bw_fx.Metrics("1f1b", 4, (1.0,), (1.0,), replicas=(2, 2)).save(folder / "metrics.json")

    assert main(["report", str(folder), "-o", page]) == 2

    assert "metrics.json is of a run of other stages (replicas is (2, 2)" in capsys.readouterr().err
