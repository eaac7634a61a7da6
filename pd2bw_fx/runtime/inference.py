"""Leaves a caller's torch.inference_mode() where the engine begins: its tensors could not be trained on."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor


def ordinary_tensors() -> contextlib.AbstractContextManager[Any]:
    """Makes tensors that are created inside ordinary ones, whatever the caller's mode."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext()


def ordinary(tensor: Tensor) -> Tensor:
    """Returns the tensor, or a copy of one that was made in inference mode."""
    return tensor.clone() if tensor.is_inference() else tensor
