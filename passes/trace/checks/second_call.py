"""Whether a second call of the forward computes what the first does; if not, a later call is traced.

Models keep what they have computed in attributes (tables of angles, masks). A trace of the first call would
compute it in every call, or fail where the next trace reads a table that the first has made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from pd2bw_fx.attributes import without_repeats
from pd2bw_fx.drawing import use_seed_of_checks
from pd2bw_fx.errors import Pd2bwError, TraceError
from pd2bw_fx.passes.trace.eager_run import holds_data, keep_program, keep_state
from pd2bw_fx.passes.trace.inputs import common_batch_size
from pd2bw_fx.passes.trace.program import Program

from .counters import require_no_count
from .drawing_line import drawing_line
from .extreme_random import calls_by_chance, keep_random_numbers
from .places import step_on
from .tensor_attributes import set_on_a_tensor
from .watch import Change, Watch

# How far two results of the same computation may be apart, relative to the largest entry.
_ROUNDING = 1e-6
_IN_ANY_ORDER = {torch.float32: 2e-5, torch.complex64: 2e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}
# Factors of the entries of a weight, by turns. The first pair changes signs too, and is used unless that
# makes results nan.
_MOVES = ((1.25, -0.75), (1.25, 0.75))
_MOVES_BEFORE = (0.75, 1.25)  # the factors in the call that leaves something in attributes
_FROM_ZERO = 2.0**-6  # a weight that is all zero becomes the factors times this
# Numbers of calls: many, and a multiple of the usual periods and one before that.
_MANY_CALLS = (1000, 5039, 5040)


class OtherNextTimeError(TraceError):
    """The next call computes something else, because of attributes (`change` is one) that the first sets."""

    def __init__(self, message: str, change: str) -> None:
        super().__init__(f"{message}; if only a first call is another one, run the model once, then split it")
        self.change = change


def _by_plain_values(changes: Sequence[Change]) -> OtherNextTimeError:
    return OtherNextTimeError(
        f"the model computes something else from call to call, by its {changes[0]}; a trace would keep the "
        "first call for ever. Make it a buffer that the forward updates, or an argument of the forward",
        str(changes[0]),
    )


@contextmanager
def called_before(program: Program) -> Iterator[bool]:
    """Calls the model once on the example inputs, and undoes afterwards what that has set.

    Yields whether the call has changed attributes alone: stages do not begin with what it has written to
    buffers or parameters.
    """
    with keep_program(program):
        yield holds_data(program) and _leaves_only_attributes(program)


def fill_caches_outside(program: Program) -> None:
    """Calls the model once, to fill the caches that it keeps outside of itself with real tensors.

    These are caches of functools.lru_cache, or dicts of its file or class. A trace would fill them with
    tensors without data, for good.
    """
    if not holds_data(program):
        return
    with keep_state(program), keep_program(program), torch.enable_grad(), suppress(Exception):
        program.call(dict(zip(program.flat.names, program.flat.tensors, strict=True)))


def _leaves_only_attributes(program: Program) -> bool:
    buffers = {name for name, _ in program.model.named_buffers()}
    with keep_state(program) as written, torch.no_grad():
        try:
            program.call(dict(zip(program.flat.names, program.flat.tensors, strict=True)))
        except Exception:  # the model's own; the user is told why its trace is wrong
            return False
    return not written and buffers == {name for name, _ in program.model.named_buffers()}


def require_the_same_again(program: Program, first: Any, traced_again: Callable[[], Any]) -> None:
    """Traces once more as a second call would run, and raises OtherNextTimeError if the program differs.

    Raises TraceError where random numbers of Python or numpy make it differ, where the first call made
    parameters, or where results depend on a trainable parameter that is not the model's.

    `first` is the first trace in a form that can be compared. There can only be a difference where the first
    call set attributes or drew random numbers of Python or numpy.
    """
    watch = program.watch
    if watch.made:
        raise TraceError(
            f"the forward makes the parameter {watch.made[0]!r} when it is first called; run the model once "
            "on a batch, then split it"
        )
    if watch.foreign:
        raise TraceError(
            f"the model or its loss computes with a trainable parameter of shape "
            f"{tuple(watch.foreign[0].shape)} that is none of the model's, so that no stage would train it; "
            "make it the model's (self.scale = scale), with a loss that has some the model returns, or use "
            "scale.detach()"
        )
    if watch.generators:
        raise TraceError(
            f"the model draws Python or numpy random numbers in its forward, from {watch.generators[0]}; a "
            "trace would keep one draw for ever. Draw with torch.rand, or set the rate to 0 without a draw"
        )
    if not watch.changes and not watch.drew_python_random:
        return

    def compare() -> None:
        _require_equal(program, first, traced_again, watch.changes)

    def compare_at(*, is_second: bool) -> None:
        for change in watch.changes:
            if not change.is_of_a_counter:
                change.place.put(change.after)
        with keep_random_numbers():
            _require_equal(program, first, traced_again, watch.changes if is_second else counters)

    counters = [change for change in watch.changes if change.is_of_a_counter]
    left = dict[int, Any]()  # by a traced call, in the counters
    try:
        program.watch = Watch(instead=lambda: left.update(enumerate(c.place.value() for c in counters)))
        for drawn in calls_by_chance() if watch.drew_python_random else []:
            for change in watch.changes:
                change.place.put(change.after)
            with drawn:
                compare()
        if counters:
            require_no_count(counters, compare_at, left)
        elif not watch.drew_python_random:
            for change in watch.changes:
                change.place.put(change.after)
            with keep_random_numbers():
                compare()
    finally:
        for change in watch.changes:
            change.place.put(change.before)
        program.watch = watch


def require_nothing_kept(program: Program) -> None:
    """Raises TraceError where what a call leaves in attributes changes the next call.

    These are tensors, and the contents of lists and dicts. A trace has the attribute's earlier value as a
    constant, or computes in every call what only the first should. Raises OtherNextTimeError if what is left
    follows from the weights alone: a trace of the second call may have it as a constant.

    A call is compared with the same call after another one with other inputs and other weights. Buffers and
    random numbers are the same in both.
    """
    watch = program.watch
    names = (*watch.assigned_tensors, *watch.on_layers, *watch.made_buffers, *watch.filled)
    if not (names or watch.on_tensors) or not holds_data(program):
        return
    given = dict(zip(program.flat.names, program.flat.tensors, strict=True))
    factors, first = _first(program, given)
    # The weights are not the model's own: an attribute may hold those after an earlier call.
    later = _later(program, given, factors, before=factors and _MOVES_BEFORE)
    if _are_alike(first, later):
        _require_no_step(program, given, factors, first)
        return
    if watch.on_tensors:
        raise set_on_a_tensor(watch.on_tensors[0])
    error = OtherNextTimeError(
        "the model computes something else from call to call, by what its forward leaves in the attribute "
        f"{names[0]}; the stages would keep what was there before for ever. Make it a buffer that the "
        "forward writes, as self.buffer.copy_(..) does, or an argument of the forward",
        f"attribute {names[0]}",
    )
    if _are_alike(first, _later(program, given, factors, before=factors)):
        raise error
    raise TraceError(str(error))


_Factors = tuple[float, float] | None


def _require_no_step(
    program: Program, given: Mapping[str, torch.Tensor], factors: _Factors, first: Mapping[str, torch.Tensor]
) -> None:
    """Raises TraceError where results change with lists that grow, or with counters that no trace can follow.

    The model is run as after many calls: each has made the lists as much longer as one call does.
    """
    for num_calls in _MANY_CALLS if program.watch.stepped else ():
        with keep_program(program):
            results_of(program, given)  # a list that is empty has nothing to be filled with
            for stepped in program.watch.stepped:
                step_on(stepped.place, stepped.before, stepped.after, num_calls)
            try:
                later = results_of(program, given, factors)
            except Exception as error:
                raise _by_steps(program.watch.stepped[0].place.name) from error
        if not _are_alike(first, later):
            raise _by_steps(program.watch.stepped[0].place.name)


def _by_steps(name: str) -> TraceError:
    return TraceError(
        f"the model computes something else from call to call, by how far {name} has gone; the stages would "
        "keep the first call for ever. Count in a buffer that the forward updates, or pass the count to the "
        "forward"
    )


def _first(program: Program, given: Mapping[str, torch.Tensor]) -> tuple[_Factors, dict[str, torch.Tensor]]:
    """Returns the factors for the weights, and the results of a first call with these weights.

    In evaluation mode weights stay as they are, since a model may keep what follows from them. On a GPU they
    keep their signs: values that are not probabilities fail an assertion in a kernel.
    """
    is_on_cpu = all(parameter.device.type == "cpu" for parameter in program.parameters())
    moves = _MOVES if is_on_cpu else _MOVES[1:]
    for factors in moves if program.model.training else ():
        with suppress(Exception), keep_program(program):
            results = results_of(program, given, factors)
            if all(map(_tells_something, results.values())):
                return factors, results
    with keep_program(program):
        return None, results_of(program, given)


def _later(
    program: Program, given: Mapping[str, torch.Tensor], factors: _Factors, *, before: _Factors
) -> dict[str, torch.Tensor]:
    """Returns the results after another call, which had other inputs and weights multiplied by `before`."""
    with suppress(Exception), keep_program(program):  # inputs that the model may not take
        results_of(program, _others(program, given), before)
        return results_of(program, given, factors)
    with keep_program(program):
        results_of(program, given)
        return results_of(program, given, factors)


def _are_alike(first: Mapping[str, torch.Tensor], later: Mapping[str, torch.Tensor]) -> bool:
    return all(_is_same_result(result, later.get(name)) for name, result in first.items())


def _tells_something(result: torch.Tensor) -> bool:
    if not result.numel() or not (result.is_floating_point() or result.is_complex()):
        return True
    return not result.isnan().any().item() and bool(result.isfinite().any().item())


def _others(program: Program, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns other inputs of the same shapes.

    On a GPU they repeat the first row of the batch: an index out of range would fail an assertion in a
    kernel, and with it everything else that the process does on the GPU.
    """
    if all(tensor.device.type == "cpu" for tensor in given.values()):
        return {name: _other(tensor) for name, tensor in given.items()}
    batched = program.flat.batched(common_batch_size(program.flat))
    return {name: t[:1].expand_as(t) if name in batched else t for name, t in given.items()}


