"""Models as ONNX folders of two stages, held against torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import pd2bw_fx
from pd2bw_fx.passes.export_onnx import run_onnx


class Ending(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.last(self.first(x)))


def exported(model: nn.Module, folder: Path, *example: Tensor, **options: Any) -> Path:
    opset = options.pop("opset", 20)
    pipe = pd2bw_fx.split(model, example, cluster=2, num_stages=2, costs="analytic", **options)
    pipe.export_onnx(folder, opset=opset)
    return folder


def assert_alike(folder: Path, model: nn.Module, atol: float = 1e-6, **inputs: Tensor) -> None:
    with torch.no_grad():
        expected = model(**inputs)
    results = expected if isinstance(expected, tuple) else (expected,)
    for found, result in zip(run_onnx(folder, inputs).values(), results, strict=True):
        np.testing.assert_allclose(found, result.numpy(), rtol=1e-4, atol=atol)


class Counting(nn.Module):
    """What is computed of integers, as they come in."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(4, 4), nn.Linear(4, 4), function

    def forward(self, x: Tensor, whole: Tensor) -> Any:
        return self.last(self.first(x)), *self.function(whole)
