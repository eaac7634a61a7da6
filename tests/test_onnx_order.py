"""Files that are the whole model have its inputs and outputs in its order, whoever reads and makes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import pd2bw_fx
from pd2bw_fx.errors import InputError
from pd2bw_fx.passes.export_onnx import merge_onnx, run_onnx


class Matched(nn.Module):
    """`key` is read first and `keys` made first, on a stage before all others."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        keys = torch.relu(self.right(key))
        return self.left(query) + keys, keys


def test_inputs_and_outputs_of_a_file_can_be_given_and_taken_by_place(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, given = Matched().eval(), (torch.randn(3, 4), torch.randn(3, 4))
    constraints = pd2bw_fx.Constraints(stage_of={"right": 0, "left": 1})
    pipe = pd2bw_fx.split(model, given, cluster=2, costs="analytic", constraints=constraints)
    expected = [tensor.detach().numpy() for tensor in model(*given)]

    pipe.export_onnx(tmp_path / "files", form="both")
    merge_onnx(tmp_path / "files", tmp_path / "merged.onnx")

    for file in (tmp_path / "files" / "model.onnx", tmp_path / "merged.onnx"):
        session = onnxruntime.InferenceSession(file)
        names = [value.name for value in session.get_inputs()]
        fed = dict(zip(names, (tensor.numpy() for tensor in given), strict=True))
        assert names == ["query", "key"]
        assert [value.name for value in session.get_outputs()] == ["output_0", "output_1"]
        for found, right in zip(session.run(None, fed), expected, strict=True):
            assert np.asarray(found) == pytest.approx(right, abs=1e-6)
    found_by_name = run_onnx(tmp_path / "files", dict(zip(("query", "key"), given, strict=True)))
    assert list(found_by_name) == ["output_0", "output_1"]


class Unread(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
        return (self.second(self.first(x).tanh()) - y).square().mean()


def test_an_input_that_nothing_reads_may_be_given(tmp_path: Path) -> None:
    example = tuple(torch.randn(4, 6) for _ in range(3))
    pipe = pd2bw_fx.split(Unread(), example, cluster=2, num_stages=2, costs="analytic")
    pipe.export_onnx(tmp_path / "stages")
    merge_onnx(tmp_path / "stages", tmp_path / "whole.onnx")
    whole = onnx.load(tmp_path / "whole.onnx")
    whole.graph.input.append(onnx.helper.make_tensor_value_info("spare", onnx.TensorProto.FLOAT, [2]))
    onnx.save(whole, tmp_path / "whole.onnx")
    again = pd2bw_fx.split(tmp_path / "whole.onnx", cluster=2)

    given = dict(zip(("x", "mask", "y"), example, strict=True))
    expected = pipe.run(example)["loss"].item()
    for inputs in (given, {name: given[name] for name in ("x", "y")}):
        assert run_onnx(tmp_path / "stages", inputs)["loss"] == pytest.approx(expected, rel=1e-5)
        fed = {name: tensor.numpy() for name, tensor in inputs.items() if name != "mask"}
        for spare in {}, {"spare": np.zeros(2, np.float32)}:
            assert again.run(fed | spare)["loss"] == pytest.approx(expected, rel=1e-5)
    with pytest.raises(InputError, match="input 'masks' is no input of the model"):
        run_onnx(tmp_path / "stages", given | {"masks": example[1]})
