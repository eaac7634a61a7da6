"""Module trees drawn at random, cut anywhere: the stages build what they call, and compute it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from pd2bw_fx import Pipeline, load, split
from tests.drawn_modules import drawn_model, imported
from tests.slow import slow
from tests.stages import ruff_faults

NUM_MODELS = 24


INPUTS = torch.linspace(-1, 1, 32).view(4, 8), torch.linspace(1, 0, 32).view(4, 8)


def split_drawn(seed: int, folder: Path) -> Pipeline:
    with imported(drawn_model(seed), folder / f"drawn_{seed}.py") as module:
        torch.manual_seed(seed)
        return split(module.Model(), INPUTS, cluster=2 + seed % 3, costs="analytic", check="full")


def loss(pipe: Pipeline) -> Tensor:
    torch.manual_seed(0)
    return pipe.run(INPUTS)["loss"]


@pytest.mark.parametrize("seed", [*range(16), *slow(range(16, NUM_MODELS))])
def test_stages_of_a_drawn_model(seed: int, tmp_path: Path) -> None:
    pipe = split_drawn(seed, tmp_path)
    pipe.save(tmp_path / "saved")

    assert ruff_faults(tmp_path / "saved") == ""
    assert torch.equal(loss(load(tmp_path / "saved")), loss(pipe))
