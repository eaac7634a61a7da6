"""A pipeline's training held against the rule on the whole model in one process."""

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


def assert_trained_by_the_rule(
    model: nn.Module, pipe: pd2bw_fx.Pipeline, batches: Sequence[Any], **reference: Any
) -> None:
    """2BW on local processes in float64, two microbatches an update: losses, parameters and buffers are
    those of `train_reference` (which takes `reference`: a loss_fn)."""
    settings: dict[str, Any] = {"optimizer": _sgd, "microbatches_per_update": 2}
    expected = train_reference(model, batches, **settings, **reference)
    result = pipe.train_local(batches, **settings)

    assert result.losses == pytest.approx(expected.losses, rel=1e-12)
    for name, tensor in expected.state_dict.items():
        torch.testing.assert_close(pipe.state_dict()[name], tensor, rtol=1e-12, atol=1e-15, msg=name)
