"""Module trees drawn at random, cut anywhere: the stages build what they call, and compute it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pd2bw_fx import Pipeline, load, split
from tests.drawn_modules import drawn_model
from tests.stages import ruff_faults

NUM_MODELS = 24


INPUTS = torch.linspace(-1, 1, 32).view(4, 8), torch.linspace(1, 0, 32).view(4, 8)


def split_drawn(seed: int, folder: Path) -> Pipeline:
    """A file of its own for the model: its lines are in what is written."""
    path = folder / f"drawn_{seed}.py"
    path.write_text(drawn_model(seed))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
        torch.manual_seed(seed)
        return split(module.Model(), INPUTS, cluster=2 + seed % 3, costs="analytic", check="full")
    finally:
        del sys.modules[path.stem]


def loss(pipe: Pipeline) -> Tensor:
    torch.manual_seed(0)
    return pipe.run(INPUTS)["loss"]


@pytest.mark.parametrize("seed", range(NUM_MODELS))
def test_stages_of_a_drawn_model(seed: int, tmp_path: Path) -> None:
    pipe = split_drawn(seed, tmp_path)
    pipe.save(tmp_path / "saved")

    assert ruff_faults(tmp_path / "saved") == ""
    assert torch.equal(loss(load(tmp_path / "saved")), loss(pipe))
