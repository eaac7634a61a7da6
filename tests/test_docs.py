"""What the documents show is run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pd2bw_fx.models import build
from pd2bw_fx.pipeline import Pipeline

ROOT = Path(__file__).parents[1]


def blocks(document: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / document).read_text(), flags=re.DOTALL)


def test_the_how_to_does_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cluster.toml").write_text(blocks("docs/HOWTO.md", "toml")[0])
    names: dict[str, object] = {}

    for block in blocks("docs/HOWTO.md", "python"):
        exec(compile(block, "HOWTO.md", "exec"), names)

    assert (tmp_path / "gpt_2" / "stage_1.py").exists()
    assert len(names["result"].losses) == 4  # type: ignore[attr-defined]


def test_the_ten_lines_of_the_readme_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ten_lines = blocks("README.md", "python")[0].replace("num_batches=100", "num_batches=2")
    names: dict[str, object] = {}

    exec(compile(ten_lines, "README.md", "exec"), names)

    pipe = names["pipe"]
    assert isinstance(pipe, Pipeline)
    assert pipe.state_dict().keys() == build("gpt").state_dict().keys()
    assert (tmp_path / "gpt_onnx" / "stage_1.onnx").exists()
