"""An optimizer for pipelines, and a comparison of their training with the rule on the whole model."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import pd2bw_fx
from pd2bw_fx.runtime.reference import train_reference

_sgd = functools.partial(torch.optim.SGD, lr=0.05)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def assert_trained_by_the_rule(
    model: nn.Module, pipe: pd2bw_fx.Pipeline, batches: Sequence[Any], **reference: Any
) -> None:
    """Trains with 2BW on local processes in float64, with two microbatches an update.

    Losses, parameters and buffers have to be those of `train_reference`, whose loss_fn is `reference`.
    """
    settings: dict[str, Any] = {"optimizer": _sgd, "microbatches_per_update": 2}
    expected = train_reference(model, batches, **settings, **reference)
    result = pipe.train_local(batches, **settings)

    assert result.losses == pytest.approx(expected.losses, rel=1e-12)
    for name, tensor in expected.state_dict.items():
        torch.testing.assert_close(pipe.state_dict()[name], tensor, rtol=1e-12, atol=1e-15, msg=name)
