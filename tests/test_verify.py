"""What a comparison of stages and model lets pass: roundings that the model carries on, nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import pd2bw_fx
from pd2bw_fx.errors import VerificationError

BY_TYPE = 2e-5


class Cancelling(nn.Module):
    """Every layer reads what was normalised over two samples, whose gradients all but cancel there."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        hidden = total = self.norm(self.first(x))
        for layer in self.layers:
            total = total + layer(total).sin() * hidden
        return total.square().mean()


def stages(seed: int) -> tuple[Cancelling, pd2bw_fx.Pipeline]:
    """Three stages that all read the normalised value, compared by nobody yet."""
    torch.manual_seed(seed)
    model, x = Cancelling(), torch.randn(2, 8)
    where = {f"layers.{layer}": layer // 2 for layer in range(6)}
    constraints = pd2bw_fx.Constraints(stage_of=where)
    pipe = pd2bw_fx.split(
        model, x, cluster=3, num_stages=3, costs="analytic", check=False, constraints=constraints
    )
    return model, pipe


def is_refused(pipe: pd2bw_fx.Pipeline, **options: float) -> bool:
    try:
        pipe.verify(**options)
    except VerificationError:
        return True
    return False


def test_a_rounding_that_the_model_carries_on_as_far_is_no_fault() -> None:
    pipes = [stages(seed)[1] for seed in range(8)]

    assert any(is_refused(pipe, tolerance=BY_TYPE) for pipe in pipes)
    assert not any(is_refused(pipe) for pipe in pipes)


@pytest.mark.parametrize(("written", "instead"), [(".sin()", ".cos()"), (".sin()", ".sin() * 1.001")])
def test_what_is_wrong_is_found_in_such_a_model_too(written: str, instead: str, tmp_path: Path) -> None:
    model, pipe = stages(1)
    pipe.save(tmp_path)
    source = tmp_path / "stage_2.py"
    source.write_text(source.read_text().replace(written, instead))

    edited = pd2bw_fx.load(tmp_path, edited=True)

    assert instead in edited.stages[2].source
    with pytest.raises(VerificationError, match="differs from the model's"):
        edited.verify(model, example_args=(torch.randn(2, 8),))
