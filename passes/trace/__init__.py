"""From a model to a traced program: front ends tried in a fixed order.

1. `export`: `torch.export.export(strict=False)`; dimension 0 of every input that has the batch's size is
   the named dimension "batch", so that the program runs at any batch size. If the model asks for the batch
   size in Python, it runs at all sizes with the example's answer.
2. `export-as-example`: the same for a model that asks for the values of tensors in Python, if they are
   constants or follow from sizes alone, if it asks in order to assert something or to raise an error, or if a
   layer of torch's asks; on request, whatever depends on them. See `patches/conditions.py`.
3. `export-static`: as these two, at the example's sizes alone, with a note that says so.
4. `fx`: `torch.fx` symbolic tracing; the only one where there are no example inputs.

`export-sequence`, on request, is tried before these: `export` with the length of token sequences open too.
The report keeps the reason of each front end that failed, and the lines of the model that stop `export`, as
its draft mode finds them.

    module            what is in it
    inputs            example inputs: found, bound to the forward's arguments, flattened and named
    program           the module that is traced: flat tensors in, flat named tensors out, the model inside
    front_ends        one front end's trace of a program, with the batch sizes that it is right for
    exported          the front ends by torch.export, and all their retries
    symbolic          the front end by torch.fx
    given             programs that the user traced
    vmap_regions      what torch.vmap maps, rewritten in an exported program as operators on whole batches
    size_guards       the batch sizes that a trace's guards hold for
    eager_run         the model run as it is: does it accept the example, what conditions does it meet
    source_lines      the author's line that an error or a node comes from
    own_faults        the warning of a front end that fails by a mistake of our own
    draft             the lines that stop torch.export, from its draft mode
    advice            the error where no front end could trace
    notes             what users are told about a trace
    torch_messages    parts of torch's messages that decide how a trace goes on
    patches/          context managers that change torch, Python or the model's files during a trace
    checks/           checks that refuse a model or a trace of it
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx, nn
from torch.export import ExportedProgram

from pd2bw_fx.errors import InputError, Pd2bwError, TraceError, require_not_interrupted
from pd2bw_fx.model_arguments import accepts, require_loss_function
from pd2bw_fx.program import silence_torch_errors, training_context
from pd2bw_fx.traced import Attempt, Traced, TraceReport

from .advice import cannot_be_traced, may_be_allowed
from .checks.parameter_memory import require_memory_apart
from .checks.second_call import OtherNextTimeError, called_before, fill_caches_outside, require_nothing_kept
from .checks.sparse_tensors import require_dense, require_dense_inputs
from .checks.unsupported import (
    refuse_inference_mode,
    refuse_tensor_hooks,
    require_data,
    require_traceable_modules,
)
from .draft import draft_findings, lines_of_choices
from .eager_run import conditions_of, keep_program, require_eager_run
from .front_ends import trace_by
from .given import accept_exported, accept_graph_module
from .inputs import (
    FlatArguments,
    arguments_without_examples,
    common_batch_size,
    find_example_inputs,
    flatten_arguments,
    without_cache,
)
from .notes import notes_of
from .own_faults import warn_of_own_fault
from .patches.conditions import ChoiceError, Conditions, UnseenChoiceError
from .patches.loss_numbers import note_on, why_untraceable
from .program import Program
from .source_lines import one_line, source_line
from .symbolic import writes_in_place

__all__ = ["find_example_inputs", "trace"]

_FRONT_ENDS: dict[str, tuple[str, ...]] = {
    "auto": ("export", "export-as-example", "export-static", "fx"),
    "export": ("export", "export-static"),
    "export-as-example": ("export", "export-as-example", "export-static"),
    "fx": ("fx",),
    "export-sequence": ("export-sequence", "export", "export-static"),
}

_ASSUMING = ("export-as-example", "export-static")  # front ends that go the example's way
_ALLOWING = ("auto", "export-as-example")  # requests that allow it, the first one for checks alone

_NO_CONDITIONS = (
    "no condition on values was met on the example inputs (of numbers that int() or float() has made none is "
    "seen; item() is), or the weights hold no data to run the model with"
)

_Failure = tuple[str, Exception]  # a front end's name, and why it could not trace
_Way = tuple[FlatArguments, tuple[str, ...]]  # arguments, and the front ends to try with them


@dataclass(frozen=True, slots=True)
class _Request:
    """What one call of `trace` is to trace; `batch_size` is None where there are no example inputs."""

    model: nn.Module
    loss_fn: Callable[..., Any] | None
    tracer: str
    batch_size: int | None

    def program(self, flat: FlatArguments) -> Program:
        return Program(self.model, flat, self.loss_fn)


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What the front ends made of a request: the last program that they tried, and its trace, if any."""

    program: Program
    traced: Traced | None
    failures: tuple[_Failure, ...]

    @property
    def needs_findings(self) -> bool:
        """Whether `export` failed, and no other front end has an open batch size."""
        is_open = self.traced is not None and self.traced.dynamic_batch
        return any(name == "export" for name, _ in self.failures) and not is_open


