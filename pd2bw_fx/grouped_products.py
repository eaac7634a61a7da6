"""Products of groups of rows with one matrix each, as of the rows that each expert is given.

    F.grouped_mm(rows, weights, offs=ends)    rows: (rows, in), weights: (groups, in, out), ends: (groups)

Torch's kernels take float32 and float16 too. Where only sizes are asked for, as in a trace, torch refuses all
types but bfloat16.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, _meta_registrations

_REFUSED = (torch.float32, torch.float16)
# Hugging Face's experts call this one in a trace, and torch's own in other runs.
HUGGING_FACES = "transformers::grouped_mm_fallback"

_of_bfloat16: Any = _meta_registrations._meta_grouped_mm_common
_result: Any = _meta_registrations._create_grouped_mm_output_tensor


@functools.wraps(_of_bfloat16)
def _of_all_types(mat_a: Tensor, mat_b: Tensor, *given: Any, **named: Any) -> Any:
    """What else the kernels require, strides of whole 16 bytes, a run with values tells."""
    if mat_a.dtype not in _REFUSED or mat_b.dtype != mat_a.dtype:
        return _of_bfloat16(mat_a, mat_b, *given, **named)
    return _result(mat_a, mat_b, named["offs"], named["out_dtype"])


def size_products_of_all_types() -> AbstractContextManager[Any]:
    """Has torch tell the sizes of grouped products of all types that its kernels take."""
    return patch.object(_meta_registrations, "_meta_grouped_mm_common", _of_all_types)


def compile_products_of_all_types() -> None:
    """Does so from now on: torch.compile asks whenever it compiles, which may be in any later call."""
    _meta_registrations._meta_grouped_mm_common = _of_all_types


def operations(rows: Tensor, weights: Tensor, *_: Any, **__: Any) -> int:
    """Counts a product's operations. The operand of two dimensions, if one has two, is cut into groups."""
    groups = rows.shape[0] if rows.dim() == 3 and weights.dim() == 2 else 1
    return 2 * rows.numel() * weights.shape[-1] // groups


def operations_of_gradients(rows: Tensor, weights: Tensor, *_: Any, **__: Any) -> int:
    """Counts those of the gradients of both operands, which Hugging Face's operator computes at once."""
    return 2 * operations(rows, weights)