def _other(tensor: torch.Tensor) -> torch.Tensor:
    return (
        tensor * 1.25 + 0.125 if tensor.is_floating_point() else tensor.flip(-1) if tensor.dim() else tensor
    )


def results_of(
    program: Program, given: Mapping[str, torch.Tensor], factors: _Factors = None
) -> dict[str, torch.Tensor]:
    """Runs the model itself, with the random numbers of checks and weights multiplied by the factors."""
    with keep_state(program), keep_random_numbers():
        if factors is not None:
            _move_weights(program, factors)
        use_seed_of_checks()
        return {name: value.detach().clone() for name, value in program.call(given).items()}


def _move_weights(program: Program, factors: tuple[float, float]) -> None:
    for parameter in program.parameters():
        if not parameter.requires_grad or parameter.layout is not torch.strided:
            continue
        data = without_repeats(parameter.data)
        moves = torch.empty(data.numel(), dtype=data.dtype, device=data.device)
        moves[::2], moves[1::2] = factors
        if data.any():
            data.mul_(moves.view(data.shape))
        else:
            data.copy_(moves.view(data.shape)).mul_(_FROM_ZERO)


def _is_same_result(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    """Whether two runs of the model gave one result: the same operators run, so only rounding may differ."""
    if other is None or one.shape != other.shape:
        return False
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    wide = torch.complex128 if one.is_complex() else torch.float64
    a, b = one.to(wide), other.to(wide)
    largest = a.abs().nan_to_num(nan=0.0, posinf=0.0).max().item() if a.numel() else 0.0
    # A GPU adds up in a different order each time where several entries are added to one place.
    within = _IN_ANY_ORDER.get(one.dtype, _ROUNDING) if one.device.type != "cpu" else _ROUNDING
    return torch.allclose(a, b, rtol=0.0, atol=within * largest, equal_nan=True)


def _require_equal(
    program: Program, first: Any, traced_again: Callable[[], Any], changes: Sequence[Change]
) -> None:
    try:
        if traced_again() == first:
            return
    except Pd2bwError:
        raise
    except Exception as error:
        if not changes:
            raise
        raise _by_plain_values(changes) from error
    if changes:
        raise _by_plain_values(changes)
    line = drawing_line(program, results_of)
    place = "" if line is None else f" ({line})"
    raise TraceError(
        f"the model draws Python or numpy random numbers in its forward{place} and computes something else "
        "from call to call; a trace would keep one draw for ever. Draw with torch.rand, draw outside of the "
        "model and pass what was drawn (mask_time_indices), or set the rate (layerdrop, mask_time_prob) to 0"
    )
