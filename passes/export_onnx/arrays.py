"""Tensors as arrays, which onnxruntime takes, and complex ones as pairs in a last dimension."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pd2bw_fx.errors import ExportError
from pd2bw_fx.onnx_session import Array


def to_array(name: str, value: Tensor | Array) -> Array:
    if not isinstance(value, Tensor):
        return np.asarray(value)
    if value.dtype is torch.bfloat16:
        raise ExportError(
            f"{name} is bfloat16, which cannot be given to onnxruntime as an array; convert the model first "
            "(model.float() or model.half())"
        )
    array: Array = value.detach().cpu().numpy()
    return array


def to_pairs(array: Array) -> Array:
    parts: Array = np.stack([array.real, array.imag], -1)
    return parts


def from_pairs(entry: Mapping[str, Any], array: Array) -> Array:
    """Returns what the manifest has an entry for as the model returns it: complex where the model's is."""
    if not entry.get("complex"):
        return array
    numbers: Array = np.ascontiguousarray(array).view(np.result_type(array.dtype, np.complex64))
    return numbers[..., 0]
