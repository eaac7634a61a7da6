"""A caller's torch.inference_mode() ends where the engine begins: none of its tensors could be trained on."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor


def ordinary_tensors() -> contextlib.AbstractContextManager[Any]:
    """Tensors that are made inside may be kept, whatever the caller's mode."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext()


def ordinary(tensor: Tensor) -> Tensor:
    """The tensor, or a copy where it was made in inference mode."""
    return tensor.clone() if tensor.is_inference() else tensor
