"""Makes the inputs that files are checked on: the examples, and other sizes of batch and length."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from pd2bw_fx.errors import InputError
from pd2bw_fx.graph import TensorSpec
from pd2bw_fx.size_range import SizeRange
from pd2bw_fx.stage import Port, StageProgram


def model_inputs(programs: Iterable[StageProgram]) -> dict[str, Port]:
    """Returns the inputs of the model that a stage takes, by name."""
    return {port.value: port for program in programs for port in program.inputs if port.source is None}


def example_of(specs: Mapping[str, TensorSpec], example: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the example's values for `specs`. Raises InputError for an input without an example."""
    missing = sorted(specs.keys() - example.keys())
    if missing:
        raise InputError(f"there is no example of input {missing[0]!r}; give one for each input of the model")
    return {name: example[name] for name in specs}


def examples_of_other_sizes(
    specs: Mapping[str, TensorSpec], example: Mapping[str, Tensor], batches: SizeRange
) -> list[dict[str, Tensor]]:
    """Yields the examples at other sizes of the dynamic dimensions, the farthest from the examples first.

    A batch has 2n + 1 samples (the first ones again), n + 1, or n - 1 where that is too many; where only
    multiples of a number are allowed, the next multiple. Other dimensions, which a model may bound, have half
    their entries, or all of them. The first of these that the model takes is the one to use.
    """
    sizes: dict[str, int] = {}
    firsts: set[str] = set()
    for name, spec in specs.items():
        for axis, size in enumerate(spec.shape or ()):
            if isinstance(size, str) and size.isidentifier():
                sizes[size] = example[name].shape[axis]
                firsts |= {size} if axis == 0 else set()
    shorter = {symbol: size // 2 for symbol, size in sizes.items() if symbol not in firsts and size >= 4}
    tried = []
    for times, more in ((2, 1), (1, 1), (1, -1)):
        other = {symbol: times * sizes[symbol] + more * batches.multiple_of for symbol in firsts}
        if all(size in batches for size in other.values()):
            tried += [other | shorter, other] if shorter else [other]
    return [_resized(specs, example, chosen) for chosen in tried if chosen]


def _resized(
    specs: Mapping[str, TensorSpec], example: Mapping[str, Tensor], sizes: Mapping[str, int]
) -> dict[str, Tensor]:
    resized = {}
    for name, spec in specs.items():
        tensor = example[name]
        for axis, size in enumerate(spec.shape or ()):
            if isinstance(size, str) and size in sizes:
                index = torch.arange(sizes[size], device=tensor.device) % tensor.shape[axis]
                tensor = tensor.index_select(axis, index)
        resized[name] = tensor
    return resized


def any_axis_of_one(ports: Iterable[Port], values: Mapping[str, Tensor]) -> bool:
    """Returns whether a dynamic axis has size 1 here, which the exporter would take for a constant."""
    return any(
        values[port.value].shape[axis] == 1
        for port in ports
        for axis, size in enumerate(port.spec.shape or ())
        if isinstance(size, str)
    )


def batch_size(ports: Iterable[Port], example: Mapping[str, Tensor]) -> int | None:
    """Returns the first dimension of the first input where it is a symbol, or else of any input."""
    ranked = sorted(
        (p for p in ports if p.spec.shape), key=lambda p: not isinstance((p.spec.shape or (0,))[0], str)
    )
    return example[ranked[0].value].shape[0] if ranked else None
