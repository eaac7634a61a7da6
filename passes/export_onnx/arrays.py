"""Tensors as arrays, which onnxruntime takes."""

from __future__ import annotations

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
