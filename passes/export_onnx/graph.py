"""Makes one stage an ONNX model: torch translates it, then it is tidied and given the promised names."""

from __future__ import annotations

import contextlib
import io
import keyword
import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor, fx, nn

from pd2bw_fx.contraction import keep_contractions_symbolic
from pd2bw_fx.errors import ExportError
from pd2bw_fx.graph import OperatorGraph
from pd2bw_fx.grouped_products import size_products_of_all_types
from pd2bw_fx.less_work import do_less_work
from pd2bw_fx.names import free_name
from pd2bw_fx.onnx_session import require
from pd2bw_fx.process_settings import leave_other_flags_alone
from pd2bw_fx.recurrent_operators import run_one_step
from pd2bw_fx.stage import Port, StageProgram

from .assertions import add_checks, take_conditions
from .known_sizes import sizes_may_be_known
from .origin import WRAPPED_PREFIX, Wrapped, describe_nodes
from .refusal import cannot_be_translated
from .spelling import TranslatableSpelling
from .translations import operators_listed_once, own_translations, translations_read_once

if TYPE_CHECKING:
    import onnx_ir as ir

_TALKATIVE = (
    "torch.onnx", "torch.export", "torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor",
    "onnxscript", "onnx_ir",
)  # fmt: skip


def stage_model(
    program: StageProgram,
    module: nn.Module,
    inputs: Sequence[Tensor],
    *,
    opset: int,
    names: Mapping[str, str],
    graph: OperatorGraph | None = None,
) -> tuple[ir.Model, list[str]]:
    """Returns the stage as a model, and the messages of what it asserts.

    It is translated in the mode that the module is in, and dynamic where its ports have a symbol for a size.
    Inputs and outputs are called `names[value]`, parameters and buffers as in the state_dict. Nodes note
    where they come from; with the operator graph they know more source lines.
    """
    shapes = tuple(_dynamic_axes(program.stage, port) for port in program.inputs)
    _require_known_layers(program, module)
    spelling = TranslatableSpelling(opset)
    asserted = spelling.asserted
    try:
        with (
            _quiet(),
            spelling,
            translations_read_once(),
            operators_listed_once(),
            keep_contractions_symbolic(),
            do_less_work(),
            run_one_step(),
            size_products_of_all_types(),
            sizes_may_be_known(),
            leave_other_flags_alone(),
            patch.object(fx.graph, "_format_target", _read_attribute),
        ):
            exported = torch.onnx.export(
                Wrapped(module, asserted),
                tuple(tensor.contiguous() for tensor in inputs),  # else strides would be symbols too
                dynamo=True,
                opset_version=opset,
                dynamic_shapes=(shapes,) if any(shapes) else None,
                custom_translation_table=own_translations(),
                optimize=False,
                verbose=False,
            )
            assert exported is not None
            model: ir.Model = exported.model
            held = _with_names_of_their_own(model)
            _tidy(model, held)
            describe_nodes(model, program, graph)
    except Exception as error:  # the exporter raises whatever the operator's translation raised
        raise cannot_be_translated(program, opset, error) from error
    conditions = take_conditions(model, asserted.messages)
    _name(model, program, names)
    add_checks(model, conditions, asserted.messages)
    return model, asserted.messages


def _with_names_of_their_own(model: ir.Model) -> set[str | None]:
    """Gives parameters and buffers their names in the stage, and returns the names of all initializers.

    A value within a translation of torch's may have such a name too ("scale"), and gets another one.
    """
    initializers = list(model.graph.initializers.values())  # renaming one changes the mapping
    computed = [value for node in model.graph for value in node.outputs]
    names = {(value.name or "").removeprefix(WRAPPED_PREFIX) for value in initializers}
    taken = names | {value.name or "" for value in computed}
    for value in computed:
        if value.name in names:
            value.name = free_name(value.name, taken)
            taken.add(value.name)
    for value in initializers:
        value.name = (value.name or "").removeprefix(WRAPPED_PREFIX)
    return {value.name for value in initializers}


def _require_known_layers(program: StageProgram, module: nn.Module) -> None:
    """Refuses a projected LSTM, which the exporter writes without its projection."""
    for path, inner in module.named_modules():
        if isinstance(inner, nn.LSTM) and inner.proj_size:
            raise ExportError(
                f"layer {path!r} of stage {program.stage} is an LSTM with proj_size={inner.proj_size}, and "
                "ONNX's LSTM has no projection"
            )
    projections = [name for name in program.parameters if "weight_hr_l" in name]
    if projections and "torch.lstm(" in program.source:
        raise ExportError(
            f"stage {program.stage} has an LSTM with a projection ({projections[0]!r}), and ONNX's LSTM has "
            "none; write its steps out with nn.LSTMCell, or use one without proj_size"
        )


def produced(program: StageProgram) -> list[Port]:
    """Returns the outputs of the file, without those that are inputs too, each once."""
    ports = {port.value: port for port in reversed(program.outputs)}
    received = {port.value for port in program.inputs}
    return [port for port in program.outputs if ports[port.value] is port and port.value not in received]


