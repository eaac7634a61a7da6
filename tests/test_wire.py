"""Messages carry a tensor's own elements, whatever it is a part of, and nothing of it is lost."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor, nn
from torch.backends import cudnn

from pd2bw_fx.runtime.wire import decoded, encoded, encoded_with_code

TABLE = torch.randn(1000, 64)


@pytest.mark.parametrize("written", [encoded, encoded_with_code])
def test_a_part_of_a_large_tensor_travels_without_the_rest(written: Callable[[object], bytes]) -> None:
    parts = {f"part {i}": TABLE[8 * i : 8 * i + 8] for i in range(4)}

    data = written(parts)

    assert len(data) < 4 * 8 * 64 * 4 + 2000
    assert all(torch.equal(tensor, parts[name]) for name, tensor in decoded(data).items())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5), torch.empty(0, 3), torch.arange(5), torch.tensor([True, False]),
        torch.randn(3, 4).to(torch.bfloat16), torch.randn(3, 4).half(),
        torch.randn(2, 2, dtype=torch.complex64),
        torch.randn(3).to(torch.float8_e4m3fn), torch.randn(3, dtype=torch.complex128).conj(),
        torch.randn(4, 5).t(), torch.randn(1, 4).expand(3, 4), torch.randn(9)[2:8:3],
        torch.randn(3, 3)[:, -1:].expand(3, 3), torch.arange(4)[2:3].expand(4),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(4, 3, 4, 5).to(memory_format=torch.channels_last)[1:3],
        torch.randn(3, requires_grad=True), torch.eye(3).to_sparse(),
    ],
)  # fmt: skip
def test_a_tensor_arrives_as_it_was(tensor: Tensor) -> None:
    found = decoded(encoded([tensor, tensor]))

    assert found[0] is found[1]
    assert (found[0].dtype, found[0].shape, found[0].requires_grad) == (
        tensor.dtype,
        tensor.shape,
        tensor.requires_grad,
    )
    same = found[0].to_dense() if found[0].is_sparse else found[0].resolve_conj()
    assert torch.equal(same.to(torch.complex128), tensor.to_dense().to(torch.complex128))
    if tensor.dim() == 4:
        assert same.is_contiguous(memory_format=torch.channels_last)
    if not tensor.requires_grad and not tensor.is_sparse:
        found[0].zero_()  # its memory is its own
        assert tensor.numel() == 0 or bool((tensor.to_dense().to(torch.complex128) != 0).any())


def test_parameters_and_code_travel_too() -> None:
    layer = nn.Linear(3, 2)
    found, doubled = decoded(encoded_with_code((layer, lambda x: 2 * x)))

    assert isinstance(found.weight, nn.Parameter)
    assert torch.equal(found.weight, layer.weight)
    assert doubled(21) == 42


def test_errors_in_code_that_travels_name_its_file_and_line() -> None:
    def fails() -> Any:
        return [1 // zero for zero in (0,)]

    with pytest.raises(ZeroDivisionError) as expected:
        fails()
    with pytest.raises(ZeroDivisionError) as raised:
        decoded(encoded_with_code(fails))()

    assert [(each.path, each.lineno) for each in raised.traceback[1:]] == [
        (each.path, each.lineno) for each in expected.traceback[1:]
    ]
    assert raised.traceback[-1].path == Path(__file__)


def test_code_may_name_modules_of_torch_that_pickle_refuses() -> None:
    def set_up() -> Any:
        return torch.backends.cudnn.allow_tf32, torch.backends.fp32_precision, torch.ops.aten.add(1, 2), cudnn

    assert decoded(encoded_with_code(set_up))() == (True, "none", 3, torch.backends.cudnn)


PLUGIN = """
import torch
STEP = 0.5
class Halving(torch.optim.SGD):
    def rate(self):
        return STEP * self.param_groups[0]["lr"]
def made(parameters):
    return Halving(parameters, lr=1.0)
"""


@pytest.mark.parametrize("is_hidden", [False, True], ids=["no module", "another module"])
def test_code_of_a_module_that_was_loaded_by_its_path_travels_too(
    is_hidden: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plugin.py").write_text(PLUGIN)
    if is_hidden:  # on the path is another file of this name
        (tmp_path / "path").mkdir()
        (tmp_path / "path" / "a_plugin.py").write_text("")
        monkeypatch.syspath_prepend(tmp_path / "path")
    spec = importlib.util.spec_from_file_location("a_plugin", tmp_path / "plugin.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "a_plugin", module)
    spec.loader.exec_module(module)

    data = encoded_with_code((module.made, module, lambda parameters: module.made(parameters)))
    monkeypatch.delitem(sys.modules, "a_plugin")

    made, itself, indirectly = decoded(data)
    for factory in (made, itself.made, indirectly):
        assert factory([torch.zeros(1, requires_grad=True)]).rate() == 0.5
    assert not cloudpickle.list_registry_pickle_by_value()


def test_what_can_be_imported_travels_by_name() -> None:
    data = encoded_with_code((torch.optim.SGD, pytest.MonkeyPatch, cloudpickle.dumps, TABLE.sum, json))

    assert len(data) < 1000 + len(encoded(TABLE))
    assert decoded(data)[:3] == (torch.optim.SGD, pytest.MonkeyPatch, cloudpickle.dumps)
