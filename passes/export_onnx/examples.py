"""What the files are tried on: the example inputs, and the same with one more sample."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from pd2bw_fx.errors import InputError
from pd2bw_fx.graph import TensorSpec
from pd2bw_fx.stage import Port, StageProgram


def model_inputs(programs: Iterable[StageProgram]) -> dict[str, Port]:
    """The inputs of the model that a stage takes, by name."""
    return {port.value: port for program in programs for port in program.inputs if port.source is None}


def example_batches(
    specs: Mapping[str, TensorSpec], example: Mapping[str, Tensor]
) -> list[dict[str, Tensor]]:
    """The example's values for `specs`, and the same with one more sample (the first one again), if first
    dimensions are dynamic.

    Raises InputError for an input without an example.
    """
    missing = sorted(specs.keys() - example.keys())
    if missing:
        raise InputError(f"there is no example of input {missing[0]!r}; give one for each input of the model")
    first = {name: example[name] for name in specs}
    sizes = {
        spec.shape[0]: example[name].shape[0]
        for name, spec in specs.items()
        if spec.shape is not None and spec.shape
    }
    growing = {s: size + 1 for s, size in sizes.items() if isinstance(s, str) and s.isidentifier()}
    if not growing:
        return [first]

    def grown(name: str, spec: TensorSpec) -> Tensor:
        tensor = example[name]
        for axis, size in enumerate(spec.shape or ()):
            if size in growing:
                index = torch.arange(growing[size], device=tensor.device) % tensor.shape[axis]
                tensor = tensor.index_select(axis, index)
        return tensor

    return [first, {name: grown(name, spec) for name, spec in specs.items()}]


def any_axis_of_one(ports: Iterable[Port], values: Mapping[str, Tensor]) -> bool:
    """Whether a dynamic axis has the size 1 here, for which the exporter would take it as a constant."""
    return any(
        values[port.value].shape[axis] == 1
        for port in ports
        for axis, size in enumerate(port.spec.shape or ())
        if isinstance(size, str)
    )


def batch_size(ports: Iterable[Port], example: Mapping[str, Tensor]) -> int | None:
    """The size of the first dimension of the first input that has a symbol there, or any first dimension."""
    ranked = sorted(
        (p for p in ports if p.spec.shape), key=lambda p: not isinstance((p.spec.shape or (0,))[0], str)
    )
    return example[ranked[0].value].shape[0] if ranked else None
