"""Runs the stages one after another: as torch modules, and as ONNX files in onnxruntime."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pd2bw_fx.errors import ExportError, InputError, PlanMismatchError
from pd2bw_fx.files import read_manifest
from pd2bw_fx.modes import has_one_mode
from pd2bw_fx.onnx_session import Array, first_line, open_session, run_failure
from pd2bw_fx.program import set_fast_path
from pd2bw_fx.size_range import SizeRange
from pd2bw_fx.stage import StageProgram
from pd2bw_fx.units import counted

from .arrays import from_pairs, to_array, to_pairs
from .batched import batch_symbol

KIND = "pd2bw_fx onnx"
SCHEMA = 1


def run_onnx(folder: str | Path, inputs: Mapping[str, Tensor | Array] | None) -> dict[str, Array]:
    """Returns the model's outputs by name, from the files of an exported folder in onnxruntime.

    `inputs` are the model's, flat, by name. Raises InputError for a name that is missing or unknown, or a
    batch size for which the model was not traced, PlanMismatchError for a file that is missing or altered,
    ExportError where onnxruntime refuses a file, or where a value fails an assertion of the trace.
    """
    folder = Path(folder)
    manifest = onnx_manifest(folder)
    fed = named_inputs(folder, manifest, inputs)
    require_batch_size(manifest, fed)
    if not manifest["stages"]:
        annotated = manifest["annotated"]
        found = run_whole(folder / annotated["file"], fed, annotated["outputs"])
        return {entry["name"]: from_pairs(entry, found[entry["name"]]) for entry in manifest["outputs"]}
    tensors = run_files(folder, manifest["stages"], fed)
    return {entry["name"]: from_pairs(entry, tensors[entry["tensor"]]) for entry in manifest["outputs"]}


def onnx_manifest(folder: Path) -> dict[str, Any]:
    """Returns the manifest of an exported folder, whose files are checked to be as they were written.

    Raises PlanMismatchError for a file that is missing, altered, or not the folder's own.
    """
    manifest = read_manifest(folder, kind=KIND, if_altered="copy the folder again, or export it again")
    if manifest.get("schema") != SCHEMA:
        raise PlanMismatchError(
            f"{folder} has schema {manifest.get('schema')!r}, and this version reads {SCHEMA}; "
            "export it again"
        )
    named = [entry["file"] for entry in (*manifest["stages"], manifest.get("annotated")) if entry]
    strange = [name for name in named if name not in manifest["files"]]
    if strange:
        raise PlanMismatchError(f"{folder} names {strange[0]!r}, which is no file of it; export it again")
    return manifest


def named_inputs(
    folder: Path, manifest: Mapping[str, Any], inputs: Mapping[str, Tensor | Array] | None
) -> dict[str, Array]:
    """Returns the model's inputs by their names in the files.

    Inputs that no stage reads may be left out. Raises InputError for one missing or unknown, or of another
    type or shape than the files take.
    """
    if inputs is None:
        raise InputError(f"inputs is None; the model's inputs by name were expected, as {folder} takes them")
    expected = {entry["name"]: entry["tensor"] for entry in manifest["inputs"]}
    inputs = {name: value for name, value in inputs.items() if name not in manifest.get("unread", ())}
    unlike = sorted(expected.keys() ^ inputs.keys())
    if unlike:
        what = "is missing" if unlike[0] in expected else "is no input of the model"
        raise InputError(f"input {unlike[0]!r} {what}; {folder} takes {', '.join(expected) or 'none'}")
    arrays = {name: to_array(name, value) for name, value in inputs.items()}
    for entry in manifest["inputs"]:
        given = arrays[entry["name"]]
        if entry.get("complex") and np.iscomplexobj(given):
            arrays[entry["name"]] = to_pairs(given)
        _require_as_declared(folder, entry, arrays[entry["name"]], given)
    return {expected[name]: array for name, array in arrays.items()}


def _require_as_declared(folder: Path, entry: Mapping[str, Any], array: Array, given: Array) -> None:
    """Raises InputError for an array that onnxruntime would refuse for this input; `given` is the user's."""
    dtype, shape = entry["dtype"], entry["shape"]
    fits = shape is None or (
        len(shape) == array.ndim
        and all(size == own for size, own in zip(shape, array.shape, strict=True) if isinstance(size, int))
    )
    if fits and array.dtype.name == dtype:
        return
    takes = _described(dtype, shape)
    if entry.get("complex"):
        numbers = np.result_type(dtype, np.complex64).name
        takes = f"{_described(numbers, shape and shape[:-1])}, or both parts as {takes}"
    what = f"{given.dtype.name} {given.shape}"
    raise InputError(f"input {entry['name']!r} is {what}; {folder} takes {takes}")


