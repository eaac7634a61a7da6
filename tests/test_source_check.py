"""A stage's source computes with tensors and does nothing else, whoever has written it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import pd2bw_fx
from pd2bw_fx.errors import PlanMismatchError
from pd2bw_fx.module import build_module
from pd2bw_fx.source_check import check_source

_STAGE = """
import torch
from torch import Tensor, nn


class Half(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x / 2

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient / 2


class Stage(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Half.apply(x)
"""


def test_a_custom_autograd_function_is_allowed() -> None:
    check_source(_STAGE, "stage_0.py")


@pytest.mark.parametrize(
    "written",
    ["nn.functional.gelu(x)", "torch.nn.functional.gelu(x)", "torch.nn.GELU()(x)", "x * math.sqrt(2)"],
)
def test_what_nn_f_and_math_have_may_be_written_out(written: str) -> None:
    imports = "import torch.nn as nn\nfrom torch import Tensor\nfrom torch.nn import functional as F\n"
    source = _STAGE.replace("from torch import Tensor, nn\n", imports).replace("x / 2", written)

    check_source(source, "stage_0.py")


@pytest.mark.parametrize(
    ("written", "instead", "fault"),
    [
        ("x / 2", "torch.load(x)", "'torch.load'"),
        ("x / 2", "torch.from_file('x', True, 8)", "'torch.from_file'"),
        ("x / 2", "torch.import_ir_module(x)", "'torch.import_ir_module'"),
        ("x / 2", "torch.compile(x)", "'torch.compile'"),
        ("x / 2", "torch.ops.load_library('x.so')", "'torch.ops.load_library'"),
        ("x / 2", "torch.ops.import_module('os')", "'torch.ops.import_module'"),
        ("x / 2", "torch.ops.aten.save(x, 'file')", "'torch.ops.aten.save'"),
        ("x / 2", "torch.ops.aten.add.default.py_impl(x)", "'torch.ops.aten.add.default.py_impl'"),
        ("x / 2", "torch.fft.torch.load(x)", "the module 'torch.fft.torch'"),
        ("x / 2", "nn.init.torch.load(x)", "the module 'nn.init.torch'"),
        ("x / 2", "F.importlib.import_module('os')", "the module 'F.importlib'"),
        ("x / 2", "torch.nn.functional.importlib.import_module('os')", "the module 'F.importlib'"),
        ("x / 2", "nn.functional.torch.load(x)", "the module 'F.torch'"),
        ("x / 2", "getattr(torch.nn, 'Module')", "the module 'nn' by itself"),
        ("x / 2", "[torch][0].load(x)", "the module 'torch' by itself"),
        ("x / 2", "[torch.ops][0].load_library(x)", "the module 'torch.ops' by itself"),
        ("x / 2", "x.numpy().tofile('file')", "the attribute 'tofile'"),
        ("x / 2", "x.numpy()", "the attribute 'numpy'"),
        ("x / 2", "(i for i in x).gi_frame", "the attribute 'gi_frame'"),
        ("x / 2", "getattr((i for i in x), 'gi_frame')", "the attribute 'gi_frame'"),
        ("x / 2", "torch.autograd.profiler.profile()", "the module 'torch.autograd'"),
        ("x / 2", "torch.autograd.graph.save_on_cpu()", "the module 'torch.autograd'"),
        ("x / 2", "torch.utils.data.get_worker_info()", "the module 'torch.utils'"),
        ("x / 2", "x.__class__", "the attribute '__class__'"),
        ("x / 2", "getattr(x, '__class__')", "the attribute '__class__'"),
        ("x / 2", "[getattr][0](x, '__class__')", "getattr by itself"),
        ("x / 2", "getattr(torch, 'load')", "the module 'torch' by itself"),
        ("x / 2", "torch.autograd.Function.__base__", "the module 'torch.autograd'"),
        ("x / 2", "torch.add.__self__", "the attribute '__self__'"),
        ("x / 2", "open(x)", "the name 'open'"),
        ("x / 2", "(lambda: x)()", "Lambda is used"),
        ("import torch\n", "import os\n", "'import os'"),
        ("@staticmethod\n    def forward", "@torch.jit.script\n    def forward", "a decorator"),
        ("@staticmethod\n    def forward", "@property\n    def forward", "a decorator"),
        ("class Stage", "@staticmethod\nclass Stage", "a decorator"),
    ],
)
def test_anything_else_is_refused_with_its_line(written: str, instead: str, fault: str) -> None:
    source = _STAGE.replace(written, instead, 1)
    assert source != _STAGE

    with pytest.raises(PlanMismatchError, match=r"^stage_0\.py, line \d+: ") as raised:
        check_source(source, "stage_0.py")

    assert fault in str(raised.value)


def test_a_builtin_is_not_there_under_a_name_that_another_function_has(tmp_path: Path) -> None:
    program = pd2bw_fx.split(nn.Sequential(nn.Linear(2, 2)), torch.ones(2, 2), cluster=1).programs[0]
    file = tmp_path / "written"
    other = "def other(open):\n    return open\n\n\nclass "
    source = program.source.replace("class ", other, 1)
    source = source.replace("        input_ = ", f"        open({str(file)!r}, 'w')\n        input_ = ", 1)
    module = build_module(
        replace(program, source=source), {"0.weight": torch.ones(2, 2), "0.bias": torch.ones(2)}
    )

    with pytest.raises(NameError, match="open"):
        module(torch.ones(2, 2))

    assert not file.exists()


def test_a_source_that_was_checked_is_not_checked_again() -> None:
    assert check_source(_STAGE, "stage_0.py") is check_source(_STAGE, "stage_0.py")
