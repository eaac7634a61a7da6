"""Write one ONNX file for each stage, and call none good before it has computed what the stage computes.

folder/
  manifest.json        what connects to what, versions, hashes, measured differences
  stage_0.onnx         parameters under their original names; a value that crosses a cut
  stage_1.onnx         has the same name on both sides
  stage_1.onnx.data    where the parameters are too large for one file
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pd2bw_fx.errors import ExportError, InputError
from pd2bw_fx.files import whole_folder, write_manifest
from pd2bw_fx.graph import dtype_name
from pd2bw_fx.stage import Port, StageProgram

from .graph import NEWEST_OPSET, OLDEST_OPSET, produced, stage_model
from .run import KIND, SCHEMA, Array, evaluating, first_line, require, run_files, run_modules, to_array

# Relative to a tensor's largest entry; other kernels add up in another order.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2}

# One protobuf holds 2 GiB.
_EXTERNAL_ABOVE_BYTES = 1_500_000_000


def export_onnx(
    programs: Sequence[StageProgram],
    modules: Sequence[nn.Module],
    example_inputs: Mapping[str, Tensor],
    folder: str | Path,
    *,
    opset: int = 20,
    tolerance: float | None = None,
    external_above_bytes: int = _EXTERNAL_ABOVE_BYTES,
) -> dict[str, Any]:
    """Export the stages in eval mode, check them, and return the manifest.

    `example_inputs` are the model's inputs by name. Where their first dimension is a symbol, the files take
    any batch size, and are run at two: the example's and one more. `tolerance` is relative to a tensor's
    largest entry; None takes what suits its type. Parameters of more than `external_above_bytes` in a stage
    stand in a file beside it.

    Raises ExportError, and leaves no files, if a stage cannot be translated, fails the ONNX checker, or
    computes something else in onnxruntime than in torch.
    """
    if not OLDEST_OPSET <= opset <= NEWEST_OPSET:
        raise ExportError(f"opset {opset} cannot be written; give one from {OLDEST_OPSET} to {NEWEST_OPSET}")
    for needed in ("onnx", "onnxscript", "onnxruntime"):
        require(needed)
    model_inputs = _model_inputs(programs)
    missing = sorted(model_inputs.keys() - example_inputs.keys())
    if missing:
        raise InputError(f"there is no example of input {missing[0]!r}; give one for each input of the model")
    examples = [
        {name: example_inputs[name] for name in model_inputs},
        *_another_batch(model_inputs, example_inputs),
    ]
    names = tensor_names(programs)
    with evaluating(modules), whole_folder(folder) as fresh:
        values = [run_modules(programs, modules, example) for example in examples]
        # A dimension of 1 would be taken for a constant.
        traced = next((v for v in values if not _any_axis_of_one(model_inputs, v)), values[0])
        stages = []
        for program, module in zip(programs, modules, strict=True):
            inputs = [traced[port.value] for port in program.inputs]
            model = stage_model(program, module, inputs, opset=opset, names=names)
            stages.append(_write(model, program, fresh, names, external_above_bytes))
        checks = [_compare(fresh, stages, programs, names, v, tolerance) for v in values]
        facts = {
            "kind": KIND,
            "schema": SCHEMA,
            "opset": opset,
            "versions": {"torch": torch.__version__}
            | {name: require(name).__version__ for name in ("onnx", "onnxscript", "onnxruntime")},
            "inputs": [_tensor(port, names) | {"name": port.value} for port in model_inputs.values()],
            "outputs": [
                _tensor(port, names) | {"name": port.model_output, "stage": program.stage}
                for program in programs
                for port in program.outputs
                if port.model_output is not None
            ],
            "stages": stages,
            "batch_sizes_checked": [_batch_size(model_inputs, example) for example in examples],
            "largest_differences": {name: max(c[name] for c in checks) for name in checks[0]},
        }
        write_manifest(fresh, facts)
    return facts


def tensor_names(programs: Sequence[StageProgram]) -> dict[str, str]:
    """The name in the files of every value that enters or leaves a stage.

    It is the value's own; one that only leaves the model has the name of the model's output. A name that a
    parameter or another value has already gets a number.
    """
    taken = {name for program in programs for name in (*program.parameters, *program.buffers)}
    ports = [port for program in programs for port in (*program.inputs, *program.outputs)]
    only_leaving = {p.value: p.model_output for p in ports if p.model_output is not None and not p.targets}
    only_leaving = {v: name for v, name in only_leaving.items() if v not in _model_inputs(programs)}
    values = dict.fromkeys(port.value for port in ports)
    names: dict[str, str] = {}
    for value in sorted(values, key=lambda value: value in only_leaving):
        wanted = name = only_leaving.get(value) or value
        number = 1
        while name in taken:
            name = f"{wanted}_{number}"
            number += 1
        names[value] = name
        taken.add(name)
    return names


def _model_inputs(programs: Iterable[StageProgram]) -> dict[str, Port]:
    return {port.value: port for program in programs for port in program.inputs if port.source is None}


def _another_batch(ports: Mapping[str, Port], example: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """The example with one more sample (its first one again), if its first dimensions are dynamic."""
    symbols = {port.spec.shape[0] for port in ports.values() if port.spec.shape}
    sizes = {s: example[p.value].shape[0] for p in ports.values() if p.spec.shape for s in [p.spec.shape[0]]}
    growing = {s: sizes[s] + 1 for s in symbols if isinstance(s, str) and s.isidentifier()}
    if not growing:
        return []

    def grown(port: Port) -> Tensor:
        tensor = example[port.value]
        for axis, size in enumerate(port.spec.shape or ()):
            if size in growing:
                index = torch.arange(growing[size], device=tensor.device) % tensor.shape[axis]
                tensor = tensor.index_select(axis, index)
        return tensor

    return [{name: grown(port) for name, port in ports.items()}]


def _any_axis_of_one(ports: Mapping[str, Port], values: Mapping[str, Tensor]) -> bool:
    return any(
        values[port.value].shape[axis] == 1
        for port in ports.values()
        for axis, size in enumerate(port.spec.shape or ())
        if isinstance(size, str)
    )


def _batch_size(ports: Mapping[str, Port], example: Mapping[str, Tensor]) -> int | None:
    """The size of the first dimension of the first input that has a symbol there, or any first dimension."""
    ranked = sorted(
        (p for p in ports.values() if p.spec.shape),
        key=lambda p: not isinstance((p.spec.shape or (0,))[0], str),
    )
    return example[ranked[0].value].shape[0] if ranked else None


def _write(
    model: Any, program: StageProgram, folder: Path, names: Mapping[str, str], external_above_bytes: int
) -> dict[str, Any]:
    """Save and check one stage; returns its entry in the manifest."""
    require("onnx")
    import onnx
    import onnx_ir as ir

    file = f"stage_{program.stage}.onnx"
    num_bytes = sum(value.const_value.nbytes for value in model.graph.initializers.values())
    external = f"{file}.data" if num_bytes > external_above_bytes else None
    held = {*program.parameters, *program.buffers, *program.ties}
    initializers = set(model.graph.initializers)
    ir.save(model, folder / file, external_data=external)
    try:
        onnx.checker.check_model(str(folder / file), full_check=True)
    except Exception as error:  # the checker's and the shape inference's errors have no common class
        raise ExportError(
            f"stage {program.stage} fails the ONNX checker: {first_line(error)}; try another opset"
        ) from error
    return {
        "stage": program.stage,
        "file": file,
        "inputs": [_tensor(port, names) | {"source": port.source} for port in program.inputs],
        "outputs": [
            _tensor(port, names) | {"targets": list(port.targets), "model_output": port.model_output}
            for port in produced(program)
        ],
        "parameters": sorted(held & initializers),
    }


def _tensor(port: Port, names: Mapping[str, str]) -> dict[str, Any]:
    shape = port.spec.shape
    return {
        "tensor": names[port.value],
        "dtype": dtype_name(port.spec.dtype),
        "shape": None if shape is None else list(shape),
    }


@dataclass(frozen=True, slots=True)
class _Difference:
    """The largest entry of |found - expected|, and it over the largest entry expected."""

    absolute: float
    relative: float


def _compare(
    folder: Path,
    stages: Sequence[Mapping[str, Any]],
    programs: Sequence[StageProgram],
    names: Mapping[str, str],
    values: Mapping[str, Tensor],
    tolerance: float | None,
) -> dict[str, float]:
    """Run the files one after another, and return for each output of a stage the largest difference,
    relative to its largest entry. Raises ExportError at the first that is out of tolerance.
    """
    fed = {names[name]: to_array(name, values[name]) for name in _model_inputs(programs)}
    found = run_files(folder, stages, fed)
    differences = {}
    for program in programs:
        for port in program.outputs:
            name, expected = names[port.value], values[port.value]
            difference = _difference(found[name], to_array(name, expected))
            allowed = _TOLERANCES.get(expected.dtype, 0.0) if tolerance is None else tolerance
            if not difference.relative <= allowed:
                raise ExportError(
                    f"{name}, an output of stage {program.stage}, differs from torch by "
                    f"{difference.absolute:.3g} ({difference.relative:.3g} of its largest entry) where "
                    f"{allowed:.3g} is allowed; try another opset, or a larger tolerance if it is rounding"
                )
            differences[name] = difference.relative
    return differences


def _difference(found: Array, expected: Array) -> _Difference:
    """Infinite for another shape or type, or where only one is finite."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return _Difference(float("inf"), float("inf"))
    wide = np.float64 if expected.dtype.kind in "fiub" else expected.dtype
    a, b = found.astype(wide), expected.astype(wide)
    finite = np.isfinite(b)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True) or not np.isfinite(a[finite]).all():
        return _Difference(float("inf"), float("inf"))
    absolute = float(np.abs(a[finite] - b[finite]).max(initial=0.0))
    largest = float(np.abs(b[finite]).max(initial=0.0))
    return _Difference(absolute, absolute / largest if largest > 0 else absolute)