def trace(
    model: nn.Module | ExportedProgram,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: Callable[..., Any] | None = None,
    targets: Any = None,
    tracer: str = "auto",
) -> Traced:
    """Traces the model by the first front end that can; see the module's docstring.

    `args` and `kwargs` are one batch of example inputs as the forward takes them (None and None: there are
    none). With `loss_fn`, what is traced ends in `loss_fn(output, targets)`, where output is what the model
    returns, unchanged; without targets, in `loss_fn(output)`. A GraphModule or ExportedProgram is
    accepted as it is. The model is left unchanged.

    Raises InputError if the model does not accept the example inputs, and TraceError with every front end's
    reason, the line that stops it and what to try.
    """
    _require_arguments(tracer, kwargs)
    if isinstance(model, ExportedProgram) or (isinstance(model, fx.GraphModule) and loss_fn is None):
        given = _accepted(model, args or (), kwargs or {}, loss_fn)
        require_dense(given)
        require_memory_apart(given)
        return given
    if loss_fn is not None:
        require_loss_function("loss_fn", loss_fn)
    require_traceable_modules(model)
    started = time.perf_counter()
    if args is None and kwargs is None:
        if tracer not in ("auto", "fx"):
            raise InputError("torch.export needs example inputs; pass example_args, or tracer='fx'")
        flat = arguments_without_examples(model, has_targets=loss_fn is not None and not accepts(loss_fn, 1))
        request = _Request(model, loss_fn, tracer, None)
        ways: list[_Way] = [(flat, ("fx",))]
    else:
        flat = flatten_arguments(model, () if args is None else args, kwargs or {}, targets)
        require_data(model, flat.names, flat.tensors)
        require_dense_inputs(flat.names, flat.tensors)
        request = _Request(model, loss_fn, tracer, common_batch_size(flat))
        fill_caches_outside(request.program(flat))
        ways = list(_ways(model, flat, (args, kwargs, targets), tracer))
    outcome, notes = _first_or_later_call(ways, request, flat)
    findings = _findings(outcome, request.batch_size)
    if outcome.traced is None or outcome.traced.report.tracer == "fx":
        _require_no_numbers(request.program(flat), outcome)
    if outcome.traced is None:
        raise cannot_be_traced(outcome.program, outcome.failures, findings, tracer)
    require_dense(outcome.traced)
    require_memory_apart(outcome.traced)
    own_notes = outcome.traced.report.notes
    report = TraceReport(
        tracer=outcome.traced.report.tracer,
        attempts=tuple(Attempt(name, one_line(error)) for name, error in outcome.failures),
        notes=(
            *findings,
            *notes,
            *notes_of(outcome.program, request.batch_size),
            *note_on(outcome.program.record.numbers_of_loss, outcome.traced.program),
            *own_notes,
        ),
        duration_s=time.perf_counter() - started,
    )
    return replace(outcome.traced, report=report)


def _require_no_numbers(program: Program, outcome: _Outcome) -> None:
    """Raises TraceError where a line of loss_fn that makes numbers of tensors has stopped a front end."""
    stopped = [source_line(error) for _, error in outcome.failures]
    if program.loss_fn is None or not any(stopped):
        return
    require_eager_run(program)
    lines = [line for line in program.record.numbers_of_loss if line in stopped]
    if lines:
        raise TraceError(why_untraceable(lines)) from outcome.failures[0][1]


def _findings(outcome: _Outcome, batch_size: int | None) -> tuple[str, ...]:
    """Returns the lines of the model that stop `export`; those of choices are known without a draft."""
    if not outcome.needs_findings:
        return ()
    for _, error in outcome.failures:
        if isinstance(error, ChoiceError):
            return lines_of_choices(error)
    has_passed = outcome.traced is not None and outcome.traced.report.tracer.startswith("export")
    return draft_findings(outcome.program, batch_size, values=not has_passed)


def _require_arguments(tracer: str, kwargs: Any) -> None:
    if tracer not in _FRONT_ENDS:
        raise InputError(f"tracer is {tracer!r}, expected one of {', '.join(map(repr, _FRONT_ENDS))}")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise InputError(
            f"example_kwargs is a {type(kwargs).__name__}, expected a dict of the forward's keyword "
            "arguments; several positional ones are given as a tuple: split(model, (x, y))"
        )


