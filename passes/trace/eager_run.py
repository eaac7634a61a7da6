"""Runs of the model as it is: whether it accepts the example inputs, and what conditions it meets."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from pd2bw_fx.attributes import keep_attributes, without_repeats
from pd2bw_fx.drawing import gpus
from pd2bw_fx.errors import InputError, Pd2bwError, TraceError
from pd2bw_fx.state import same_bits

from .checks.places import keep_outside
from .patches.conditions import Conditions
from .program import MODEL_PREFIX, Program
from .source_lines import one_line, source_line


def require_eager_run(program: Program, traced: Exception | None = None) -> None:
    """Runs the model once as it is; raises InputError with its own error if it refuses the example inputs.

    Buffers and random generators are restored afterwards. A model without data may raise because it has none:
    its error is its own only if `traced`, which stopped the trace, is of the same kind and place.
    """
    has_data = holds_data(program)
    if not has_data and traced is None:
        return
    try:
        _run(program)
    except Pd2bwError:
        raise
    except Exception as error:
        if not has_data and not _are_alike(error, traced):
            return
        given = dict(zip(program.flat.names, program.flat.tensors, strict=True))
        if program.record.reached_loss:
            advice = _LOSS_ACCEPTED if program.flat.has_targets else _LOSS_ALONE_ACCEPTED
            raise _own_words("loss_fn", given, error, advice=advice) from error
        raise _own_words(type(program.model).__name__, given, error) from error


def _are_alike(without_data: Exception, traced: Exception | None) -> bool:
    """Returns whether a model without data raises what stopped its trace, and not for want of data."""
    place = None if traced is None else source_line(traced)
    if place is None or _OF_META.search(str(without_data)):
        return False
    return type(without_data) is type(traced) and source_line(without_data) == place


_OF_META = re.compile(r"\bmeta\b", re.IGNORECASE)  # torch's word for the device, and not "metadata"
_EXAMPLE = "the example inputs"
_ACCEPTED = "expected inputs that model(*args, **kwargs) accepts"
_LOSS_ACCEPTED = (
    "the model has run; expected what loss_fn(output, targets) accepts, or no example_targets where it takes "
    "the output alone"
)
_LOSS_ALONE_ACCEPTED = (
    "the model has run; expected an output that loss_fn(output) accepts, or example_targets"
)


@contextmanager
def blaming_the_model(
    name: str,
    forward: Callable[[Mapping[str, Tensor]], Any] | None,
    example: Mapping[str, Tensor] | None,
    *,
    inputs: str = _EXAMPLE,
    advice: str = _ACCEPTED,
) -> Iterator[None]:
    """Raises InputError in place of an error of the traced program, where the model itself raises one too.

    torch.export accepts whatever shapes allow, such as integers where weights are floats.
    """
    try:
        yield
    except Pd2bwError:
        raise
    except Exception:
        if forward is None or example is None:
            raise
        try:
            forward(example)
        except Exception as own:
            raise _own_words(name, example, own, inputs, advice) from own
        raise


def _own_words(
    name: str,
    example: Mapping[str, Tensor],
    error: Exception,
    inputs: str = _EXAMPLE,
    advice: str = _ACCEPTED,
) -> InputError:
    shapes = ", ".join(
        f"{given} {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
        for given, tensor in example.items()
    )
    place = source_line(error)
    at = f" (at {place})" if place else ""
    return InputError(f"{name} itself raises on {inputs} ({shapes}): {one_line(error)}{at}; {advice}")


def conditions_of(program: Program) -> Conditions:
    """Returns the conditions on values that the model meets on the example inputs; none if it has no data."""
    conditions = Conditions()
    if holds_data(program):
        _run(program, conditions.recorded())
    return conditions


def holds_data(program: Program) -> bool:
    tensors = [*program.parameters(), *program.buffers(), *program.flat.tensors]
    return not any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in tensors)


def _run(program: Program, within: AbstractContextManager[None] | None = None) -> None:
    # What restores the state asks for values too, and is outside.
    with keep_state(program), keep_program(program), within or nullcontext(), torch.enable_grad():
        program.call(dict(zip(program.flat.names, program.flat.tensors, strict=True)))


@contextmanager
def keep_program(program: Program) -> Iterator[None]:
    """Undoes what the model and the loss leave in attributes, and in the numbers that they keep elsewhere."""
    with (
        keep_outside(program.model, program.loss_fn),
        keep_attributes(program.model, program.loss_fn),
    ):
        yield


def call_apart(program: Program) -> Callable[[Mapping[str, Tensor]], dict[str, Tensor]]:
    """Returns `program.call`, after which the loss is as it was before."""

    def call(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        with keep_outside(program.model, program.loss_fn), keep_attributes(None, program.loss_fn):
            return program.call(tensors)

    return call


@contextmanager
def keep_state(module: nn.Module) -> Iterator[list[str]]:
    """Restores parameters, buffers, tensors in plain attributes and random generators afterwards.

    Sparse tensors are left as they are: no trace reads them (`checks/sparse_tensors.py`).

    Yields a list that has the names of the tensors that were written, once the block has ended.
    """
    tensors = {
        name: tensor
        for name, tensor in (*module.named_parameters(), *module.named_buffers(), *_attributes(module))
        if not (isinstance(tensor, FakeTensor) or tensor.is_meta) and tensor.layout is torch.strided
    }
    held = {name: (tensor.data, tensor.detach().clone()) for name, tensor in tensors.items()}
    written: list[str] = []
    with torch.random.fork_rng(devices=gpus()):
        try:
            yield written
        finally:
            for name, tensor in tensors.items():
                data, before = held[name]
                is_there = (tensor.shape, tensor.data_ptr()) == (data.shape, data.data_ptr())
                if not is_there or not same_bits(data, before):
                    written.append(name)
                    without_repeats(data).copy_(without_repeats(before, data))
                    tensor.data = data


def _attributes(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if type(value) is torch.Tensor and value.layout is torch.strided:
                yield f"{path}.{name}" if path else name, value


def require_nothing_written(names: list[str], *, how: str = "through .data") -> None:
    """Raises TraceError with the first of these names of tensors, if there is one.

    Writes through `.data` run while torch.fx traces and are not in its graph: `target.data.mul_(0.9)` would
    be done once, and lost.
    """
    if names:
        raise TraceError(
            f"the forward writes {names[0].removeprefix(MODEL_PREFIX)!r} {how}, or in place where torch.fx "
            "does not see it; write it under torch.no_grad() and without .data, as torch.export can trace, "
            "or outside of the forward. If only a first call writes it, run the model once, then split it"
        )
