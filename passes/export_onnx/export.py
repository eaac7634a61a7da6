"""Writes one ONNX file for each stage, and checks that it computes what the model computes.

folder/
  manifest.json        what connects to what, versions, hashes, measured differences
  stage_0.onnx         parameters under their original names; a value that crosses a cut
  stage_1.onnx         has the same name on both sides
  stage_1.onnx.data    where the parameters are too large for one file
  model.onnx           the annotated form: all stages in one file, every node with its stage
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from pd2bw_fx.arguments import require_positive, require_whole_number
from pd2bw_fx.errors import ExportError, InputError
from pd2bw_fx.files import whole_folder, write_manifest
from pd2bw_fx.graph import OperatorGraph, dtype_name
from pd2bw_fx.onnx_session import require
from pd2bw_fx.size_range import ANY_SIZE, SizeRange
from pd2bw_fx.stage import Port, StageProgram, held_buffers, held_parameters

from .annotate import annotate, check_annotation
from .arrays import to_array
from .check import compare, largest
from .exactness import coarsest, coarsest_behind
from .examples import any_axis_of_one, batch_size, example_of, examples_of_other_sizes, model_inputs
from .graph import stage_model
from .manifest import described, stage_entry, tensor_names
from .merge import EXTERNAL_ABOVE_BYTES, merged, save
from .original import Original
from .pairs import Pairs
from .refusal import NEWEST_OPSET, OLDEST_OPSET
from .run import in_mode, run_files, run_modules, run_whole
from .sensitivity import allowed_by_rounding
from .varying import changed_value, why_it_varies, written_by

if TYPE_CHECKING:
    import onnx_ir as ir

Form = Literal["stages", "annotated", "both"]

_ANNOTATED = "model.onnx"


def export_onnx(
    programs: Sequence[StageProgram],
    modules: Sequence[nn.Module],
    example_inputs: Mapping[str, Tensor],
    folder: str | Path,
    *,
    original: Original | None = None,
    form: Form = "stages",
    opset: int = 20,
    training: bool = False,
    tolerance: float | None = None,
    external_above_bytes: int = EXTERNAL_ABOVE_BYTES,
) -> dict[str, Any]:
    """Exports the stages, checks them, and returns the manifest.

    - `example_inputs`: the model's inputs by name. Where their first dimension is a symbol, the files take
      any batch size. They are run at the example's and at one more than twice that, there with half the
      length where lengths are symbols too, and compared with the stages in torch and with `original`, if it
      has a live model.
    - `form`: a file for each stage; one file with every node annotated with its stage (IR version 11; needs
      `original`, for the devices); or both.
    - `training`: False exports what the stages compute in evaluation. True exports what they compute in
      training (batch statistics), for models that draw no random numbers.
    - `tolerance`: relative to a tensor's largest entry; None takes the one of its type.
    - `external_above_bytes`: a file with more bytes of parameters has them in another file beside it.

    Raises InputError for an unsupported opset. Raises ExportError, and leaves no files, where a stage cannot
    be translated, fails the ONNX checker, or computes something else in onnxruntime than in torch.
    """
    _check_request(original, form, opset, tolerance)
    _require_arrays(programs, form)
    sizes = ANY_SIZE if original is None else original.graph.batch_sizes
    graph = None if original is None else original.graph
    pairs, complex_programs = Pairs(programs), programs
    example, *others = map(pairs.taken, _examples(programs, original, example_inputs, sizes))
    programs, original = pairs.programs(programs), pairs.original(original)
    job = _Job(tuple(programs), tensor_names(programs), tolerance, graph)
    with (
        pairs.between(complex_programs, modules),
        in_mode(modules, training=training),
        whole_folder(folder) as fresh,
    ):
        examples = [example, *_first_taken(job, modules, others)]
        truths = _truths(job, modules, examples, original, training=training)
        # A dimension of 1 would be taken for a constant.
        ports = job.inputs.values()
        traced = next((t.values for t in truths if not any_axis_of_one(ports, t.values)), truths[0].values)
        models, asserted = {}, []
        for program, module in zip(programs, modules, strict=True):
            models[program.stage], messages = stage_model(
                program,
                module,
                [traced[port.value] for port in program.inputs],
                opset=opset,
                names=job.names,
                graph=graph,
            )
            asserted += [{"stage": program.stage, "message": message} for message in messages]
        facts = described(programs, job.names, original, opset=opset, training=training)
        pairs.note(facts, job.names)
        facts["batch_sizes"] = sizes.to_json()
        facts["asserts"] = asserted
        facts["batch_sizes_checked"] = [batch_size(ports, example) for example in examples]
        facts["stages"] = [stage_entry(program, job.names, models[program.stage]) for program in programs]
        if form != "annotated":
            facts |= _write_stages(fresh, facts["stages"], models, job, truths, external_above_bytes)
        if form != "stages":
            assert original is not None, "checked above"
            facts["annotated"] = _write_annotated(
                fresh, facts, models, job, truths, original, external_above_bytes
            )
        if form == "annotated":
            facts["stages"] = []
        return write_manifest(fresh, facts)


@dataclass(frozen=True, slots=True)
class _Job:
    """The stages, the names of their values in the files, and the tolerance."""

    programs: tuple[StageProgram, ...]
    names: Mapping[str, str]
    tolerance: float | None
    graph: OperatorGraph | None = None

    @property
    def inputs(self) -> dict[str, Port]:
        return model_inputs(self.programs)

    @property
    def behind(self) -> dict[str, str]:
        """Returns the coarsest type on the way to each value, as far as is known."""
        ports = [port for program in self.programs for port in (*program.inputs, *program.outputs)]
        between = coarsest(port.spec.dtype for port in ports)
        if between is None:
            return {}
        behind = {} if self.graph is None else coarsest_behind(self.graph)
        return {port.value: behind.get(port.value, dtype_name(between)) for port in ports}


@dataclass(frozen=True, slots=True)
class _Truth:
    """The expected results of one batch.

    They are every value between stages, as the stages make it in torch, and the outputs by name, as the live
    model makes them (None without one). `rounding` computes how far roundings may move each value.
    """

    values: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor] | None
    rounding: Callable[[], Mapping[str, float]]


def _check_request(original: Original | None, form: str, opset: int, tolerance: float | None) -> None:
    if form not in ("stages", "annotated", "both"):
        raise InputError(f"form is {form!r}; 'stages', 'annotated' or 'both' was expected")
    if form != "stages" and original is None:
        raise InputError(
            f"form={form!r} names the devices of the stages; pass original, or take form='stages'"
        )
    require_whole_number("opset", opset)
    if tolerance is not None:
        require_positive("tolerance", tolerance)
    if not OLDEST_OPSET <= opset <= NEWEST_OPSET:
        raise InputError(f"opset {opset} cannot be written; give one from {OLDEST_OPSET} to {NEWEST_OPSET}")
    for needed in ("onnx", "onnxscript", "onnxruntime"):
        require(needed)


def _examples(
    programs: Sequence[StageProgram],
    original: Original | None,
    example_inputs: Mapping[str, Tensor],
    sizes: SizeRange,
) -> list[dict[str, Tensor]]:
    """Returns the example, and the same at other sizes that may be tried."""
    specs = {name: port.spec for name, port in model_inputs(programs).items()}
    if original is not None and original.model is not None:
        specs = dict(original.graph.inputs)  # the model also takes inputs that no stage reads
    example = example_of(specs, example_inputs)
    return [example, *examples_of_other_sizes(specs, example, sizes)]


def _require_arrays(programs: Sequence[StageProgram], form: Form) -> None:
    for port in (port for program in programs for port in program.outputs):
        if port.spec.dtype is torch.bfloat16 and form != "annotated":
            raise ExportError(
                f"{port.value!r}, which goes out of a stage, is bfloat16: onnxruntime makes no array of it; "
                "convert the model first (model.float() or model.half(), or without autocast), or keep its "
                "writer and its readers on one stage (constraints)"
            )


def _first_taken(
    job: _Job, modules: Sequence[nn.Module], examples: Sequence[Mapping[str, Tensor]]
) -> list[Mapping[str, Tensor]]:
    """Returns the first batch that the stages take in torch, or else the last one, whose error is shown."""
    for example in examples:
        try:
            run_modules(job.programs, modules, {name: example[name] for name in job.inputs})
        except ExportError:
            continue
        return [example]
    return list(examples[-1:])


def _truths(
    job: _Job,
    modules: Sequence[nn.Module],
    examples: Sequence[Mapping[str, Tensor]],
    original: Original | None,
    *,
    training: bool,
) -> list[_Truth]:
    weights: dict[str, Tensor] = {}
    for program, module in zip(job.programs, modules, strict=True):
        weights |= held_parameters(program, module) if original is not None else {}
        weights |= held_buffers(program, module) if original is not None else {}
    truths = []
    for example in examples:
        # Before the stages run, which in training would write running statistics.
        outputs = None if original is None else original.run(example, weights, training=training)
        fed = {name: example[name] for name in job.inputs}
        values = run_modules(job.programs, modules, fed)
        changed = changed_value(values, run_modules(job.programs, modules, fed))
        if changed is not None:
            written = written_by(job.programs, modules, fed)
            raise ExportError(why_it_varies(changed, written, original, training=training))
        rounding = functools.cache(functools.partial(allowed_by_rounding, job.programs, modules, fed))
        truths.append(_Truth(values, outputs, rounding))
    return truths


def _write_stages(
    folder: Path,
    entries: Sequence[Mapping[str, Any]],
    models: Mapping[int, ir.Model],
    job: _Job,
    truths: Sequence[_Truth],
    external_above_bytes: int,
) -> dict[str, Any]:
    """Saves and checks a file for each stage, and returns the measured differences."""
    for entry in entries:
        save(models[entry["stage"]], folder / entry["file"], external_above_bytes=external_above_bytes)
    found = [run_files(folder, entries, _fed(job, truth)) for truth in truths]
    between, leaving = [], []
    behind = {job.names[value]: kind for value, kind in job.behind.items()}
    for tensors, truth in zip(found, truths, strict=True):
        expected = {
            job.names[port.value]: truth.values[port.value]
            for program in job.programs
            for port in program.outputs
        }
        what = {
            job.names[
                port.value
            ]: f"{job.names[port.value]}, an output of stage {program.stage}, differs from torch"
            for program in job.programs
            for port in program.outputs
        }
        between.append(
            compare(
                tensors,
                expected,
                what=what,
                tolerance=job.tolerance,
                behind=behind,
                rounding=functools.partial(_renamed, truth.rounding, job.names),
            )
        )
        if truth.outputs is not None:
            leaving.append(_compare_outputs(tensors, truth.outputs, job, truth.rounding))
    differences: dict[str, Any] = {"largest_differences": largest(between)}
    return differences | ({"largest_differences_from_model": largest(leaving)} if leaving else {})


def _write_annotated(
    folder: Path,
    facts: Mapping[str, Any],
    models: Mapping[int, ir.Model],
    job: _Job,
    truths: Sequence[_Truth],
    original: Original,
    external_above_bytes: int,
) -> dict[str, Any]:
    """Saves and checks the one file of all stages, and returns its entry in the manifest."""
    model = merged(facts, models)
    devices = [stage.device_name for stage in original.plan.stages]
    annotate(model, devices)
    save(model, folder / _ANNOTATED, external_above_bytes=external_above_bytes)
    num_stages = check_annotation(folder / _ANNOTATED)
    names = {
        entry["name"]: value.name or ""
        for entry, value in zip(facts["outputs"], model.graph.outputs, strict=True)
    }
    checks = []
    for truth in truths:
        found = run_whole(folder / _ANNOTATED, _fed(job, truth), names)
        tensors = {entry["tensor"]: found[entry["name"]] for entry in facts["outputs"]}
        outputs = truth.outputs
        if outputs is None:
            outputs = {p.model_output: truth.values[p.value] for _, p in _leaving(job) if p.model_output}
        checks.append(_compare_outputs(tensors, outputs, job, truth.rounding))
    return {
        "file": _ANNOTATED,
        "ir_version": model.ir_version,
        "num_stages": num_stages,
        "devices": devices,
        "outputs": names,
        "largest_differences": largest(checks),
    }


def _leaving(job: _Job) -> list[tuple[StageProgram, Port]]:
    return [(s, port) for s in job.programs for port in s.outputs if port.model_output is not None]


def _renamed(rounding: Callable[[], Mapping[str, float]], names: Mapping[str, str]) -> dict[str, float]:
    return {names[value]: allowed for value, allowed in rounding().items() if value in names}


def _compare_outputs(
    tensors: Mapping[str, Any],
    outputs: Mapping[str, Tensor],
    job: _Job,
    rounding: Callable[[], Mapping[str, float]],
) -> dict[str, float]:
    """Compares the files' outputs with the model's own."""
    found, what, behind = {}, {}, {}
    kinds = job.behind
    for program, port in _leaving(job):
        name = port.model_output or ""
        if name not in outputs:
            raise ExportError(
                f"the stages return {name!r}, and the model does not in this mode; export with the other "
                "training=, or split the model without that output"
            )
        found[name] = tensors[job.names[port.value]]
        behind[name] = kinds.get(port.value, "")
        what[name] = f"{name}, which stage {program.stage} returns, differs from the original model's"
    expected = {name: outputs[name] for name in found}
    names = {port.value: port.model_output or "" for _, port in _leaving(job)}
    return compare(
        found,
        expected,
        what=what,
        tolerance=job.tolerance,
        behind=behind,
        rounding=functools.partial(_renamed, rounding, names),
    )


def _fed(job: _Job, truth: _Truth) -> dict[str, Any]:
    return {job.names[name]: to_array(name, truth.values[name]) for name in job.inputs}
