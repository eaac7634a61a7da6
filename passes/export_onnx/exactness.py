"""Finds how exact a value can be: no more than the coarsest type on the way to it."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from pd2bw_fx.graph import OperatorGraph, dtype_name

_BY_EXACTNESS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def coarsest(dtypes: Iterable[torch.dtype]) -> torch.dtype | None:
    """Returns the coarsest of the floating types among these."""
    floats = [dtype for dtype in dtypes if dtype in _BY_EXACTNESS]
    return max(floats, key=_BY_EXACTNESS.index, default=None)


def coarsest_behind(graph: OperatorGraph) -> dict[str, str]:
    """Returns the coarsest type on the way to each floating value.

    Inputs and parameters are exact, whatever their type.
    """
    behind: dict[str, torch.dtype] = {}
    for name, operator in graph.operators.items():
        dtypes = [spec.dtype for spec in operator.outputs]
        dtypes += [behind[value] for value in operator.reads if value in behind]
        if (found := coarsest(dtypes)) is not None:
            behind[name] = found
    return {name: dtype_name(dtype) for name, dtype in behind.items()}
