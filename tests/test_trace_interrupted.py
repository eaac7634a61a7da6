"""Ctrl-C while a model is traced is no fault of the model's."""

from __future__ import annotations

import contextlib
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn

from pd2bw_fx.errors import TraceError
from pd2bw_fx.passes.trace import front_ends, trace


class Choosing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if x.sum() > 0 else x


def test_what_torch_raises_over_an_interrupt_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def imported(*_args: Any, **_kwargs: Any) -> NoReturn:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise AttributeError("module 'torch._dynamo' has no attribute 'exc'")  # noqa: B904

    monkeypatch.setattr(front_ends, "export", imported)
    with pytest.raises(KeyboardInterrupt):
        trace(Choosing(), (torch.randn(3, 4),))


def test_one_that_was_answered_before_is_none() -> None:
    with contextlib.suppress(KeyboardInterrupt):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            with pytest.raises(TraceError, match="Choosing cannot be traced"):
                trace(Choosing(), (torch.randn(3, 4),))
            raise
