"""From a model to a traced program: front ends tried in a fixed order.

1. `export`: `torch.export.export(strict=False)`; dimension 0 of every input that has the batch's size is
   the named dimension "batch", so that any batch size can be run; of a model that asks for the batch size
   in Python, all sizes with the example's answer.
2. `export-as-example`: the same where Python asks for the values of tensors, if they are constants, or it
   does so to assert something or to raise an error, or a layer of torch's does; on request, whatever depends
   on them. See `conditions.py`.
3. `export-static`: as the first one, at the example's sizes alone, with a note that says so.
4. `fx`: `torch.fx` symbolic tracing; the only one where there are no example inputs.

`export-sequence`, on request, is tried before these: `export` with the length of token sequences open too.
The reason of each one that failed is kept in the report, and beside it the lines of the model that stop
`export`, as its draft mode finds them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx, nn
from torch.export import ExportedProgram

from pd2bw_fx.arguments import require_loss_function
from pd2bw_fx.attributes import attributes_kept
from pd2bw_fx.errors import InputError, Pd2bwError, TraceError, require_not_interrupted
from pd2bw_fx.program import torch_errors_unlogged, training_context
from pd2bw_fx.size_range import ANY_SIZE
from pd2bw_fx.traced import Attempt, Traced, TraceReport

from .advice import cannot_be_traced, may_be_allowed
from .checks.parameter_memory import require_memory_apart
from .checks.second_call import OtherNextTimeError, called_before, fill_caches_outside, require_nothing_kept
from .checks.single_sample import is_right_for_one
from .checks.unsupported import (
    refuse_inference_mode,
    refuse_tensor_hooks,
    require_data,
    require_traceable_modules,
)
from .draft import draft_findings
from .eager_run import conditions_of, require_eager_run, require_nothing_written, state_kept
from .exported import batch_sizes, export, foreign_operators
from .given import accept_exported, accept_graph_module
from .inputs import (
    FlatArguments,
    arguments_without_examples,
    common_batch_size,
    find_example_inputs,
    flatten_arguments,
    without_cache,
)
from .notes import note_on_operator, notes_of
from .patches.conditions import UnseenChoiceError
from .program import MODEL_PREFIX, Program
from .source_lines import one_line
from .symbolic import trace_symbolically, writes_in_place

__all__ = ["find_example_inputs", "trace"]

_FRONT_ENDS: dict[str, tuple[str, ...]] = {
    "auto": ("export", "export-as-example", "export-static", "fx"),
    "export": ("export", "export-static"),
    "export-as-example": ("export", "export-as-example"),
    "fx": ("fx",),
    "export-sequence": ("export-sequence", "export", "export-static"),
}

_OPEN = ("export", "export-as-example", "export-sequence")

_NO_CONDITIONS = (
    "no condition on values was met on the example inputs (of numbers that int() or float() has made none is "
    "seen; item() is), or the weights hold no data to run the model with"
)


def trace(
    model: nn.Module | ExportedProgram,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: Callable[..., Any] | None = None,
    targets: Any = None,
    tracer: str = "auto",
) -> Traced:
    """The model's program, by the first front end that carries it; see the module's docstring.

    `args` and `kwargs` are one batch of example inputs as the forward takes them (None and None: there are
    none). With `loss_fn`, what is traced ends in `loss_fn(output, targets)`, where output is what the model
    returns, unchanged. A GraphModule or ExportedProgram is accepted as it is. The model is left unchanged.

    Raises InputError if the model does not accept the example inputs, and TraceError with every front end's
    reason, the line that stops it and what to try.
    """
    if tracer not in _FRONT_ENDS:
        raise InputError(f"tracer is {tracer!r}, expected one of {', '.join(map(repr, _FRONT_ENDS))}")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise InputError(
            f"example_kwargs is a {type(kwargs).__name__}, expected a dict of the forward's keyword "
            "arguments; several positional ones are given as a tuple: split(model, (x, y))"
        )
    if isinstance(model, ExportedProgram) or (isinstance(model, fx.GraphModule) and loss_fn is None):
        given = _accepted(model, args or (), kwargs or {}, loss_fn)
        require_memory_apart(given)
        return given
    if loss_fn is not None:
        require_loss_function("loss_fn", loss_fn)
    require_traceable_modules(model)
    started = time.perf_counter()
    if args is None and kwargs is None:
        flat, batch_size = arguments_without_examples(model, has_targets=loss_fn is not None), None
        front_ends: tuple[str, ...] = ("fx",)
        if tracer not in ("auto", "fx"):
            raise InputError("torch.export needs example inputs; pass example_args, or tracer='fx'")
    else:
        flat = flatten_arguments(model, () if args is None else args, kwargs or {}, targets)
        require_data(model, flat.names, flat.tensors)
        batch_size, front_ends = common_batch_size(flat), _FRONT_ENDS[tracer]
        fill_caches_outside(Program(model, flat, loss_fn))
    ways = list(_ways(model, flat, (args, kwargs, targets), tracer, front_ends))
    before: list[str] = []
    try:
        program, traced, attempts = _tried(ways, model, loss_fn, batch_size, tracer)
    except OtherNextTimeError as first:
        with called_before(Program(model, flat, loss_fn)) as is_as_before:
            try:
                if not is_as_before:
                    raise TraceError(str(first)) from first
                program, traced, attempts = _tried(ways, model, loss_fn, batch_size, tracer)
            except OtherNextTimeError:  # every time
                raise TraceError(str(first)) from first
        before.append(f"traced as the model runs after its first call, which sets {first.change}")
    is_open = traced is not None and traced.report.tracer in _OPEN
    findings = draft_findings(program, batch_size) if _failed_to_export(attempts) and not is_open else ()
    if traced is None:
        raise cannot_be_traced(program, attempts, findings, tracer)
    require_memory_apart(traced)
    report = TraceReport(
        tracer=traced.report.tracer,
        attempts=tuple(Attempt(name, one_line(error)) for name, error in attempts),
        notes=(*findings, *before, *notes_of(program, batch_size), *traced.report.notes),
        duration_s=time.perf_counter() - started,
    )
    return replace(traced, report=report)


def _ways(
    model: nn.Module,
    flat: FlatArguments,
    call: tuple[Any, Any, Any],
    tracer: str,
    front_ends: tuple[str, ...],
) -> Iterator[tuple[FlatArguments, tuple[str, ...]]]:
    """The front ends to try, with what they call the model with.

    For open lengths also without the cache for generating, which may allow only some of them and which
    nobody reads in training.
    """
    args, kwargs, targets = call
    uncached = without_cache(model, args or (), kwargs or {}) if tracer == "export-sequence" else None
    if uncached is None:
        yield flat, front_ends
        return
    yield flat, front_ends[:1]
    yield flatten_arguments(model, args or (), uncached, targets), front_ends[:1]
    yield flat, front_ends[1:]


def _tried(
    ways: Sequence[tuple[FlatArguments, tuple[str, ...]]],
    model: nn.Module,
    loss_fn: Callable[..., Any] | None,
    batch_size: int | None,
    tracer: str,
) -> tuple[Program, Traced | None, list[tuple[str, Exception]]]:
    """The first program, or the last that was tried, and why others could not be traced."""
    attempts: list[tuple[str, Exception]] = []
    for arguments, names in ways:
        program, traced, failed = _first_that_works(names, model, arguments, loss_fn, batch_size, tracer)
        attempts += failed
        if traced is not None:
            break
    return program, traced, attempts


def _asserted(
    traced: Traced,
    model: nn.Module,
    flat: FlatArguments,
    loss_fn: Callable[..., Any] | None,
    batch_size: int | None,
) -> tuple[Program, Traced] | None:
    """What torch.fx has traced though Python asks for values in it, none of which depends on an input: with
    the answers asserted. None where that cannot be traced, or where what is asked may have been written."""
    assert isinstance(traced.program, fx.GraphModule)
    if writes_in_place(traced.program.graph):
        return None
    name = "export-as-example"
    program, again, _ = _first_that_works((name,), model, flat, loss_fn, batch_size, name)
    return None if again is None else (program, again)


def _failed_to_export(attempts: Sequence[tuple[str, Exception]]) -> bool:
    return any(name == "export" for name, _ in attempts)


def _first_that_works(
    front_ends: Sequence[str],
    model: nn.Module,
    flat: FlatArguments,
    loss_fn: Callable[..., Any] | None,
    batch_size: int | None,
    tracer: str,
) -> tuple[Program, Traced | None, list[tuple[str, Exception]]]:
    attempts: list[tuple[str, Exception]] = []
    program = Program(model, flat, loss_fn)
    outside = sys.exc_info()[1]
    for name in front_ends:
        program = Program(model, flat, loss_fn)
        if name == "fx" and any(isinstance(error, UnseenChoiceError) for _, error in attempts):
            continue
        try:
            if name == "export-as-example":
                program.conditions = conditions_of(program)
                if not program.conditions.are_any:
                    if tracer == name:
                        attempts.append((name, ValueError(_NO_CONDITIONS)))
                    continue
            with (
                attributes_kept(model),
                torch_errors_unlogged(),
                training_context(),
                refuse_tensor_hooks(),
                refuse_inference_mode(model),
            ):
                traced = _traced(name, program, batch_size)
            require_nothing_kept(program)  # when what the trace has left in attributes is gone
            if tracer == "auto":
                program.conditions.require_checks()
            if tracer == "auto" and name == "fx" and any(map(may_be_allowed, attempts)):
                asserted = _asserted(traced, model, flat, loss_fn, batch_size)
                if asserted is not None:
                    return *asserted, attempts[:1]
            return program, traced, attempts
        except Pd2bwError:
            raise
        except Exception as error:  # whatever the model does under this tracer is the next one's chance
            require_not_interrupted(error, outside)
            attempts.append((name, error))
            if name == front_ends[0] and batch_size is not None:
                require_eager_run(program)
    return program, None, attempts


def _traced(name: str, program: Program, batch_size: int | None) -> Traced:
    flat, examples = program.flat, dict(zip(program.flat.names, program.flat.tensors, strict=False))
    sizes = ANY_SIZE
    if name == "fx":
        with state_kept(program) as written:
            graph: ExportedProgram | fx.GraphModule = trace_symbolically(program)
        require_nothing_written(written)
        if examples:
            require_eager_run(program)  # only now is it known which result is the loss
        notes: tuple[str, ...] = ("torch.fx does not see data types, and keeps torch.nn layers whole",)
    else:
        batch = None if name == "export-static" else batch_size
        graph = export(program, batch, with_lengths=name == "export-sequence")
        if batch is not None:
            sizes = batch_sizes(graph, _placeholders(graph, flat, batch), multiple_of=program.multiple_of)
        if batch is not None and sizes.least <= 1 and not is_right_for_one(graph, program, batch):
            sizes = replace(sizes, least=2)
            if batch == 1:
                raise ValueError("the model goes another way for one sample than for more")
        static = f"traced at batch size {batch_size} alone: no other one can be run"
        notes = (static,) if name == "export-static" else program.conditions.notes()
        if not sizes.is_open:
            notes += (
                f"this program is for batches of {sizes}: others may go another way through the model, where "
                "it, or a function that it calls (torch.cdist for one), asks for the batch size",
            )
        notes += tuple(map(note_on_operator, foreign_operators(graph)))
    return Traced(
        program=graph,
        model=program.model,
        inputs=flat.names,
        outputs=program.record.output_names,
        loss=program.record.loss,
        report=TraceReport(name, notes=notes),
        prefix=MODEL_PREFIX,
        batch_size=batch_size,
        batched_inputs=frozenset() if batch_size is None else flat.batched(batch_size),
        dynamic_batch=name in _OPEN,
        batch_sizes=sizes,
        lengths=flat.lengths(batch_size) if name == "export-sequence" and batch_size is not None else {},
        changing=tuple(change.module for change in program.watch.changes if change.is_of_a_layer),
        examples=examples,
        call=program.call if examples else None,
    )


def _placeholders(program: ExportedProgram, flat: FlatArguments, batch_size: int) -> list[str]:
    """What the program calls the inputs whose dimension 0 is the batch."""
    batched, inputs = flat.batched(batch_size), program.graph_signature.user_inputs
    return [str(inner) for name, inner in zip(flat.names, inputs, strict=True) if name in batched]


def _accepted(
    model: fx.GraphModule | ExportedProgram,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    loss_fn: Callable[..., Any] | None,
) -> Traced:
    if isinstance(model, ExportedProgram):
        if loss_fn is not None:
            raise InputError(
                "an ExportedProgram is taken as it is, without a loss_fn; compute the loss in the exported "
                "model, or pass the model itself"
            )
        return accept_exported(model)
    if not args and not kwargs:
        return accept_graph_module(model, (), {}, None)
    return accept_graph_module(model, args, kwargs, common_batch_size(flatten_arguments(model, args, kwargs)))
