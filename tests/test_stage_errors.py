"""An error inside a stage says which call of the generated code it was, and which line of the author's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pd2bw_fx
from pd2bw_fx.stage_errors import authors_lines


class Block(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, 8)
        self.mix = nn.Linear(8, 8)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        return x + self.mix(self.table(words)).tanh()


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(10), Block(5), Block(10)])
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, words: Tensor, targets: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, words)
        return F.cross_entropy(
            self.head(x),
            targets,
        )


def batch(word: int = 4, target: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(4, 8), torch.tensor([0, 1, 2, word]), torch.tensor([0, 1, 2, target])


@pytest.fixture(scope="module")
def pipe() -> pd2bw_fx.Pipeline:
    return pd2bw_fx.split(Tagger(), batch(), cluster=2, costs="analytic", microbatches_per_update=2)


def line_of(code: str) -> str:
    """Returns a line of this file as a message has it."""
    number = next(n for n, line in enumerate(Path(__file__).read_text().splitlines(), 1) if code in line)
    return rf"{re.escape(__file__)}:{number}: {re.escape(code)}"


WORD = r"^in self\.table\(words\) of blocks\.1, line \d+ of stage_\d\.py; from "
TARGET = r"^in F\.cross_entropy\(self\.head\(.*\), targets\), line \d+ of stage_1\.py; from "


def test_the_note_has_the_call_the_layer_and_the_authors_line(pipe: pd2bw_fx.Pipeline) -> None:
    with pytest.raises(IndexError) as raised:
        pipe.run(batch(word=9))

    (note,) = raised.value.__notes__
    assert re.fullmatch(WORD + line_of("return x + self.mix(self.table(words)).tanh()"), note)


def test_a_loaded_pipeline_knows_the_line_by_its_short_name(pipe: pd2bw_fx.Pipeline, tmp_path: Path) -> None:
    pipe.save(tmp_path / "tagger")

    with pytest.raises(IndexError) as raised:
        pd2bw_fx.load(tmp_path / "tagger").run(batch(target=7))

    assert re.search(TARGET + r"test_stage_errors\.py:\d+$", raised.value.__notes__[0])


def test_of_a_model_whose_code_is_in_no_file_the_generated_line_is_told() -> None:
    scope = {"nn": nn}
    forward = "\n    def forward(self, words):\n        return super().forward(words).sum()"
    exec(compile(f"class Table(nn.Embedding):{forward}", "written.py", "exec"), scope)
    made = pd2bw_fx.split(scope["Table"](4, 8), torch.tensor([0, 1]), cluster=1, costs="analytic")  # type: ignore[operator]

    with pytest.raises(IndexError) as raised:
        made.run(torch.tensor([0, 9]))

    assert authors_lines(made.graph) == {"written.py:3": "written.py:3"}
    assert re.match(r"in F\.embedding\(.*\), line \d+ of stage_0\.py", raised.value.__notes__[0])


def test_the_summary_of_a_local_run_has_it(pipe: pd2bw_fx.Pipeline) -> None:
    with pytest.raises(pd2bw_fx.WorkerError) as raised:
        pipe.train_local(
            [batch(), batch(), batch(target=7)],
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        )

    summary, *_, place, _ = str(raised.value).strip().splitlines()
    assert re.search(
        r"failed with IndexError, at F\.cross_entropy\(.*\), test_stage_errors\.py:\d+:$", summary
    )
    assert re.match(TARGET + line_of("return F.cross_entropy(")[:-2], place)
