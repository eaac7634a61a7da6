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
