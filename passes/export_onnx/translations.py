"""Translates a few things itself, and lets torch do once what it does many times for each file.

It reads the source of some five hundred translations to ONNX, which is half of the time that a small stage
takes, and goes through all operators of its dispatcher for each namespace, which is a sixth of the rest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._export import utils

from .grouped import grouped_translations


@contextmanager
def translations_read_once() -> Iterator[None]:
    from torch.onnx._internal.exporter._registration import ONNXRegistry  # needs onnx

    of_opset = _once(ONNXRegistry.from_torchlib)

    def copied(opset_version: int | None = None) -> ONNXRegistry:
        """Returns a copy, because an export may add to it."""
        known = of_opset() if opset_version is None else of_opset(opset_version)
        registry = ONNXRegistry()
        registry._opset_version = known.opset_version
        registry.functions = {target: list(found) for target, found in known.functions.items()}
        return registry

    with patch.object(ONNXRegistry, "from_torchlib", staticmethod(copied)):
        yield


@functools.cache
def _once(read: Callable[..., Any]) -> Callable[..., Any]:
    return functools.cache(read)


@contextmanager
def operators_listed_once() -> Iterator[None]:
    """Goes through the operators of the dispatcher once, in a block that registers none."""
    with patch.object(utils, "_materialize_cpp_cia_ops", functools.cache(utils._materialize_cpp_cia_ops)):
        yield


def own_translations() -> dict[Any, Callable[..., Any]]:
    """Returns translations that stand in for torch's own."""
    aten = torch.ops.aten
    puts = {target.default: _index_put for target in (aten.index_put, aten._unsafe_index_put)}
    return {aten.scalar_tensor.default: _scalar_tensor, **puts, **grouped_translations()}


def _scalar_tensor(
    s: Any, dtype: int = 1, layout: str = "", device: str = "", pin_memory: bool = False
) -> Any:
    """Makes a number a tensor of its type; torch's own translation casts it from a float32."""
    import onnx_ir as ir
    from onnxscript import opset18 as op

    if isinstance(s, int | float | bool):
        return op.Constant(value=ir.tensor(s, dtype=ir.DataType(dtype)))
    return op.Cast(s, to=dtype)


def _index_put(self: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
    """Makes int32 places int64, which ONNX's ScatterND asks for; torch.istft has them within."""
    import onnx_ir as ir
    from onnxscript import opset18 as op
    from onnxscript.function_libs.torch_lib.ops import core

    places = list(indices)
    for at, index in enumerate(indices):
        if index is not None and index.dtype is ir.DataType.INT32:
            places[at] = op.Cast(index, to=ir.DataType.INT64)
            places[at].shape, places[at].dtype = index.shape, ir.DataType.INT64  # by which it is translated
    return core.aten_index_put(self, places, values, accumulate)
