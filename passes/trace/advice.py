"""The error where no front end could trace a model: why, and what to try."""

from __future__ import annotations

from collections.abc import Sequence

from pd2bw_fx.errors import TraceError
from pd2bw_fx.traced import Attempt

from .exported import OF_GAMMAS
from .patches.conditions import ChoiceError
from .program import Program
from .source_lines import chooses_at_random, met_packed_sequences, one_line, source_line
from .torch_messages import NO_NUMPY, NO_SIZES_BY_VALUES, SAMPLE_DIRICHLET, SIZES_BY_VALUES

_AS_EXAMPLE = "pass tracer='export-as-example' if it always goes the same way"
_ASKING = "if it always goes the same way ask the tensor itself or its item(), as `if x.max() > 1` does"
_ADVICE = (
    f"take what depends on tensor values out of Python control flow (torch.where), or {_AS_EXAMPLE}, have a "
    "loss or a part of the model run as it is written (pd2bw_fx.untraced), or pass a program that you "
    "exported yourself"
)
_ADVICE_FOR_PACKED = (
    "the recurrent layer on the padded batch, since how long packed sequences are depends on values; what "
    "comes behind a sequence's end is taken out with a mask, its last state with gather; or have the module "
    "that packs and pads run as it is written (pd2bw_fx.untraced)"
)
_ADVICE_FOR_SELECTIONS = (
    "all entries, with a weight of 0 for some (a mask, torch.where), in place of selecting some or going "
    "through some (x[mask], nonzero), since how many these are depends on values; or have the part of the "
    "model that selects, with all that needs their number, run as it is written (pd2bw_fx.untraced)"
)
_ADVICE_FOR_NUMPY = (
    "torch's functions in place of numpy's, since a trace holds what torch computes alone; or have the part "
    "of the model that needs numpy, or a loss, run as it is written (pd2bw_fx.untraced)"
)
_ADVICE_AT_RANDOM = (
    "without leaving layers out at random (layerdrop=0 or the like; a graph has them all), with inputs that "
    "are augmented at random before the model gets them, or with a choice inside the graph, "
    "torch.where(torch.rand(()) < rate, x, layer(x))"
)
_ADVICE_WITHOUT_EXAMPLES = (
    "example inputs (example_args, example_kwargs), with which torch.export can trace it"
)


_Attempts = Sequence[tuple[str, Exception]]  # a front end's name, and why it failed


def may_be_allowed(attempt: tuple[str, Exception]) -> bool:
    name, error = attempt
    return name == "export-as-example" and isinstance(error, ChoiceError)


def cannot_be_traced(
    program: Program, attempts: _Attempts, findings: Sequence[str], tracer: str
) -> TraceError:
    """Returns the error for a model that no front end could trace.

    `findings` are the lines of the model that are known to stop a trace; `tracer` is what the user asked for.
    """
    lines = [f"{type(program.model).__name__} cannot be traced."]
    lines += [f"  {Attempt(name, one_line(error))}" for name, error in attempts]
    # The front end that assumes conditions gets furthest.
    furthest = sorted(attempts, key=lambda attempt: attempt[0] != "export-as-example")
    places = [place for place in (source_line(error) for _, error in furthest) if place]
    if places:
        lines.append(f"  stopped at {places[0]}")
    lines += [f"  {finding}" for finding in findings]
    error = TraceError("\n".join([*lines, f"  Try: {_advice(program, attempts, tracer)}."]))
    error.__cause__ = attempts[0][1] if attempts else None
    return error


def _advice(program: Program, attempts: _Attempts, tracer: str) -> str:
    if any(met_packed_sequences(error) for _, error in attempts):
        return _ADVICE_FOR_PACKED
    if any(SAMPLE_DIRICHLET in str(error) for _, error in attempts):
        return OF_GAMMAS
    if any(NO_NUMPY in str(error) for _, error in attempts):
        return _ADVICE_FOR_NUMPY
    if any(chooses_at_random(error) for _, error in attempts):
        return _ADVICE_AT_RANDOM
    if _needs_sizes_by_values(attempts):
        return _ADVICE_FOR_SELECTIONS
    if not program.flat.tensors:
        return _ADVICE_WITHOUT_EXAMPLES
    return _ADVICE.replace(_AS_EXAMPLE, _of_conditions(attempts, tracer))


def _needs_sizes_by_values(attempts: _Attempts) -> bool:
    """Whether the way of the example was taken, and how much is selected stops even that."""
    texts = [str(error) for name, error in attempts if name == "export-as-example"]
    return any(SIZES_BY_VALUES in text and NO_SIZES_BY_VALUES not in text for text in texts)


def _of_conditions(attempts: _Attempts, tracer: str) -> str:
    """Returns advice on conditions, without a front end that has failed.

    `export-as-example`, asked for or not, takes the example's branch at every condition that it sees.
    """
    if any(map(may_be_allowed, attempts)):
        return _AS_EXAMPLE
    if any(name == "export-as-example" for name, _ in attempts):
        return _ASKING
    return f"{_ASKING}, and pass tracer='export-as-example'" if tracer == "auto" else _AS_EXAMPLE
