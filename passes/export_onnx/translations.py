"""Reads torch's translations to ONNX once in a process.

For each file that it writes, torch reads the source of some five hundred functions again, which is half of
the time that a small stage takes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch


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
