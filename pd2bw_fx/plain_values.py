"""Values of a batch other than tensors: stages have them in their code, so each batch must have the trace's.

Numbers, flags, strings and None are kept as they are. Anything else that a forward may be given (members of
an enum, data types, slices, functions, configurations) is kept as a text that describes it, which can be
compared and saved.
"""

from __future__ import annotations

import enum
import functools
import inspect
import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pd2bw_fx.containers import entry_at, leaves_of, place_of
from pd2bw_fx.errors import InputError, shown

Path = tuple[str | int, ...]
_DEPTH = 4
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


@dataclass(frozen=True, slots=True)
class PlainValue:
    """A value that the model was traced with and that is not a tensor: the stages have it in their code.

    `is_default` is False where the forward has another default for the argument, or none. `is_text`: `value`
    is a text that describes what was given.
    """

    argument: str
    path: Path
    value: bool | int | float | str | None
    is_default: bool = True
    is_text: bool = field(default=False, kw_only=True)

    def __str__(self) -> str:
        return place_of(self.argument, self.path)

    @property
    def shown(self) -> str:
        return str(self.value) if self.is_text else repr(self.value)


def plain_values(signature: inspect.Signature, named: Mapping[str, Any]) -> tuple[PlainValue, ...]:
    """Returns the plain values of a call's arguments by name, and of the defaults of those it leaves out."""
    defaults = {
        parameter.name: parameter.default
        for parameter in signature.parameters.values()
        if parameter.default is not parameter.empty and parameter.name not in named
    }
    found: list[PlainValue] = []
    for name, value in {**defaults, **named}.items():
        is_default = name in defaults or _is_default(signature.parameters.get(name), value)
        for path, leaf in leaves_of(value):
            if not isinstance(leaf, Tensor):
                kept, is_text = _kept(leaf)
                found.append(PlainValue(name, path, kept, is_default, is_text=is_text))
    return tuple(found)


def require_plain(plain: PlainValue, call: Mapping[str, Any]) -> None:
    """Raises InputError where the batch has another value than the trace in the same place."""
    if plain.argument not in call:
        if not plain.is_default:
            raise InputError(
                f"the batch leaves out {plain}, for which the forward's default is not the {plain.shown} "
                "that the model was traced with and that is in the stages' code; give it, or split without it"
            )
        return
    try:
        value = entry_at(call[plain.argument], plain.path)
    except (LookupError, AttributeError, TypeError):
        if plain.value is None and not plain.is_text:
            return  # a missing entry of a dict is like None
        raise InputError(
            f"the batch has no {plain}, and the model was traced with {plain.shown} there, which is in the "
            "stages' code; give batches nested like the example inputs, or split with these"
        ) from None
    if isinstance(value, Tensor):
        return  # reported elsewhere, as a tensor too many
    if not _same(_kept(value), (plain.value, plain.is_text)):
        advice = "" if plain.is_text else "give it as a tensor in the example inputs, or "
        raise InputError(
            f"the batch's {plain} is {_shown(value)}, and the model was traced with {plain.shown}, which is "
            f"in the stages' code; {advice}split with the other value"
        )


def _is_default(parameter: inspect.Parameter | None, value: Any) -> bool:
    """Returns whether a call without the argument means this value."""
    if parameter is None:  # one of **kwargs or *args, or the targets
        return value is None
    if parameter.default is parameter.empty:
        return True  # nothing else can be meant
    given, default = ([(path, leaf) for path, leaf in leaves_of(each)] for each in (value, parameter.default))
    return [path for path, _ in given] == [path for path, _ in default] and all(
        isinstance(leaf, Tensor) or (_is_alike_in_type(leaf, other) and _same(_kept(leaf), _kept(other)))
        for (_, leaf), (_, other) in zip(given, default, strict=True)
    )


def _is_alike_in_type(one: Any, other: Any) -> bool:
    """Returns whether two values have one type: 1 and 1.0 are equal, but a forward may tell them apart."""
    return type(_kept(one)[0]) is type(_kept(other)[0])


def _kept(leaf: Any) -> tuple[bool | int | float | str | None, bool]:
    """Returns what is kept of a leaf, and whether that is a text that describes it."""
    if hasattr(leaf, "__array__") and getattr(leaf, "shape", None) == ():
        leaf = leaf.item()  # a number of numpy's
    if leaf is None or isinstance(leaf, bool | int | float | str):
        return leaf, False
    return _text(leaf, _DEPTH), True


def _same(one: tuple[Any, bool], other: tuple[Any, bool]) -> bool:
    (value, is_text), (expected, was_text) = one, other
    if is_text != was_text or isinstance(value, bool) != isinstance(expected, bool):
        return False
    return bool(value == expected) or (value != value and expected != expected)


def _shown(value: Any) -> str:
    kept, is_text = _kept(value)
    return kept if is_text and isinstance(kept, str) and len(kept) <= 80 else shown(value)


def _text(value: Any, depth: int) -> str:
    """Returns a text that describes a value, without what differs in the next run, such as addresses."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, functools.partial):
        return f"partial({', '.join(_texts((value.func, *value.args), value.keywords, depth))})"
    if isinstance(value, types.MethodType):
        return f"{_text(value.__self__, depth - 1)}.{value.__name__}"
    if isinstance(value, types.FunctionType):
        return _text_of_function(value, depth)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, types.BuiltinFunctionType):
        return ".".join(name for name in (value.__module__, value.__name__) if name)
    if isinstance(value, list | tuple):
        return f"[{', '.join(_texts(value, {}, depth))}]"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(_texts(tuple(value), {}, depth)))}}}"
    if isinstance(value, Mapping):
        named = {_text(key, depth): entry for key, entry in value.items()}
        return f"{{{', '.join(_texts((), named, depth))}}}"
    if "__repr__" not in {name for kind in type(value).__mro__[:-1] for name in vars(kind)}:
        name = type(value).__qualname__
        return f"{name}({', '.join(_texts((), getattr(value, '__dict__', {}), depth))})"
    return _ADDRESS.sub("", repr(value))


def _texts(values: Any, named: Mapping[str, Any], depth: int) -> Iterator[str]:
    if depth <= 0:
        yield ".."
        return
    yield from (_text(value, depth - 1) for value in values)
    yield from (f"{name}={_text(value, depth - 1)}" for name, value in named.items())


def _text_of_function(function: types.FunctionType, depth: int) -> str:
    """Returns a text that tells functions of one line apart by their closures, and lambdas by their line."""
    name = f"{function.__module__}.{function.__qualname__}"
    if function.__name__ == "<lambda>":
        name += f":{function.__code__.co_firstlineno}"
    cells = []
    for name_of_cell, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            cells.append(f"{name_of_cell}={_text(cell.cell_contents, depth - 1) if depth > 0 else '..'}")
        except ValueError:  # the cell is still empty
            continue
    return f"{name}[{', '.join(cells)}]" if cells else name
