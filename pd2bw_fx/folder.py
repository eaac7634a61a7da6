"""A pipeline on disk: readable sources, weights without pickle, everything else as JSON.

folder/
  manifest.json              what this is, versions, a hash of every other file
  stage_0.py                 the generated code, runs by itself
  stage_0.safetensors        its weights, under the names that its class has them under: its state dict
  stages.json                what goes in and out of each stage
  graph.json plan.json costs.json cluster.json schedule.json batch.json
  example.safetensors        the example inputs, if there were any
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from pd2bw_fx.actions import Schedule
from pd2bw_fx.arguments import require_choice, require_path
from pd2bw_fx.batch import BatchLayout
from pd2bw_fx.cluster import Cluster
from pd2bw_fx.constraints import Constraints
from pd2bw_fx.costs import Costs, MemoryModel
from pd2bw_fx.errors import Pd2bwError, PlanMismatchError
from pd2bw_fx.files import (
    read_manifest,
    sha256,
    whole_folder,
    write_manifest,
)
from pd2bw_fx.graph import OperatorGraph
from pd2bw_fx.passes.codegen import WIDTH
from pd2bw_fx.plan import Plan
from pd2bw_fx.stage import StageProgram
from pd2bw_fx.state import require_values, same_bits
from pd2bw_fx.tensor_files import read_tensors, save_tensors
from pd2bw_fx.traced import TraceReport

if TYPE_CHECKING:
    from pd2bw_fx.pipeline import Pipeline

KIND = "pd2bw_fx pipeline"
SCHEMA = 3


def save_pipeline(pipeline: Pipeline, folder: str | Path) -> None:
    """Writes the whole pipeline; the folder appears only when it is complete."""
    require_path("folder", folder)
    tensors = pipeline.tensors()
    require_values(pipeline.graph, tensors)
    with whole_folder(folder) as fresh:
        for program in pipeline.programs:
            (fresh / f"stage_{program.stage}.py").write_text(program.source, encoding="utf-8")
            held = {own: tensors[name] for own, name in program.names.items()}
            _write_tensors(fresh / f"stage_{program.stage}.safetensors", held)
        as_formatted = f"line-length = {WIDTH}\n"
        (fresh / "ruff.toml").write_text(as_formatted, encoding="utf-8")
        if pipeline.example is not None:
            _write_tensors(fresh / "example.safetensors", pipeline.example)
        if pipeline.trace_report is not None:
            (fresh / _TRACE).write_text(
                json.dumps(pipeline.trace_report.to_json(), indent=1) + "\n", encoding="utf-8"
            )
        for name, data in _parts(pipeline).items():
            (fresh / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        facts = {
            "kind": KIND,
            "schema": SCHEMA,
            "versions": {"torch": torch.__version__},
            "model": pipeline.graph.model_name,
            "fingerprint": pipeline.graph.fingerprint(),
            "num_stages": len(pipeline.programs),
        }
        write_manifest(fresh, facts)


def read_pipeline(folder: str | Path, *, edited: bool = False) -> dict[str, Any]:
    """Returns the arguments of `Pipeline`, read without the model's own code.

    With `edited`, files may differ from the manifest: that is how hand-edited stages are loaded. Raises
    PlanMismatchError naming the file that is missing, altered, or made for another model, InputError where
    there is no folder.
    """
    require_path("folder", folder)
    require_choice("edited", edited, True, False)
    folder = Path(folder)
    manifest = read_manifest(folder, kind=KIND, check=not edited)
    if manifest.get("schema") != SCHEMA:
        raise PlanMismatchError(
            f"{folder} has schema {manifest.get('schema')!r}, this version reads {SCHEMA}; save it again"
        )
    graph: OperatorGraph = _read(folder / "graph.json", OperatorGraph.from_json)
    plan: Plan = _read(folder / "plan.json", Plan.from_json)
    if plan.fingerprint != graph.fingerprint():
        raise PlanMismatchError(
            f"{folder / 'plan.json'} was made for another model (graph {plan.fingerprint}, this folder's is "
            f"{graph.fingerprint()}); split the model again"
        )
    programs: tuple[StageProgram, ...] = _read(
        folder / "stages.json", lambda entries: tuple(_programs(folder, entries))
    )
    tensors = _weights(folder, programs, graph)
    example, trace = folder / "example.safetensors", folder / _TRACE
    return {
        "graph": graph,
        "costs": _read(folder / "costs.json", Costs.from_json),
        "cluster": _read(folder / "cluster.json", Cluster.from_json),
        "plan": plan,
        "schedule": _read(folder / "schedule.json", Schedule.from_json),
        "programs": programs,
        "tensors": tensors,
        "batch_layout": _read(folder / "batch.json", lambda data: data and BatchLayout.from_json(data)),
        "example": _read_tensors(example) if example.is_file() else None,
        "trace_report": _read(trace, TraceReport.from_json) if trace.is_file() else None,
        "planning_options": _read(folder / "setting.json", _planning_options),
    }


def require_plan_of_stages(folder: str | Path) -> None:
    """Raises PlanMismatchError for a plan that was edited since the stages beside it were written."""
    plan = Path(folder) / "plan.json"
    if sha256(plan) != read_manifest(folder, kind=KIND, check=False)["files"].get(plan.name):
        raise PlanMismatchError(
            f"{plan} was edited, and the stages beside it are cut by the plan before; give it to "
            "split(model, .., plan=Plan.loads(text)), which writes stages for it"
        )


def _planning_options(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that the plan was made with: those that were given, no defaults."""
    made = {"memory_model": lambda model: MemoryModel(**model), "constraints": Constraints.from_json}
    return {
        name: made[name](value) if value is not None and name in made else value
        for name, value in data.items()
    }


