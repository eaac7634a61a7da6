"""Complex tensors that enter or leave a stage: in the files they are pairs of numbers in a last dimension.

complex64 (batch, 5)    float32 (batch, 5, 2)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pd2bw_fx.stage import Port, StageProgram

from .operators.complex_numbers import pairs_of
from .original import Original


class Pairs:
    """The values of `programs` that are complex, and what has pairs in their place."""

    def __init__(self, programs: Sequence[StageProgram]) -> None:
        ports = [port for program in programs for port in (*program.inputs, *program.outputs)]
        self.values = frozenset(port.value for port in ports if port.spec.dtype.is_complex)

    def programs(self, programs: Sequence[StageProgram]) -> tuple[StageProgram, ...]:
        return tuple(
            replace(p, inputs=tuple(map(_of_pairs, p.inputs)), outputs=tuple(map(_of_pairs, p.outputs)))
            for p in programs
        )

    @contextmanager
    def between(self, programs: Sequence[StageProgram], modules: Sequence[nn.Module]) -> Iterator[None]:
        """Lets modules take and return pairs in this block. `programs` are as they were."""
        with ExitStack() as stack:
            for program, module in zip(programs, modules, strict=True):
                taken = [place for place, port in enumerate(program.inputs) if port.value in self.values]
                if taken:
                    hook = functools.partial(_with_complex, taken)
                    stack.callback(module.register_forward_pre_hook(hook).remove)
                if any(port.value in self.values for port in program.outputs):
                    stack.callback(module.register_forward_hook(_with_pairs).remove)
            yield

    def taken(self, example: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: _paired(value) if name in self.values else value for name, value in example.items()}

    def original(self, original: Original | None) -> Original | None:
        """Returns the model, which takes and returns pairs."""
        if original is None or original.forward is None or not self.values:
            return original
        return replace(original, forward=functools.partial(self._run, original.forward))

    def _run(
        self, forward: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]], inputs: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        fed = {n: torch.view_as_complex(v) if n in self.values else v for n, v in inputs.items()}
        return {name: _paired(value) for name, value in forward(fed).items()}

    def note(self, facts: Mapping[str, Any], names: Mapping[str, str]) -> None:
        """Notes in the manifest which inputs and outputs of the model are pairs; `names` are the files'."""
        are_pairs = {names[value] for value in self.values}
        for entry in (*facts["inputs"], *facts["outputs"]):
            if entry["tensor"] in are_pairs:
                entry["complex"] = True


def _of_pairs(port: Port) -> Port:
    spec = port.spec
    if not spec.dtype.is_complex:
        return port
    shape = None if spec.shape is None else (*spec.shape, 2)
    example = None if spec.example_shape is None else (*spec.example_shape, 2)
    return replace(port, spec=replace(spec, dtype=spec.dtype.to_real(), shape=shape, example_shape=example))


def _paired(value: Any) -> Any:
    return pairs_of(value) if isinstance(value, Tensor) and value.is_complex() else value


def _with_complex(taken: Sequence[int], module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(torch.view_as_complex(arg) if place in taken else arg for place, arg in enumerate(args))


def _with_pairs(module: nn.Module, args: tuple[Any, ...], result: Any) -> Any:
    return tuple(map(_paired, result)) if isinstance(result, tuple) else _paired(result)
