"""`len(x)`, `int(x.shape[0])`, `int(lengths.max())` and `math.sqrt(x.shape[0])`, kept symbolic.

Python makes plain numbers of them, and the trace would be for the example's size alone.
"""

from __future__ import annotations

import ast
import functools
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import statically_known_true


@contextmanager
def keep_sizes_symbolic(model: nn.Module, loss_fn: Callable[..., Any] | None) -> Iterator[None]:
    """Replaces functions that make numbers of sizes while torch traces: symbolic sizes stay symbolic.

    `len`, `int` and `float` are replaced in the files that define the model and its loss, and in those whose
    functions these use. `len` is also replaced in all files of the same package. Names that a file defines
    itself stay; so do `int` and `float` in a file that uses them otherwise than in calls. All other files
    have the built-ins. `math.sqrt` is replaced everywhere, and so are `torch.rand`, `randn` and `randint`,
    which take no symbolic size beside `generator=None`.
    """
    names = {type(module).__module__ for module in model.modules()}
    names |= {getattr(loss_fn, "__module__", None) or "", type(loss_fn).__module__}
    files = _loaded(names)
    files += [file for file in _used_by(files) if file not in files]
    changed: list[tuple[dict[str, Any], str, Any]] = []  # with the value before, or _NOTHING
    try:
        for file, found in (
            *((file, _replacements(file)) for file in files),
            *((file, {"len": _len}) for file in _beside(files) if "len" not in vars(file)),
        ):
            for name, value in found.items():
                changed.append((vars(file), name, vars(file).get(name, _NOTHING)))
                vars(file)[name] = value
        for module, name, value in _EVERYWHERE:
            changed.append((vars(module), name, vars(module)[name]))
            vars(module)[name] = value
        torch.SymInt.__truediv__ = _divided  # type: ignore[method-assign]
        yield
    finally:
        torch.SymInt.__truediv__ = _plain_division  # type: ignore[method-assign]
        for found, name, before in reversed(changed):
            if before is _NOTHING:
                del found[name]
            else:
                found[name] = before


def _loaded(names: Iterable[str]) -> list[ModuleType]:
    found = {name: sys.modules.get(name) for name in names if not _is_of_others(name)}
    return [file for file in found.values() if isinstance(file, ModuleType)]


def _used_by(files: Sequence[ModuleType]) -> list[ModuleType]:
    """Returns the files whose functions these files use."""
    held = (value for file in files for value in vars(file).values())
    return _loaded({value.__module__ or "" for value in held if isinstance(value, FunctionType)})


def _beside(files: Sequence[ModuleType]) -> list[ModuleType]:
    """Returns the other files of the same packages."""
    packages = {file.__name__.partition(".")[0] for file in files}
    inner = tuple(f"{package}." for package in packages)
    names = {name for name in sys.modules if name in packages or name.startswith(inner)}
    return _loaded(names - {file.__name__ for file in files})


_NOTHING = object()
_OF_OTHERS = {"torch", "pd2bw_fx", *sys.stdlib_module_names}
_plain_sqrt = math.sqrt
_plain_division = torch.SymInt.__truediv__
_WHOLE = "_pd2bw_fx_whole"  # attribute of a quotient that is whole for every size: the whole number


def _replacements(file: ModuleType) -> Mapping[str, Any]:
    """Returns replacements by name in a file, where `from math import sqrt as root` may have made a name."""
    own = vars(file)
    found: dict[str, Any] = {name: _sqrt for name, value in own.items() if value is _plain_sqrt}
    if "len" not in own:
        found["len"] = _len
    found |= {name: _NUMBERS[name] for name in _only_called(file) if name not in own}
    return found


def _len(counted: Any) -> Any:
    return counted.shape[0] if isinstance(counted, torch.Tensor) and counted.dim() else len(counted)


def _sqrt(number: Any) -> Any:
    if isinstance(number, torch.SymInt | torch.SymFloat):
        return number**0.5  # torch.sym_sqrt has no translation to ONNX
    return _plain_sqrt(number)


def _divided(size: torch.SymInt, by: Any) -> Any:
    """Divides a size, and notes on the quotient if it is whole for every size.

    Swin computes `int(windows.shape[0] / (H * W / 49))`.
    """
    found = _plain_division(size, by)  # type: ignore[no-untyped-call]
    is_whole = type(by) in (int, float) and by != 0 and by % 1 == 0
    if is_whole and isinstance(found, torch.SymFloat) and statically_known_true(size % int(by) == 0):
        setattr(found, _WHOLE, size // int(by))
    return found


def _without_no_generator(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def drawn(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("generator", ...) is None:
            del kwargs["generator"]
        return function(*args, **kwargs)

    return drawn


_EVERYWHERE: Sequence[tuple[ModuleType, str, Callable[..., Any]]] = (
    (math, "sqrt", _sqrt),
    *((torch, name, _without_no_generator(getattr(torch, name))) for name in ("rand", "randn", "randint")),
)


class _Number(type):
    """A metaclass of classes that stand in for a built-in one: it has their instances and subclasses."""

    plain: type
    of_a_size: Callable[[Any], Any]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], torch.SymInt | torch.SymFloat):
            return cls.of_a_size(getattr(args[0], _WHOLE, args[0]))
        if cls is _Int and len(args) == 1 and _is_whole(args[0]):
            return args[0].item()
        return cls.plain(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.plain)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.plain)


def _is_whole(value: Any) -> bool:
    """Whether it is a tensor in the trace whose `item()` is a whole number, as `int()` would make one."""
    if not isinstance(value, FakeTensor):
        return False
    return not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)


class _Int(metaclass=_Number):
    plain = int
    of_a_size = staticmethod(torch.sym_int)


class _Float(metaclass=_Number):
    plain = float
    of_a_size = staticmethod(torch.sym_float)


_NUMBERS: Mapping[str, type] = {"int": _Int, "float": _Float}
_CALL = re.compile(r"\b(int|float)\(")


@functools.cache
def _only_called(file: ModuleType) -> frozenset[str]:
    """Returns which of `int` and `float` a file calls and otherwise only has in annotations or isinstance."""
    try:
        source = inspect.getsource(file)
        tree = ast.parse(source if _CALL.search(source) else "")
    except (OSError, TypeError, SyntaxError):
        return frozenset()
    called: set[str] = set()
    harmless: set[int] = set()  # names, by id
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id in _NUMBERS]
    for node in ast.walk(tree):
        parts: list[ast.AST | None] = []
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            called |= {node.func.id} & _NUMBERS.keys()
            parts = [node.func, *(node.args[1:] if node.func.id == "isinstance" else ())]
        elif isinstance(node, ast.arg | ast.AnnAssign):
            parts = [node.annotation]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            parts = [node.returns]
        harmless |= {id(inner) for part in parts if part is not None for inner in ast.walk(part)}
    return frozenset(called - {name.id for name in names if id(name) not in harmless})


def _is_of_others(name: str) -> bool:
    return name.partition(".")[0] in _OF_OTHERS
