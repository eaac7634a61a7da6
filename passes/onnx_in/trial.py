"""Run the file node by node: the shape and type of every value, at one batch size and at another."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pd2bw_fx.errors import ExportError, InputError
from pd2bw_fx.graph import TensorSpec
from pd2bw_fx.onnx_session import Array, first_line, open_session

from .shapes import Shape, inferred_shapes, shaped_by_values

if TYPE_CHECKING:
    import onnx_ir as ir
    from onnxruntime import InferenceSession

# An open axis, by its name; one that has none by its input, or by its place.
_Axis = tuple[str, int]
_Batch = Mapping[str, Array]


def made_up_examples(model: ir.Model) -> list[list[_Batch]]:
    """Pairs of batches for the file's inputs, to be tried in this order.

    Each axis of a name has sizes of its own, each that has none too; or those without a name the same at the
    same place; or all open axes the same. Numbers are drawn, integers and flags are all one: a token that
    every vocabulary has, a mask that masks nothing. Raises InputError for an input whose type cannot be made
    up.
    """
    axes = [[_axes(value, way) for value in model.graph.inputs] for way in ("own", "place", "one")]
    tried: list[list[_Batch]] = []
    for way, named in enumerate(axes):
        if named in axes[:way]:
            continue
        order = list(dict.fromkeys(axis for value in named for axis in value if not isinstance(axis, int)))
        runs = range(2 if order else 1)
        sizes = [{axis: _size(number, run) for number, axis in enumerate(order)} for run in runs]
        pairs = list(zip(model.graph.inputs, named, strict=True))
        tried.append([{v.name or "": _made_up(v, shape, chosen) for v, shape in pairs} for chosen in sizes])
    return tried


def _axes(value: ir.Value, way: str) -> list[int | _Axis]:
    """Its fixed sizes, and its open axes: (name, -1), (input, axis), ("", axis), or ("", -1) for all."""
    found: list[int | _Axis] = []
    for axis, size in enumerate(value.shape or ()):
        if isinstance(size, int):
            found.append(size)
        elif way == "one":
            found.append(("", -1))
        elif size.value is not None:
            found.append((size.value, -1))
        else:
            found.append((value.name or "" if way == "own" else "", axis))
    return found


def _size(number: int, run: int) -> int:
    """2 and 3, 5 and 12, 8 and 23, 11 and 36: no simple sum or product of one another; 1 would hide which
    axes follow it."""
    return 2 + 3 * number if run == 0 else 3 + 8 * number + number * number


def _made_up(value: ir.Value, axes: Sequence[int | _Axis], sizes: Mapping[_Axis, int]) -> Array:
    if value.shape is None or value.dtype is None:
        raise InputError(
            f"the file does not say of what shape and type input {value.name!r} is; pass examples"
        )
    shape = [axis if isinstance(axis, int) else sizes[axis] for axis in axes]
    dtype = value.dtype.numpy()
    if np.issubdtype(dtype, np.floating):
        return np.random.default_rng(0).standard_normal(shape).astype(dtype)
    if np.issubdtype(dtype, np.integer) or dtype == np.bool_:
        return np.ones(shape, dtype)
    raise InputError(f"input {value.name!r} has type {dtype}, which cannot be made up; pass examples")


def run_every_node(
    model: ir.Model, choices: Sequence[Sequence[_Batch]]
) -> tuple[list[_Batch], list[dict[str, Any]]]:
    """The first of the choices that the file takes, and for each of its examples every value of the outer
    graph by name; a sequence is a list, and None what numpy has no type for.

    Raises ExportError, in onnxruntime's own words, if it takes none.
    """
    import onnx_ir as ir

    whole = model.clone()
    leaving = {id(value) for value in whole.graph.outputs}
    for node in whole.graph:
        whole.graph.outputs.extend(v for v in node.outputs if v.name and id(v) not in leaving)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "whole.onnx"
        ir.save(whole, path, external_data="whole.onnx.data")
        session = open_session(path, "the model", optimise=False)
        for examples in choices[:-1]:
            try:
                return list(examples), _runs(session, examples)
            except ExportError:
                continue
        return list(choices[-1]), _runs(session, choices[-1])


def _runs(session: InferenceSession, examples: Sequence[_Batch]) -> list[dict[str, Any]]:
    """None for a tensor of which onnxruntime makes no array."""
    types = {output.name: output.type for output in session.get_outputs()}
    names = [name for name, said in types.items() if said not in _WITHOUT_ARRAYS]
    runs = []
    for example in examples:
        try:
            values = session.run(names, dict(example))
        except Exception as error:  # onnxruntime's own classes derive from Exception directly
            shapes = ", ".join(f"{name} {array.shape}" for name, array in example.items())
            raise ExportError(
                f"the model fails in onnxruntime on inputs {shapes}: {first_line(error)}; pass examples "
                "that it takes, two of different sizes if the stages are to take any"
            ) from error
        runs.append(dict.fromkeys(types) | dict(zip(names, values, strict=True)) | dict(example))
    return runs


def specs_of(runs: Sequence[Mapping[str, Any]], model: ir.Model) -> dict[str, TensorSpec | None]:
    """Each value's shape and type; None for what is no tensor, or of a type that torch has not.

    An axis of an input that differs between the runs is a symbol, by the file's name for it. One of another
    value is a number where the file fixes it; else the symbol that inference finds, or that of the one input
    axis whose sizes it has; or one of its own, always where it goes by the values of inputs.
    """
    symbols: dict[str, tuple[int, ...]] = {}
    inputs: dict[str, tuple[int | str, ...]] = {}
    for value in model.graph.inputs:
        inputs[value.name or ""] = _shape_of_input(value, [run[value.name or ""] for run in runs], symbols)
    known, by_values = inferred_shapes(model, inputs), shaped_by_values(model)
    specs: dict[str, TensorSpec | None] = {}
    for name in runs[0]:
        arrays = [run[name] for run in runs]
        dtype = _TORCH_TYPES.get(arrays[0].dtype.name) if isinstance(arrays[0], np.ndarray) else None
        if dtype is None or any(array.ndim != arrays[0].ndim for array in arrays):
            specs[name] = None
            continue
        shape = inputs.get(name) or _shape(name, arrays, known.get(name), symbols, name in by_values)
        specs[name] = TensorSpec(shape, dtype, False, tuple(arrays[0].shape))
    return specs


def _shape_of_input(
    value: ir.Value, arrays: Sequence[Array], symbols: dict[str, tuple[int, ...]]
) -> tuple[int | str, ...]:
    """Adds the symbols that it finds. Axes without a name have one where place and sizes are the same."""
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
    arrays: Sequence[Array],
    known: Shape | None,
    symbols: Mapping[str, tuple[int, ...]],
    goes_by_values: bool,
) -> tuple[int | str, ...]:
    shape: list[int | str] = []
    for axis, sizes in enumerate(zip(*(array.shape for array in arrays), strict=True)):
        is_known = known is not None and len(known) == arrays[0].ndim
        told = known[axis] if known is not None and is_known else None
        is_same = len(set(sizes)) == 1
        alike = [symbol for symbol, found in symbols.items() if found == sizes]
        if is_same and (told == sizes[0] or not (is_known or goes_by_values)):
            shape.append(sizes[0])
        elif isinstance(told, str) and told in alike:
            shape.append(told)
        elif len(alike) == 1 and not goes_by_values:
            shape.append(alike[0])
        else:
            shape.append(f"{name}_axis_{axis}")
    return tuple(shape)


_WITHOUT_ARRAYS = frozenset({
    "tensor(bfloat16)", "tensor(float8e4m3fn)", "tensor(float8e4m3fnuz)", "tensor(float8e5m2)",
    "tensor(float8e5m2fnuz)", "tensor(float4e2m1)", "tensor(int4)", "tensor(uint4)", "tensor(int2)",
    "tensor(uint2)",
})  # fmt: skip

_TORCH_TYPES: Mapping[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        "float16", "float32", "float64", "bool",
        "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    )
}  # fmt: skip
