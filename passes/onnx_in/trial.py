"""Runs the file node by node: all values at two batch sizes, and shapes at two more."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pd2bw_fx.errors import ExportError, InputError
from pd2bw_fx.onnx_session import Array, first_line, open_session

from .specs import open_axes

if TYPE_CHECKING:
    import onnx_ir as ir
    from onnxruntime import InferenceSession

# An open axis, by its name; an unnamed one by its input or its position.
_Axis = tuple[str, int]
_Batch = Mapping[str, Array]
_Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Trial:
    """The values of some runs of a file.

    - `runs`: every value of the outer graph by name, for each of the examples. Only those that the file
      returns have their numbers, others shape and type alone. A sequence is a list; a value of a type that
      numpy lacks is None.
    - `further`: shapes at a further size, which tells axes apart that two examples do not; None where the
      file takes no other size.
    - `at_one`: shapes where every open axis is 1; None where the file does not take them.
    """

    examples: list[_Batch]
    runs: list[dict[str, Any]]
    further: _Shapes | None = None
    at_one: _Shapes | None = None


def made_up_examples(model: ir.Model) -> list[list[_Batch]]:
    """Yields pairs of batches for the file's inputs, to be tried in this order.

    First every named and every unnamed axis has sizes of its own. Then unnamed axes at the same position have
    the same, and then all open axes. Floats are drawn. Integers and flags are all one: a token that every
    vocabulary has, a mask that masks nothing. Raises InputError for an input whose type cannot be made up.
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
    """Returns fixed sizes, and keys of open axes: (name, -1), (input, axis), ("", axis) or ("", -1)."""
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
    """Returns 2 and 3, 5 and 12, 8 and 23, 11 and 36: none a simple sum or product of others.

    A size of 1 would hide the axes that follow from it.
    """
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


def run_every_node(model: ir.Model, choices: Sequence[Sequence[_Batch]]) -> Trial:
    """Runs the first of the choices that the file takes.

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
        session = open_session(path, "the model", num_threads=torch.get_num_threads(), optimise=False)
        for examples in choices[:-1]:
            try:
                return _tried(session, model, examples)
            except ExportError:
                continue
        return _tried(session, model, choices[-1])


def _tried(session: InferenceSession, model: ir.Model, examples: Sequence[_Batch]) -> Trial:
    runs = _runs(session, examples, {value.name or "" for value in model.graph.outputs})
    axes, symbols = open_axes(model, examples)
    if not symbols:
        return Trial(list(examples), runs)
    further = next(
        (
            shapes
            for sizes in (_unrelated(symbols), _on_the_line(symbols))
            if (shapes := _shapes(session, examples[0], axes, sizes)) is not None
        ),
        None,
    )
    return Trial(
        list(examples), runs, further, _shapes(session, examples[0], axes, dict.fromkeys(symbols, 1))
    )


def _unrelated(symbols: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Returns a third size of each axis that no other axis determines.

    It is between the other two, which a file may bound, at another point for each axis; or above them, each
    one higher than the last, where there is nothing between.
    """
    found: dict[str, int] = {}
    for place, (name, (first, second, *_)) in enumerate(symbols.items(), start=1):
        size = first + (second - first) * place // (len(symbols) + 1)
        found[name] = max(first, second) + place if size in (first, second) else size
    return found


def _on_the_line(symbols: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Returns a third size of each axis, for axes that are sums and multiples of one another."""
    return {name: max(2 * second - first, 1) for name, (first, second, *_) in symbols.items()}


def _shapes(
    session: InferenceSession,
    example: _Batch,
    axes: Mapping[str, tuple[int | str, ...]],
    sizes: Mapping[str, int],
) -> _Shapes | None:
    """Returns the shapes of all values where open axes have these sizes; None where the file refuses them."""
    resized = {}
    for name, array in example.items():
        for axis, symbol in enumerate(axes[name]):
            if isinstance(symbol, str):
                array = np.take(array, np.arange(sizes[symbol]) % array.shape[axis], axis)
        resized[name] = array
    try:
        (values,) = _runs(session, [resized])
    except ExportError:
        return None
    return {name: value.shape for name, value in values.items() if isinstance(value, np.ndarray)}


def _runs(
    session: InferenceSession, examples: Sequence[_Batch], kept: Collection[str] = ()
) -> list[dict[str, Any]]:
    """Returns the values of a run; only those in `kept` have their numbers.

    A tensor that onnxruntime makes no array of is None.
    """
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
        made = zip(names, values, strict=True)
        found = {name: value if name in kept else _light(value) for name, value in made}
        runs.append(dict.fromkeys(types) | found | dict(example))
    return runs


def _light(value: Any) -> Any:
    """Returns an array of the same shape and type that takes no memory."""
    if not isinstance(value, np.ndarray):
        return value
    return np.broadcast_to(np.zeros((), value.dtype), value.shape)


_WITHOUT_ARRAYS = frozenset({
    "tensor(bfloat16)", "tensor(float8e4m3fn)", "tensor(float8e4m3fnuz)", "tensor(float8e5m2)",
    "tensor(float8e5m2fnuz)", "tensor(float4e2m1)", "tensor(int4)", "tensor(uint4)", "tensor(int2)",
    "tensor(uint2)",
})  # fmt: skip
