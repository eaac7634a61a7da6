"""Every file has its place: a row in docs/ARCHITECTURE.md, and a layer of import-linter's."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOUNS = sorted(path.stem for path in (ROOT / "pd2bw_fx").glob("[!_]*.py"))
PASSES = sorted(path.stem for path in (ROOT / "passes").glob("[!_]*"))


@pytest.mark.parametrize("folder", ["pd2bw_fx", "pd2bw_fx/runtime", "passes"])
def test_the_plan_of_the_house_has_every_file(folder: str) -> None:
    told = set(re.findall(r"\w+", (ROOT / "docs/ARCHITECTURE.md").read_text()))

    assert {path.stem for path in (ROOT / folder).glob("[!_]*")} <= told


def test_the_layers_have_every_module() -> None:
    (layers,) = (
        contract["layers"]
        for contract in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
            "contracts"
        ]
        if contract["type"] == "layers"
    )
    placed = set(re.findall(r"[\w.]+", " ".join(layers)))

    assert {f"pd2bw_fx.{name}" for name in NOUNS} <= placed
    assert {f"pd2bw_fx.passes.{name}" for name in PASSES} <= placed
