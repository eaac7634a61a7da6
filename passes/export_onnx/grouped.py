"""Grouped matrix products in ONNX, which has none: the product of each group of rows by itself.

rows (rows, in), weights (groups, in, out), ends (groups)

    rows[0 : ends[0]] @ weights[0], rows[ends[0] : ends[1]] @ weights[1], ..    (rows, out)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from pd2bw_fx.grouped_products import HUGGING_FACES

_INT64 = 7  # of onnx.TensorProto
_BEHIND_ALL = 2**63 - 1


def grouped_translations() -> dict[Any, Callable[..., Any]]:
    """Returns the translations by operator, Hugging Face's among them where it is registered."""
    operators = [torch.ops.aten._grouped_mm]
    namespace, _, name = HUGGING_FACES.partition("::")
    if hasattr(getattr(torch.ops, namespace), name):
        operators.append(getattr(getattr(torch.ops, namespace), name))
    return {operator.default: _grouped for operator in operators}


def _grouped(self: Any, mat2: Any, offs: Any = None, bias: Any = None, out_dtype: int = -1) -> Any:
    """Rows behind the last group are zeros, where torch leaves what its memory has."""
    from onnxscript import opset18 as op

    num_groups = mat2.shape[0]
    if offs is None or len(self.shape) != 2 or len(mat2.shape) != 3 or not isinstance(num_groups, int):
        raise NotImplementedError("a grouped product is translated for rows in groups, as many as are fixed")
    if bias is not None or out_dtype not in (None, -1):
        raise NotImplementedError("a grouped product is translated without a bias or a type of its own")
    bounds = op.Concat(_numbers(0), op.Cast(offs, to=_INT64), _numbers(_BEHIND_ALL), axis=0)
    at = [op.Gather(bounds, _numbers(place)) for place in range(num_groups + 2)]
    groups = [op.Slice(self, start, end, _numbers(0)) for start, end in itertools.pairwise(at)]
    products = [
        op.MatMul(rows, op.Gather(mat2, op.Constant(value_int=group)))
        for group, rows in enumerate(groups[:-1])
    ]
    shape = op.Concat(op.Shape(groups[-1], start=0, end=1), op.Shape(mat2, start=2), axis=0)
    return op.Concat(*products, op.Expand(op.CastLike(0.0, self), shape), axis=0)


def _numbers(*numbers: int) -> Any:
    from onnxscript import opset18 as op

    return op.Constant(value_ints=numbers)