_TRACE = "trace.json"


def _parts(pipeline: Pipeline) -> dict[str, Any]:
    layout = pipeline.batch_layout
    return {
        "graph": pipeline.graph.to_json(),
        "plan": pipeline.plan.to_json(),
        "costs": pipeline.costs.to_json(),
        "cluster": pipeline.cluster.to_json(),
        "schedule": pipeline.schedule.to_json(),
        "stages": [program.to_json() for program in pipeline.programs],
        "batch": None if layout is None else layout.to_json(),
        "setting": {name: _plain(value) for name, value in pipeline.planning_options.items()},
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Constraints):
        return value.to_json()
    return asdict(value) if isinstance(value, MemoryModel) else value


def _read(path: Path, made: Callable[[Any], Any]) -> Any:
    """Returns what `made` makes from the JSON in a file, which may have been edited by hand."""
    try:
        return made(_read_json(path))
    except Pd2bwError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PlanMismatchError(
            f"{path} is not as Pipeline.save writes it ({type(error).__name__}: {error}); undo what was "
            "edited in it, or save the pipeline again"
        ) from error


def _programs(folder: Path, entries: Any) -> Iterator[StageProgram]:
    for stage, entry in enumerate(entries):
        path = folder / f"stage_{stage}.py"
        source = _read_text(path)
        try:
            compile(source, str(path), "exec")
        except SyntaxError as error:
            raise PlanMismatchError(f"{path}, line {error.lineno}: {error.msg}: {error.text or ''}") from None
        yield StageProgram.from_json(entry, source)


def _weights(folder: Path, programs: Sequence[StageProgram], graph: OperatorGraph) -> dict[str, Tensor]:
    """Returns the weights by name in the graph.

    Raises PlanMismatchError for a tensor that is not as the stage has it, and for tied ones with different
    values.
    """
    places: dict[str, str] = {}
    found: dict[str, Tensor] = {}
    for program in programs:
        path = folder / f"stage_{program.stage}.safetensors"
        held = _read_tensors(path)
        _require_fitting(path, held, program, graph)
        for own, tensor in held.items():
            name, place = program.ties.get(own, own), f"{own!r} in {path.name}"
            known, first = found.setdefault(name, tensor), places.setdefault(name, place)
            if first != place and not same_bits(known, tensor):
                raise PlanMismatchError(
                    f"{folder} has other values for {place} than for {first}, which are of one parameter of "
                    "the model; write the same tensor in both places"
                )
    return found


def _require_fitting(
    path: Path, found: Mapping[str, Tensor], program: StageProgram, graph: OperatorGraph
) -> None:
    """Raises PlanMismatchError for weights that were written by hand and do not fit the stage."""
    missing, unknown = program.names.keys() - found.keys(), found.keys() - program.names.keys()
    if missing:
        also = f" (it has {min(unknown)!r}, which is none of the stage's)" if unknown else ""
        raise PlanMismatchError(f"{path} has no {min(missing)!r}{also}; write every tensor of the stage")
    if unknown:
        raise PlanMismatchError(f"{path} has {min(unknown)!r}, which is none of the stage's; leave it out")
    specs = {**graph.parameters, **graph.buffers}
    for own, tensor in found.items():
        spec = specs[program.names[own]].spec if program.names[own] in specs else None
        if spec is None or spec.example_shape is None:
            continue
        expected, given = (spec.dtype, spec.example_shape), (tensor.dtype, tuple(tensor.shape))
        if given != expected:
            raise PlanMismatchError(
                f"{path} has {own!r} as {given[0]} {given[1]}; expected: {expected[0]} {expected[1]}, "
                "which the stage was split with"
            )


def _read_json(path: Path) -> Any:
    try:
        return json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise PlanMismatchError(f"{path} is no valid JSON: {error}") from None


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanMismatchError(f"{path} cannot be read: {error}") from None


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    save_tensors(tensors, path)


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return read_tensors(path)
    except (SafetensorError, OSError, ValueError, TypeError, AttributeError) as error:
        raise PlanMismatchError(f"{path} is no readable safetensors file: {error}") from None
