"""A front end that ends by a mistake of this package's own is told of, and the next one traces the model."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

from pd2bw_fx.passes.trace import front_ends, trace


class Flat(nn.Linear):
    """Is right for one batch size alone, which one front end refuses and another notes."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.reshape(4, 3))


def test_a_mistake_of_ours_is_a_warning_that_asks_for_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_ends, "_notes_on", {}.__getitem__)

    with pytest.warns(
        UserWarning, match=r"'export.*' ended with KeyError: .*\(front_ends\.py:\d+\).*report it"
    ):
        traced = trace(nn.Linear(3, 3), (torch.randn(4, 3),))

    assert traced.report.tracer == "fx"


def test_a_refusal_is_no_mistake_of_ours() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        traced = trace(Flat(3, 3), (torch.randn(4, 3),))

    assert traced.report.attempts