def _dynamic_axes(stage: int, port: Port) -> dict[int, Any]:
    if port.spec.shape is None:
        raise ExportError(
            f"the shape of {port.value!r}, an input of stage {stage}, is not known; split the model with "
            "example_args to export it"
        )
    return {
        axis: torch.export.Dim.DYNAMIC for axis, size in enumerate(port.spec.shape) if isinstance(size, str)
    }


def _tidy(model: ir.Model, held: set[str | None]) -> None:
    """Folds constants, but nothing that is computed from parameters: these keep their names and shapes.

    The exporter's own optimisation stores transposed weights under new names, and merges parameters whose
    entries happen to be equal.
    """
    require("onnxscript")
    from onnx_ir import passes
    from onnx_ir.passes import common
    from onnxscript import optimizer

    passes.Sequential(common.InlinePass())(model)

    def should_fold(node: ir.Node) -> bool | None:
        reads_parameter = any(value is not None and value.name in held for value in node.inputs)
        return False if reads_parameter else None

    optimizer.fold_constants(model, should_fold=should_fold)
    # The one of two equal values that is kept may have no known type.
    given = [(value.type, value.shape) for value in model.graph.outputs]
    passes.Sequential(
        common.RemoveUnusedNodesPass(),
        common.RemoveUnusedFunctionsPass(),  # type: ignore[no-untyped-call]
        common.RemoveUnusedOpsetsPass(),
        common.CommonSubexpressionEliminationPass(),
        common.IdentityEliminationPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.OutputFixPass(),
        common.NameFixPass(),
    )(model)
    for value, (kind, shape) in zip(model.graph.outputs, given, strict=True):
        if value.type is None:
            value.type, value.shape = kind, shape


def _name(model: ir.Model, program: StageProgram, names: Mapping[str, str]) -> None:
    for alias, name in program.ties.items():
        # The exporter keeps one tensor of a tie, under whichever name it met last.
        if alias in model.graph.initializers and name not in model.graph.initializers:
            model.graph.initializers[alias].name = name
    outgoing = produced(program)
    kept = [
        v
        for v, port in zip(model.graph.outputs, program.outputs, strict=True)
        if any(port is own for own in outgoing)
    ]
    model.graph.outputs[:] = kept
    ports = (*program.inputs, *outgoing)
    values = (*model.graph.inputs, *kept)
    wanted = {names[port.value] for port in ports}
    ours = {id(value) for value in values}
    taken = wanted | {value.name or "" for value in _values(model)}
    for value in _values(model):
        if value.name in wanted and id(value) not in ours:
            value.name = _unused(value.name or "", taken)
            taken.add(value.name)
    # First out of the way, since they may have one another's names.
    for index, value in enumerate(values):
        value.name = _unused(f"port_{index}", taken)
    for value, port in zip(values, ports, strict=True):
        value.name = names[port.value]
    _name_sizes(model, program)


def _name_sizes(model: ir.Model, program: StageProgram) -> None:
    """Gives sizes that the exporter calls s23 the graph's own symbol, such as "batch"."""
    import onnx_ir as ir

    symbols: dict[str, str] = {}
    for value, port in zip(model.graph.inputs, program.inputs, strict=True):
        for found, size in zip(value.shape or (), port.spec.shape or (), strict=False):
            if isinstance(found, ir.SymbolicDim) and isinstance(size, str) and found.value is not None:
                symbols[found.value] = size if size.isidentifier() else f"({size})"
    for value in _values(model):
        if value.shape is not None:
            value.shape = ir.Shape(
                _renamed(size.value, symbols) if isinstance(size, ir.SymbolicDim) else size
                for size in value.shape
            )


def _renamed(expression: str | None, symbols: Mapping[str, str]) -> str | None:
    if expression is None:
        return None
    return re.sub(r"[A-Za-z_]\w*", lambda match: symbols.get(match[0], match[0]), expression)


def _values(model: ir.Model) -> Iterator[ir.Value]:
    yield from model.graph.inputs
    yield from list(model.graph.initializers.values())  # a copy, as above
    for node in model.graph.all_nodes():
        yield from node.outputs


def _unused(name: str, taken: set[str]) -> str:
    number = 1
    while f"{name}_{number}" in taken:
        number += 1
    return f"{name}_{number}"


def _read_attribute(base: str, target: str) -> str:
    """Returns code that reads an attribute; torch.fx would write `heads.class`, which is no Python."""
    for name in target.split("."):
        is_plain = name.isidentifier() and not keyword.iskeyword(name)
        base = f"{base}.{name}" if is_plain else f"getattr({base}, {name!r})"
    return base


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences the exporter, which prints its progress and logs what it skips."""
    loggers = [logging.getLogger(name) for name in _TALKATIVE]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        silence = io.StringIO()
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(silence),
            contextlib.redirect_stderr(silence),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
