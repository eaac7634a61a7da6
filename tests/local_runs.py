"""Batches and an optimizer for training the model mlp with local processes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

ROWS, UPDATES = 4, 4


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def mlp_batches(model: nn.Module) -> list[Any]:
    drawn = model.example_inputs(batch_size=UPDATES * ROWS)  # type: ignore[operator]
    return list(zip(*(tensor.split(ROWS) for tensor in drawn), strict=True))
