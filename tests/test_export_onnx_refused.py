"""Stages and requests of which no ONNX files are made, and none are left behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from pd2bw_fx.errors import ExportError, InputError
from pd2bw_fx.passes.export_onnx import export_onnx
from pd2bw_fx.stage import Port, StageProgram
from tests.three_stages import batch_of, programs, spec, whole


class Wrong(nn.Module):
    """Computes another thing while it is exported than when it is run."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if torch.compiler.is_exporting() else x


class OneSize(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(2, 4)


class Projected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 8, proj_size=4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.rnn(x.unsqueeze(1))
        return hidden.squeeze(1)


class Untranslatable(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if x.sum() > 0 else x


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (Wrong(), r"y, an output of stage 0, differs from torch by 1"),
        (OneSize(), r"stage 0 fails in torch on inputs of shape \(1, 4\): RuntimeError: shape '\[2, 4\]'"),
        (Projected(), r"layer 'rnn' of stage 0 is an LSTM with proj_size=4"),
        (Untranslatable(), r"stage 0 cannot be translated to ONNX opset 20"),
    ],
)
def test_a_stage_that_fails_is_an_error_and_leaves_no_files(
    tmp_path: Path, module: nn.Module, said: str
) -> None:
    x = spec("batch", 4)
    program = StageProgram(
        0, "Wrong", "", (Port("x", "x", x),), (Port("y", "y", x, model_output="y"),), (), (), {}
    )

    with pytest.raises(ExportError, match=said):
        export_onnx([program], [module], {"x": torch.ones(2, 4)}, tmp_path / "onnx")

    assert list(tmp_path.iterdir()) == []


def test_wrong_requests_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    modules, folder = list(whole().stages), tmp_path / "onnx"

    with pytest.raises(InputError, match="opset 26 cannot be written; give one from 18 to 25"):
        export_onnx(programs(), modules, batch_of(2), folder, opset=26)
    with pytest.raises(InputError, match="no example of input 'labels'"):
        export_onnx(programs(), modules, {"tokens": batch_of(2)["tokens"]}, folder)
    folder.mkdir()
    (folder / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match="was not written by"):
        export_onnx(programs(), modules, batch_of(2), folder)

    assert [path.name for path in folder.iterdir()] == ["thesis.txt"]


def test_exporting_and_failing_to_export_print_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = whole()
    export_onnx(programs(), list(model.stages), batch_of(2), tmp_path / "onnx")

    with pytest.raises(ExportError):
        export_onnx(
            programs(), [model.stages[0], Untranslatable(), model.stages[2]], batch_of(2), tmp_path / "no"
        )

    assert capfd.readouterr() == ("", "")