def _described(dtype: str, shape: Sequence[Any] | None) -> str:
    return dtype if shape is None else f"{dtype} ({', '.join(map(str, shape))})"


def require_batch_size(
    manifest: Mapping[str, Any], tensors: Mapping[str, Array], *, num_microbatches: int = 1
) -> None:
    """Raises InputError where a microbatch has a size that the model was not traced for.

    `tensors` are its inputs, by their names in the files.
    """
    right = SizeRange(*manifest.get("batch_sizes", ()))
    axis = None if right.is_open else batch_symbol(manifest)
    if axis is None:
        return
    for entry in manifest["inputs"]:
        shape = tensors[entry["tensor"]].shape
        if (entry["shape"] or [])[:1] == [axis] and shape[:1] and shape[0] not in right:
            cut = f" in one of {num_microbatches} microbatches" if num_microbatches > 1 else ""
            nearest = right.nearest(shape[0])
            raise InputError(
                f"{entry['name']!r} has {counted(shape[0], 'sample')}{cut}; the model was traced for "
                f"{right}: pass {nearest}{' for each' if cut else ' samples'}, or export it from other "
                "example inputs"
            )


def run_files(
    folder: Path,
    stages: Sequence[Mapping[str, Any]],
    inputs: Mapping[str, Array],
    *,
    optimise: bool = True,
) -> dict[str, Array]:
    """Returns every tensor that enters or leaves a stage, by its name in the files.

    `stages` are as in the manifest, `optimise` as for `open_session`.
    """
    tensors = dict(inputs)
    for stage in stages:
        session = open_session(
            folder / stage["file"],
            f"stage {stage['stage']}",
            num_threads=torch.get_num_threads(),
            optimise=optimise,
        )
        names = [entry["tensor"] for entry in stage["outputs"]]
        fed = {entry["tensor"]: tensors[entry["tensor"]] for entry in stage["inputs"]}
        try:
            results = session.run(names, fed)
        except Exception as error:  # onnxruntime's own classes derive from Exception directly
            raise ExportError(
                f"stage {stage['stage']} failed in onnxruntime: {run_failure(error)}"
            ) from error
        tensors |= dict(zip(names, results, strict=True))
    return tensors


def run_whole(path: Path, inputs: Mapping[str, Array], outputs: Mapping[str, str]) -> dict[str, Array]:
    """Returns the outputs of a file with the whole model.

    `outputs` maps the model's names of its outputs to the file's.
    """
    session = open_session(path, path.name, num_threads=torch.get_num_threads())
    try:
        results = session.run(list(outputs.values()), dict(inputs))
    except Exception as error:  # onnxruntime's own classes derive from Exception directly
        raise ExportError(f"{path.name} failed in onnxruntime: {run_failure(error)}") from error
    return dict(zip(outputs, results, strict=True))


def run_modules(
    programs: Sequence[StageProgram], modules: Sequence[nn.Module], inputs: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Returns every tensor that enters or leaves a stage, by its value's name, without gradients.

    Raises ExportError if a stage does not take these inputs, for instance another batch size than it had.
    """
    values = dict(inputs)
    with torch.no_grad(), set_fast_path(on=False):
        for program, module in zip(programs, modules, strict=True):
            fed = [values[port.value] for port in program.inputs]
            try:
                result = module(*fed)
            except Exception as error:  # anything that the model's code raises
                shapes = ", ".join(str(tuple(tensor.shape)) for tensor in fed)
                raise ExportError(
                    f"stage {program.stage} fails in torch on inputs of shape {shapes}: {first_line(error)}"
                ) from error
            results = result if isinstance(result, tuple) else (result,)
            values |= {port.value: r for port, r in zip(program.outputs, results, strict=True)}
    return values


def turn(module: nn.Module, *, training: bool) -> None:
    """Puts a module into a mode, unless it is in it already: then its frozen parts stay as they were traced.

    A program of torch.export computes the same in both modes.
    """
    if module.training != training and not has_one_mode(module):
        module.train(training)


@contextmanager
def in_mode(modules: Sequence[nn.Module], *, training: bool) -> Iterator[None]:
    """Puts modules into a mode, as `turn` does, and restores mode and buffers of every part afterwards."""
    modes = [(part, part.training) for module in modules for part in module.modules()]
    buffers = [(b, b.detach().clone()) for module in modules for b in module.buffers()]
    try:
        for module in modules:
            turn(module, training=training)
        yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        for part, mode in modes:
            part.training = mode
