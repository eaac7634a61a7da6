"""A stage's source computes with tensors and does nothing else, whoever has written it."""

from __future__ import annotations

import pytest

from pd2bw_fx.errors import PlanMismatchError
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
    ("written", "instead", "fault"),
    [
        ("x / 2", "torch.load(x)", "'torch.load'"),
        ("x / 2", "torch.autograd.profiler.profile()", "the module 'torch.autograd'"),
        ("x / 2", "torch.autograd.graph.save_on_cpu()", "the module 'torch.autograd'"),
        ("x / 2", "torch.utils.data.get_worker_info()", "the module 'torch.utils'"),
        ("x / 2", "x.__class__", "the attribute '__class__'"),
        ("x / 2", "getattr(x, '__class__')", "the attribute '__class__'"),
        ("x / 2", "getattr(torch, 'load')", "getattr of 'torch'"),
        ("x / 2", "torch.autograd.Function.__base__", "the attribute '__base__'"),
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
