"""Compares results with what is expected, within a tolerance for their type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from pd2bw_fx.errors import ExportError
from pd2bw_fx.onnx_session import Array

from .arrays import to_array

# Relative to a tensor's largest entry, since kernels sum in different orders. From exact to coarse.
_TOLERANCES = {"float64": 1e-9, "float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
# A deep model that has not been trained may make so much of a rounding: its outputs have lost most digits.
_MOST_BY_ROUNDING = 1e-2
# The least scale that a difference is relative to: smaller numbers have lost digits on the way, or all of
# them where a kernel flushes them to 0.
_NEXT_TO_ZERO = {name: float(np.finfo(name).tiny / np.finfo(name).eps) for name in ("float64", "float32")}
# Numbers that stand for infinity, for instance in masked scores: the largest float16, powers of ten, and all
# above this. They must be equal, and are left out of the scale, where they would hide all other entries.
_FAR = 1e30
_STANDING_FOR_INFINITY = (float(np.finfo("float16").max), *(10.0**power for power in range(4, 30)))


@dataclass(frozen=True, slots=True)
class _Difference:
    """The largest entry of |found - expected|, absolute and relative to the largest entry expected."""

    absolute: float
    relative: float


def compare(
    found: Mapping[str, Array],
    expected: Mapping[str, Tensor],
    *,
    what: Mapping[str, str],
    tolerance: float | None,
    behind: Mapping[str, str] | None = None,
    rounding: Callable[[], Mapping[str, float]] | None = None,
) -> dict[str, float]:
    """Compares as `compare_arrays` does, with tensors that torch computed."""
    arrays = {name: to_array(name, tensor) for name, tensor in expected.items()}
    return compare_arrays(found, arrays, what=what, tolerance=tolerance, behind=behind, rounding=rounding)


def compare_arrays(
    found: Mapping[str, Array],
    expected: Mapping[str, Array],
    *,
    what: Mapping[str, str],
    tolerance: float | None,
    behind: Mapping[str, str] | None = None,
    rounding: Callable[[], Mapping[str, float]] | None = None,
) -> dict[str, float]:
    """Returns the largest difference for each name of `expected`, relative to the tensor's largest entry.

    `behind` is the coarsest type that a value was computed from: it is no more exact than that. Without a
    `tolerance`, a larger difference may be rounding if it is small, or faint beside the largest entry of all:
    then `rounding` is asked how far roundings may move each of them.
    Raises ExportError at the first one out of tolerance; `what` describes each name for the message.
    """
    differences = {}
    for name, array in expected.items():
        difference = _difference(found[name], array)
        allowed = _TOLERANCES.get(array.dtype.name, 0.0) if tolerance is None else tolerance
        if tolerance is None and allowed:
            allowed = max(allowed, _TOLERANCES.get((behind or {}).get(name, ""), 0.0))
        if not difference.relative <= allowed and tolerance is None and rounding is not None:
            is_faint = difference.absolute <= allowed * _largest_of(expected)
            if is_faint or difference.relative <= _MOST_BY_ROUNDING:
                allowed = max(allowed, rounding().get(name, 0.0))
        if not difference.relative <= allowed:
            raise ExportError(
                f"{what[name]} by {difference.absolute:.3g} ({difference.relative:.3g} of its largest entry) "
                f"where {allowed:.3g} is allowed; try another opset, or a larger tolerance if it is rounding "
                "(of equal values, such as a router's scores before training, topk may take others)"
            )
        differences[name] = difference.relative
    return differences


def largest(checks: list[dict[str, float]]) -> dict[str, float]:
    """Returns the largest difference of each tensor over several runs."""
    return {name: max(check[name] for check in checks) for name in (checks[0] if checks else ())}


def _largest_of(arrays: Mapping[str, Array]) -> float:
    sizes = (np.abs(array[np.abs(array) < _FAR]) for array in arrays.values() if array.dtype.kind == "f")
    return max((float(size.max(initial=0.0)) for size in sizes), default=0.0)


def relative_difference(found: Array, expected: Array) -> float:
    return _difference(found, expected).relative


def _difference(found: Array, expected: Array) -> _Difference:
    """Computes the difference: infinite where shapes or types differ, or where only one entry is finite."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return _Difference(float("inf"), float("inf"))
    wide = np.float64 if expected.dtype.kind in "fiub" else expected.dtype
    a, b = found.astype(wide), expected.astype(wide)
    finite = np.isfinite(b)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True) or not np.isfinite(a[finite]).all():
        return _Difference(float("inf"), float("inf"))
    apart, size = np.abs(a[finite] - b[finite]), np.abs(b[finite])
    floor = _NEXT_TO_ZERO.get(expected.dtype.name, 0.0)
    is_alone = (
        (size >= _FAR) | np.isin(size, _of_type(expected.dtype)) if expected.dtype.kind == "f" else size < 0
    )
    scale = np.where(is_alone, size, size[~is_alone].max(initial=floor))
    relative = np.divide(apart, scale, out=apart.copy(), where=scale > 0)
    return _Difference(float(apart.max(initial=0.0)), float(relative.max(initial=0.0)))


def _of_type(dtype: np.dtype[Any]) -> Array:
    """Returns the numbers that stand for infinity, rounded to this type."""
    with np.errstate(over="ignore"):
        return np.array(_STANDING_FOR_INFINITY).astype(dtype).astype(np.float64)
