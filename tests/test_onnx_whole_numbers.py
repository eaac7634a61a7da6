"""Whole numbers in exported files: quotients, remainders and shifts are torch's to the last digit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pd2bw_fx.passes.export_onnx import run_onnx
from tests.onnx_exports import Counting, Ending, assert_alike, exported


def test_quotient_and_remainder_are_two_outputs(tmp_path: Path) -> None:
    def places(h: Tensor) -> tuple[Tensor, ...]:
        best = h.argmax(1)
        return h, best // 2, best % 2

    model = Ending(places).eval()
    assert_alike(exported(model, tmp_path / "onnx", torch.randn(3, 4)), model, x=torch.randn(7, 4))


def _quotients(whole: Tensor) -> tuple[Tensor, ...]:
    divisors = torch.tensor([3, -7, 1, -1])
    return (
        torch.div(whole, 86400, rounding_mode="floor"),
        torch.div(whole, divisors, rounding_mode="floor"),
        whole.div(divisors, rounding_mode="trunc"),
        torch.div(whole, -1, rounding_mode="trunc"),
    )


def _quotients_of_a_number(whole: Tensor) -> tuple[Tensor, ...]:
    divided = torch.div(2**40 + 1, whole.long(), rounding_mode="floor")
    return -7 // whole, 7 % whole, divided, torch.div(-7, whole, rounding_mode="trunc")


def _shifts(whole: Tensor) -> tuple[Tensor, ...]:
    places = torch.tensor([0, 4], dtype=whole.dtype)
    return (
        whole >> 4,
        whole << 3,
        torch.bitwise_right_shift(whole, 40),
        whole.unsqueeze(-1) >> places & 15,
        (whole.unsqueeze(-1) << places),
    )


_NUMBERS = torch.tensor([[1764233279999, -16777217, 16777219, -(2**40) - 1], [7, -7, -1, 0]])


@pytest.mark.parametrize(
    ("function", "whole"),
    [
        (_quotients, _NUMBERS),
        (_quotients, _NUMBERS.int()),
        (_quotients_of_a_number, torch.tensor([3, -7, 1, -1])),
        (_quotients_of_a_number, torch.tensor([3, -7, 1, -1], dtype=torch.int32)),
        (_shifts, torch.tensor([[255, 17, 128, 3], [0, 1, 2, 99]], dtype=torch.uint8)),
        (_shifts, torch.tensor([[-1, 2**31 - 1, -(2**31), 3], [-17, 1, 2, 99]], dtype=torch.int32)),
    ],
)
def test_whole_numbers_are_exact(function: Any, whole: Tensor, tmp_path: Path) -> None:
    model = Counting(function).eval()
    folder = exported(model, tmp_path / "onnx", torch.randn(2, 4), torch.ones_like(whole))

    found = list(run_onnx(folder, {"x": torch.randn(2, 4), "whole": whole}).values())
    for array, result in zip(found[1:], function(whole), strict=True):
        assert array.dtype == result.numpy().dtype
        np.testing.assert_array_equal(array, result.numpy())
