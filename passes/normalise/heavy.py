"""Operators on inputs alone that stages should not each compute again.

Operators with one step for each element (masks, positions, casts) are computed faster than their results are
sent. Products, searches and transforms take many steps for each element, and reductions turn much into
little. Name and size decide, not time: a graph must be the same wherever it is traced.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import fx

from .nodes import operator_name

_PRODUCTS = frozenset({
    "linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "convolution", "conv1d", "conv2d",
    "conv3d", "scaled_dot_product_attention", "embedding", "layer_norm", "batch_norm", "group_norm",
})  # fmt: skip
_MANY_STEPS = frozenset({
    "cdist", "pdist", "topk", "sort", "argsort", "msort", "kthvalue", "median", "nanmedian", "mode",
    "quantile", "nanquantile", "unique_consecutive", "histc", "stft", "istft", "cholesky", "inverse", "svd",
    "qr", "det", "logdet", "slogdet", "matrix_exp", "matrix_power", "pinverse", "lu_solve",
    "triangular_solve", "dot", "mv", "tensordot", "chain_matmul", "cov", "corrcoef", "conv_transpose1d",
    "conv_transpose2d", "conv_transpose3d", "grid_sampler", "grid_sample", "interpolate",
    "local_response_norm",
})  # fmt: skip
_MANY_STEPS_BEGIN = (
    "fft_", "linalg_", "max_pool", "avg_pool", "adaptive_", "lp_pool", "upsample_", "_upsample",
)  # fmt: skip
_REDUCTIONS = frozenset({
    "sum", "mean", "prod", "any", "all", "amax", "amin", "max", "min", "argmax", "argmin", "aminmax", "std",
    "var", "std_mean", "var_mean", "logsumexp", "norm", "count_nonzero", "nansum", "nanmean",
})  # fmt: skip

_STEPS = 16  # for each element, of an operator with many steps
_HEAVY_STEPS = 2**20  # about a millisecond of one core: more than a message's latency


def is_product(node: fx.Node) -> bool:
    """Whether neither the operator nor what is computed from it is ever computed twice, at any size."""
    return operator_name(node) in _PRODUCTS


def is_heavy(node: fx.Node, taken: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> bool:
    """Whether its result is faster sent than computed; `taken` and `given` are operands and results."""
    name = operator_name(node)
    if name in _MANY_STEPS or name.startswith(_MANY_STEPS_BEGIN) or _is_of_others(node):
        steps = _STEPS * (_num_elements(taken) + _num_elements(given))
    elif name in _REDUCTIONS and len(node.all_input_nodes) == 1:  # max of two tensors reduces nothing
        steps = _num_elements(taken)
    else:
        return False
    return steps - _num_elements(given) > _HEAVY_STEPS


def _is_of_others(node: fx.Node) -> bool:
    """Whether a library or the model's author registered the operator, so that its cost is unknown."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace not in ("aten", "prims")


def _num_elements(tensors: Sequence[torch.Tensor]) -> int:
    """Returns the number of elements at the example's sizes, or at the bounds of sizes that values decide."""
    return sum(
        math.prod(size if isinstance(size, int) else size.node.hint or 1 for size in tensor.shape)
        for tensor in tensors
    )
