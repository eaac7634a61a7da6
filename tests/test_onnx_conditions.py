"""Exported files where the model's own code asks of its inputs what a trace can answer in one way only."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

import pd2bw_fx
from pd2bw_fx.errors import ExportError, InputError
from pd2bw_fx.passes.export_onnx import merge_onnx, run_onnx, run_onnx_processes
from pd2bw_fx.passes.export_onnx.run import run_whole


class Choosing(nn.Module):
    """By values, the same twice in its last layer, of which it returns one too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if x.mean() > 0:
            x = x * 2
        hidden = self.last(self.first(x))
        if x.sum() > 1:
            hidden = hidden + 1
        if x.sum() > 1:
            hidden = hidden * 2
        return x.sum() > 1, hidden


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_file_ends_where_values_go_another_way_than_in_the_trace(num_stages: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Choosing().eval(), torch.rand(3, 4)
    pipe = pd2bw_fx.split(
        model, (x,), cluster=2, num_stages=num_stages, costs="analytic", tracer="export-as-example"
    )
    manifest = pipe.export_onnx(tmp_path / "onnx", form="both")
    merge_onnx(tmp_path / "onnx", tmp_path / "merged.onnx")

    found = run_onnx(tmp_path / "onnx", {"x": x})
    np.testing.assert_allclose(list(found.values())[1], model(x)[1].detach().numpy(), rtol=1e-5)
    with pytest.raises(ExportError, match=r"another way than in the trace, at .*: if x"):
        run_onnx(tmp_path / "onnx", {"x": -x})
    small = {"x": (x / 100).numpy()}
    for file in (tmp_path / "onnx" / "model.onnx", tmp_path / "merged.onnx"):
        outputs = {o.name: o.name for o in onnx.load(file).graph.output}
        with pytest.raises(ExportError, match=r"onnxruntime: values go .*: if x.sum\(\) > 1:; give"):
            run_whole(file, small, outputs)
    said = [entry["message"].partition(": ")[2] for entry in manifest["asserts"]]
    assert sorted(said) == ["if x.mean() > 0:", "if x.sum() > 1:", "if x.sum() > 1:"]


class Counting(nn.Module):
    """`one_hot` asserts something of its own where it is taken apart."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        best = self.first(x).argmax(1)
        return self.last(nn.functional.one_hot(best, 4).to(x.dtype))


def test_what_torch_itself_asserts_is_not_the_stages(tmp_path: Path) -> None:
    pipe = pd2bw_fx.split(Counting().eval(), (torch.randn(4, 4),), cluster=2, costs="analytic")
    assert pipe.export_onnx(tmp_path / "onnx")["asserts"] == []


class Sized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.last(hidden * 10 if x.shape[0] > 2 else hidden)


def test_a_batch_size_for_which_the_model_was_not_traced_is_refused(tmp_path: Path) -> None:
    pipe = pd2bw_fx.split(Sized().eval(), (torch.randn(4, 4),), cluster=2, costs="analytic")
    manifest = pipe.export_onnx(tmp_path / "onnx")

    assert manifest["batch_sizes"] == [3, None]
    run_onnx(tmp_path / "onnx", {"x": torch.randn(3, 4)})
    with pytest.raises(InputError, match=r"'x' has 2 samples; the model was traced for 3 or more: pass 3"):
        run_onnx(tmp_path / "onnx", {"x": torch.randn(2, 4)})
    with pytest.raises(InputError, match=r"'x' has 2 samples in one of 3 microbatches; .* pass 3 for each"):
        run_onnx_processes(tmp_path / "onnx", {"x": torch.randn(6, 4)}, num_microbatches=3)
