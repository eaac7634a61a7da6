"""Batches for training the model mlp with local processes."""

from __future__ import annotations

from typing import Any

from torch import nn

ROWS, UPDATES = 4, 4


def mlp_batches(model: nn.Module) -> list[Any]:
    drawn = model.example_inputs(batch_size=UPDATES * ROWS)  # type: ignore[operator]
    return list(zip(*(tensor.split(ROWS) for tensor in drawn), strict=True))
