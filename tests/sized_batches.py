"""Batches of a given number of samples, and pipelines that are traced with them, for tests of batch sizes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import pd2bw_fx


def rows(count: int) -> Tensor:
    """(count, 8), always the same numbers for one count"""
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(count))


def split(model: nn.Module, count: int) -> pd2bw_fx.Pipeline:
    """Traces the model with `count` samples and splits it in two stages."""
    return pd2bw_fx.split(model, rows(count), cluster=2, num_stages=2, costs="analytic")


def whole_again(windows: Tensor, side: int, height: int, width: int) -> Tensor:
    """Swin's window_reverse: the batch is told from the number of windows by a true division."""
    count = int(windows.shape[0] / (height * width / side / side))
    found = windows.view(count, height // side, width // side, side, side, -1)
    return found.transpose(2, 3).reshape(count, height, width, -1)
