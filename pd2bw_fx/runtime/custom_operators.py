"""Operators that are not torch's own, for local workers, which do not run the user's script.

An operator that another module registers is there once that module is imported. An operator that the script
itself, or a module that workers cannot import, defines by `torch.library.custom_op` is pickled and sent, like
the script's optimizer; so is an untraced loss.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch._library.custom_ops import OPDEFS, CustomOpDef
from torch._ops import OpOverload

from pd2bw_fx.runtime.wire import is_importable
from pd2bw_fx.source_check import NAMESPACES_OF_TORCH, operators_called
from pd2bw_fx.untraced_call import UntracedFunction
from pd2bw_fx.untraced_operands import NAMESPACE


@dataclass(frozen=True, slots=True)
class Definition:
    """The arguments of `torch.library.custom_op` and of the methods of the operator that it returned."""

    name: str  # "mylib::gelu"
    schema: str
    function: Callable[..., Any]
    kernels: Mapping[str, Callable[..., Any]]  # by device type
    fake: Callable[..., Any] | None
    backward: Callable[..., Any] | None
    setup_context: Callable[..., Any] | None

    def register(self) -> None:
        """Defines the operator in this process, unless it is known here."""
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


_KEPT: list[Any] = []  # keeps operators alive, which torch holds weakly


@dataclass(frozen=True, slots=True)
class CustomOperators:
    """Modules to import, and operators to define."""

    modules: tuple[str, ...]
    definitions: tuple[Definition | UntracedFunction, ...]

    def register(self) -> None:
        for module in self.modules:
            importlib.import_module(module)
        for definition in self.definitions:
            definition.register()


def custom_operators(sources: Iterable[str], model: nn.Module | None) -> CustomOperators:
    """Returns the operators that the stages of these sources call by `torch.ops`.

    The namespace of an operator that was not defined by `custom_op` is taken for the name of its module, as
    it mostly is (torchvision). If there is no such module, those count that hold the operator or its library
    (a `triton_op`). If there are none either, the worker imports the modules of the model's classes and those
    that the script has imported; if the operator is not known then, the worker says which one is missing.
    """
    names = {called for source in sources for called in operators_called(source)}
    modules: dict[str, None] = {}
    definitions: list[Definition | UntracedFunction] = []
    for namespace, name in sorted(names):
        operator: Any = OPDEFS.get(f"{namespace}::{name}")
        module = namespace if operator is None else operator._init_fn.__module__
        loss = UntracedFunction.called(name) if namespace == NAMESPACE else None
        if loss is not None:
            definitions.append(loss)
        elif operator is not None and (module == "__main__" or not is_importable(module)):
            definitions.append(_definition(operator))
        elif namespace not in NAMESPACES_OF_TORCH:
            known = list(_to_import([module])) or list(_to_import(_holders(namespace, name)))
            modules |= dict.fromkeys(known or _to_import([*_modules_of(model), *_imported_by_the_script()]))
    return CustomOperators(tuple(modules), tuple(definitions))


def _holders(namespace: str, name: str) -> Iterator[str]:
    packet = getattr(getattr(torch.ops, namespace), name, None)

    def is_of_it(value: Any) -> bool:
        kind = type(value)  # a lazy object of another library may fail when asked for its __class__
        if issubclass(kind, torch.library.Library):
            return bool(value.ns == namespace)
        if issubclass(kind, CustomOpDef):
            return bool(value._qualname == f"{namespace}::{name}")
        return packet is not None and packet is (value.overloadpacket if kind is OpOverload else value)

    for module, loaded in list(sys.modules.items()):
        if any(is_of_it(value) for value in list(getattr(loaded, "__dict__", {}).values())):
            yield module


def _modules_of(model: nn.Module | None) -> list[str]:
    return [] if model is None else [type(module).__module__ for module in model.modules()]


def _imported_by_the_script() -> list[str]:
    """Returns the modules that the script has imported, and those that it has imported something from."""
    values = list(vars(sys.modules["__main__"]).values())
    names = (getattr(v, "__name__" if isinstance(v, ModuleType) else "__module__", None) for v in values)
    return [name for name in names if isinstance(name, str)]


def _to_import(names: Iterable[str]) -> Iterator[str]:
    """Yields the modules that a worker can import and does not import by itself."""
    for name in names:
        is_own = name.partition(".")[0] in ("torch", "pd2bw_fx", "__main__", "builtins")
        is_module = getattr(sys.modules.get(name), "__spec__", None) is not None
        if not is_own and is_module and is_importable(name):
            yield name


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
