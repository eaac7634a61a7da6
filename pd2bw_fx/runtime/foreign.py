"""Operators that are not torch's own, for local workers, which do not run the user's script.

What another module registered is there once that module is imported. An operator that the script itself
defines by `torch.library.custom_op` is sent as it is, like the script's optimizer.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS

from pd2bw_fx.source_check import operators_called


@dataclass(frozen=True, slots=True)
class Definition:
    """What `torch.library.custom_op` and the methods of what it returns were given."""

    name: str  # "mylib::gelu"
    schema: str
    function: Callable[..., Any]
    kernels: Mapping[str, Callable[..., Any]]  # by device type
    fake: Callable[..., Any] | None
    backward: Callable[..., Any] | None
    setup_context: Callable[..., Any] | None

    def register(self) -> None:
        """Make the operator known here, unless it is."""
        if self.name in OPDEFS:
            return
        operator: Any = torch.library.custom_op(self.name, self.function, mutates_args=(), schema=self.schema)
        for device_type, kernel in self.kernels.items():
            operator.register_kernel(device_type, kernel)
        if self.fake is not None:
            operator.register_fake(self.fake)
        if self.backward is not None:
            operator.register_autograd(self.backward, setup_context=self.setup_context)
        _KEPT.append(operator)


_KEPT: list[Any] = []  # torch itself holds them weakly


@dataclass(frozen=True, slots=True)
class ForeignOperators:
    """Modules to import, and operators to define."""

    modules: tuple[str, ...]
    definitions: tuple[Definition, ...]

    def register(self) -> None:
        for module in self.modules:
            importlib.import_module(module)
        for definition in self.definitions:
            definition.register()


def foreign_operators(sources: Iterable[str]) -> ForeignOperators:
    """What the stages of these sources call by `torch.ops`, as it is known in this process.

    Of an operator that was not defined in Python the namespace is taken for the name of its module, which it
    mostly is (torchvision); where there is none, the worker says which operator is missing.
    """
    names = {called for source in sources for called in operators_called(source)}
    modules: dict[str, None] = {}
    definitions: list[Definition] = []
    for namespace, name in sorted(names):
        operator: Any = OPDEFS.get(f"{namespace}::{name}")
        module = namespace if operator is None else operator._init_fn.__module__
        if operator is not None and module == "__main__":
            definitions.append(_definition(operator))
        elif module.partition(".")[0] != "torch" and module in sys.modules:
            modules[module] = None
    return ForeignOperators(tuple(modules), tuple(definitions))


def _definition(operator: Any) -> Definition:
    return Definition(
        name=operator._qualname,
        schema=operator._schema,
        function=operator._init_fn,
        kernels={device: kernel for device, kernel in operator._backend_fns.items() if device is not None},
        fake=operator._abstract_fn,
        backward=operator._backward_fn,
        setup_context=operator._setup_context_fn,
    )
