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

if TYPE_CHECKING:
    import onnx_ir as ir

_EXAMPLE_SIZE = 2  # for an axis that the file leaves open; 1 would hide which axes follow it


def made_up_examples(model: ir.Model) -> list[dict[str, Array]]:
    """Two batches for the file's inputs: axes that it leaves open have two samples, then three.

    Numbers are drawn, integers and flags are all one: a token that every vocabulary has, a mask that masks
    nothing. Raises InputError for an input whose type cannot be made up.
    """
    is_open = any(not isinstance(size, int) for value in model.graph.inputs for size in value.shape or ())
    sizes = (_EXAMPLE_SIZE, _EXAMPLE_SIZE + 1) if is_open else (_EXAMPLE_SIZE,)
    return [{value.name or "": _made_up(value, size) for value in model.graph.inputs} for size in sizes]


def _made_up(value: ir.Value, open_size: int) -> Array:
    if value.shape is None or value.dtype is None:
        raise InputError(
            f"the file does not say of what shape and type input {value.name!r} is; pass examples"
        )
    shape = [size if isinstance(size, int) else open_size for size in value.shape]
    dtype = value.dtype.numpy()
    if np.issubdtype(dtype, np.floating):
        return np.random.default_rng(0).standard_normal(shape).astype(dtype)
    if np.issubdtype(dtype, np.integer) or dtype == np.bool_:
        return np.ones(shape, dtype)
    raise InputError(f"input {value.name!r} has type {dtype}, which cannot be made up; pass examples")


def run_every_node(model: ir.Model, examples: Sequence[Mapping[str, Array]]) -> list[dict[str, Any]]:
    """Every value of the outer graph by name, for each example; what is no array (a sequence) is a list.

    Raises ExportError, in onnxruntime's own words, for examples that the file does not take.
    """
    import onnx_ir as ir

    whole = model.clone()
    leaving = {id(value) for value in whole.graph.outputs}
    for node in whole.graph:
        whole.graph.outputs.extend(v for v in node.outputs if v.name and id(v) not in leaving)
    names = [value.name or "" for value in whole.graph.outputs]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "whole.onnx"
        ir.save(whole, path, external_data="whole.onnx.data")
        session = open_session(path, "the model", optimise=False)
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
            runs.append(dict(zip(names, values, strict=True)) | dict(example))
        return runs


def specs_of(runs: Sequence[Mapping[str, Any]], model: ir.Model) -> dict[str, TensorSpec | None]:
    """Each value's shape and type: an axis that differs between the runs is a symbol, the input's own
    where sizes agree with an input's. None for what is no tensor, or of a type that torch has not.
    """
    symbols: dict[tuple[int, ...], str] = {}
    for value in model.graph.inputs:
        shapes = [run[value.name or ""].shape for run in runs]
        for axis, size in enumerate(value.shape or ()):
            found = tuple(shape[axis] for shape in shapes)
            if len(set(found)) > 1 and not isinstance(size, int):
                symbols.setdefault(found, size.value or f"{value.name}_axis_{axis}")
    return {name: _spec(name, [run[name] for run in runs], symbols) for name in runs[0]}


def _spec(name: str, arrays: Sequence[Any], symbols: Mapping[tuple[int, ...], str]) -> TensorSpec | None:
    first = arrays[0]
    dtype = _TORCH_TYPES.get(first.dtype.name) if isinstance(first, np.ndarray) else None
    if dtype is None or any(array.ndim != first.ndim for array in arrays):
        return None
    shape: list[int | str] = []
    for axis, sizes in enumerate(zip(*(array.shape for array in arrays), strict=True)):
        shape.append(sizes[0] if len(set(sizes)) == 1 else symbols.get(sizes, f"{name}_axis_{axis}"))
    return TensorSpec(tuple(shape), dtype, False, tuple(first.shape))


_TORCH_TYPES: Mapping[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        "float16", "float32", "float64", "bool",
        "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    )
}  # fmt: skip
