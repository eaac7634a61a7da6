"""Finds types and shapes of values from several runs, with a symbol for each open size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from pd2bw_fx.graph import TensorSpec
from pd2bw_fx.onnx_session import Array

from .shapes import Shape, inferred_shapes, shaped_by_values

if TYPE_CHECKING:
    import onnx_ir as ir

    from .trial import Trial

_Sizes = tuple[int, ...]  # the sizes of one axis in the runs


def specs_of(trial: Trial, model: ir.Model) -> dict[str, TensorSpec | None]:
    """Returns shape and type of each value, or None for no tensor and for types that torch lacks.

    An input axis that differs between runs gets a symbol, with the file's name for it. Any other axis is the
    first of these that there is: the number that the file fixes; the symbol that inference finds; the symbol
    of the only input axis with these sizes; a symbol of its own. It always gets its own if its size depends
    on values of inputs, or if no further run tells it from another axis. A value whose rank differs between
    runs has no shape.
    """
    inputs, symbols = open_axes(model, trial.examples)
    known, by_values = inferred_shapes(model, inputs), shaped_by_values(model)
    is_told = trial.further is not None or len(symbols) < 2
    if trial.further is not None:
        symbols = {
            symbol: (*sizes, trial.further[name][axis])
            for symbol, sizes in symbols.items()
            for name, axis in [_place(inputs, symbol)]
        }
    specs: dict[str, TensorSpec | None] = {}
    for name in trial.runs[0]:
        arrays = [run[name] for run in trial.runs]
        dtype = _TORCH_TYPES.get(arrays[0].dtype.name) if isinstance(arrays[0], np.ndarray) else None
        further = [shapes for shapes in (trial.further, trial.at_one) if shapes is not None]
        if dtype is None or any(name not in shapes for shapes in further):
            specs[name] = None
            continue
        seen = [array.shape for array in arrays]
        seen += [trial.further[name]] if trial.further is not None else []
        numbers = {len(each) for each in seen} | ({len(trial.at_one[name])} if trial.at_one else set())
        shape: tuple[int | str, ...] | None = inputs.get(name)
        if shape is None and len(numbers) == 1:
            candidates = symbols if is_told and name not in by_values else {}
            shape = _shape(name, seen, known.get(name), symbols, candidates, name in by_values)
        specs[name] = TensorSpec(shape, dtype, False, tuple(arrays[0].shape))
    return specs


def open_axes(
    model: ir.Model, examples: Sequence[Mapping[str, Array]]
) -> tuple[dict[str, tuple[int | str, ...]], dict[str, _Sizes]]:
    """Returns the shapes of the inputs, and the sizes of each of their symbols on the examples."""
    symbols: dict[str, _Sizes] = {}
    inputs: dict[str, tuple[int | str, ...]] = {}
    for value in model.graph.inputs:
        name = value.name or ""
        inputs[name] = _shape_of_input(value, [np.asarray(each[name]) for each in examples], symbols)
    return inputs, symbols


def _place(inputs: Mapping[str, tuple[int | str, ...]], symbol: str) -> tuple[str, int]:
    return next((name, shape.index(symbol)) for name, shape in inputs.items() if symbol in shape)


def _shape_of_input(
    value: ir.Value, arrays: Sequence[Array], symbols: dict[str, _Sizes]
) -> tuple[int | str, ...]:
    """Adds the symbols that it finds; unnamed axes share one where position and sizes are equal."""
    shape: list[int | str] = []
    for axis, sizes in enumerate(zip(*(array.shape for array in arrays), strict=True)):
        declared = None if value.shape is None else value.shape[axis]
        if len(set(sizes)) == 1 or isinstance(declared, int):
            shape.append(sizes[0])
            continue
        name = None if declared is None else declared.value
        if name is None:
            end = f"_axis_{axis}"
            same = (s for s, found in symbols.items() if found == sizes and s.endswith(end))
            name = next(same, f"{value.name}{end}")
        symbols.setdefault(name, sizes)
        shape.append(name)
    return tuple(shape)


def _shape(
    name: str,
    seen: Sequence[tuple[int, ...]],
    known: Shape | None,
    symbols: Mapping[str, _Sizes],
    candidates: Mapping[str, _Sizes],
    goes_by_values: bool,
) -> tuple[int | str, ...]:
    """Returns a shape; `candidates` are the symbols that an axis may be given by its sizes alone."""
    shape: list[int | str] = []
    for axis, sizes in enumerate(zip(*seen, strict=True)):
        is_known = known is not None and len(known) == len(seen[0])
        told = known[axis] if known is not None and is_known else None
        is_same = len(set(sizes)) == 1
        alike = [symbol for symbol, found in candidates.items() if found == sizes]
        if is_same and (told == sizes[0] or not (is_known or goes_by_values)):
            shape.append(sizes[0])
        elif isinstance(told, str) and symbols.get(told) == sizes:
            shape.append(told)
        elif len(alike) == 1:
            shape.append(alike[0])
        else:
            shape.append(f"{name}_axis_{axis}")
    return tuple(shape)


_TORCH_TYPES: Mapping[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        "float16", "float32", "float64", "bool",
        "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    )
}  # fmt: skip