def _ways(model: nn.Module, flat: FlatArguments, call: tuple[Any, Any, Any], tracer: str) -> Iterator[_Way]:
    """Yields the front ends to try, each with the arguments that it calls the model with.

    Open lengths are also tried without the cache for generating: the cache may allow only some lengths, and
    nobody reads it in training.
    """
    args, kwargs, targets = call
    front_ends = _FRONT_ENDS[tracer]
    uncached = without_cache(model, args or (), kwargs or {}) if tracer == "export-sequence" else None
    if uncached is None:
        yield flat, front_ends
        return
    yield flat, front_ends[:1]
    yield flatten_arguments(model, args or (), uncached, targets), front_ends[:1]
    yield flat, front_ends[1:]


def _first_or_later_call(
    ways: Sequence[_Way], request: _Request, flat: FlatArguments
) -> tuple[_Outcome, tuple[str, ...]]:
    """Traces the first call of the model or, where a later one computes something else, a later one.

    Returns notes for the user beside the outcome. Raises TraceError for a model that computes something else
    in every call.
    """
    try:
        return _tried(ways, request), ()
    except OtherNextTimeError as first:
        with called_before(request.program(flat)) as is_as_before:
            try:
                if not is_as_before:
                    raise TraceError(str(first)) from first
                outcome = _tried(ways, request)
            except OtherNextTimeError:  # every time
                raise TraceError(str(first)) from first
        return outcome, (f"traced as the model runs after its first call, which sets {first.change}",)


def _tried(ways: Sequence[_Way], request: _Request) -> _Outcome:
    """Returns the outcome of the first way that works, or of the last one, with all failures so far."""
    failures: list[_Failure] = []
    for arguments, front_ends in ways:
        outcome = _first_that_works(front_ends, arguments, request)
        failures += outcome.failures
        if outcome.traced is not None:
            break
    return replace(outcome, failures=tuple(failures))


def _first_that_works(front_ends: Sequence[str], flat: FlatArguments, request: _Request) -> _Outcome:
    failures: list[_Failure] = []
    program = request.program(flat)
    met = functools.cache(lambda: conditions_of(request.program(flat)))
    outside = sys.exc_info()[1]
    for name in front_ends:
        program = request.program(flat)
        if name == "fx" and any(isinstance(error, UnseenChoiceError) for _, error in failures):
            continue
        if name == "export-static" and failures and may_be_allowed(failures[-1]):
            failures.append((name, failures[-1][1]))  # it would be asked for the same values
            continue
        try:
            traced = _attempt(name, program, request, met)
            if traced is not None:
                outcome = _Outcome(program, traced, tuple(failures))
                return _asserted(outcome, flat, request) or outcome
            if request.tracer == name:
                failures.append((name, ValueError(_NO_CONDITIONS)))
        except Pd2bwError:
            raise
        except Exception as error:  # whatever the model does under this tracer, the next one may do without
            require_not_interrupted(error, outside)
            failures.append((name, error))
            if name == front_ends[0] and request.batch_size is not None:
                require_eager_run(program, error)
            warn_of_own_fault(name, error)
    return _Outcome(program, None, tuple(failures))


def _attempt(name: str, program: Program, request: _Request, met: Callable[[], Conditions]) -> Traced | None:
    """Traces the program by one front end, and raises whatever stops it.

    `met` returns the conditions that the model meets on the example. Returns None for `export-as-example`
    where there is none that could be assumed.
    """
    conditions = program.options.conditions
    if name in _ASSUMING and request.tracer in _ALLOWING:
        conditions = program.options.conditions = met()
        if name == "export-as-example" and not conditions.are_any:
            return None
    with (
        keep_program(program),
        silence_torch_errors(),
        training_context(),
        refuse_tensor_hooks(),
        refuse_inference_mode(request.model),
    ):
        traced = trace_by(name, program, request.batch_size)
    require_nothing_kept(program)  # once what the trace has left in attributes is gone
    if request.tracer == "auto":
        conditions.require_checks()
    return traced


def _asserted(by_fx: _Outcome, flat: FlatArguments, request: _Request) -> _Outcome | None:
    """Traces again, with answers asserted, what torch.fx traced though Python asks for values in it.

    None of these values depends on an input. Returns None where there are none, where that cannot be traced,
    or where the forward may have written what is asked.
    """
    traced = by_fx.traced
    assert traced is not None
    is_by_fx = request.tracer == "auto" and traced.report.tracer == "fx"
    if not is_by_fx or not any(map(may_be_allowed, by_fx.failures)):
        return None
    assert isinstance(traced.program, fx.GraphModule)
    if writes_in_place(traced.program.graph):
        return None
    name = "export-as-example"
    again = _first_that_works((name,), flat, replace(request, tracer=name))
    return None if again.traced is None else replace(again, failures=by_fx.failures[:1])


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
