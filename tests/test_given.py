"""Programs that torch.export made already: taken as they are, in the one mode that they have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import fx, nn
from torch.export import ExportedProgram

import pd2bw_fx
from pd2bw_fx.errors import ExportError


def exported(*between: nn.Module, training: bool) -> ExportedProgram:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), *between, nn.Linear(8, 2)).train(training)
    return torch.export.export(model, (torch.randn(4, 4),), dynamic_shapes=({0: torch.export.Dim("n")},))


def split(program: ExportedProgram | fx.GraphModule) -> pd2bw_fx.Pipeline:
    args = None if isinstance(program, ExportedProgram) else (torch.randn(4, 4),)
    return pd2bw_fx.split(program, args, cluster=2, num_stages=2, costs="analytic")


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("form", ["program", "module", "module without guards"])
def test_a_program_without_modes_is_exported_in_either(tmp_path: Path, form: str, *, training: bool) -> None:
    program = exported(nn.ReLU(), training=training)
    pipe = split(program if form == "program" else program.module(check_guards=form == "module"))

    for asked in (True, False):
        manifest = pipe.export_onnx(tmp_path / f"{asked}", training=asked)

        assert manifest["compared_with"] == "the original model"
        assert max(manifest["largest_differences_from_model"].values()) < 1e-6


@pytest.mark.parametrize("form", ["program", "module"])
def test_a_program_of_training_is_exported_as_that_alone(tmp_path: Path, form: str) -> None:
    program = exported(nn.BatchNorm1d(8), training=True)
    pipe = split(program if form == "program" else program.module())
    pipe.save(tmp_path / "folder")

    for name, of_training in (("split", pipe), ("loaded", pd2bw_fx.load(tmp_path / "folder"))):
        with pytest.raises(
            ExportError, match="one mode alone: split the model itself to evaluate, or export"
        ):
            of_training.export_onnx(tmp_path / name)
        assert not (tmp_path / name).exists()
        of_training.export_onnx(tmp_path / name, training=True)
