"""The names that forwards have for their arguments, and the order in which they return values.

A trace knows which call an operator belongs to, but not the arguments of a call. They are recorded on the
values while the author's forward runs, so that a forward with the author's own signature can be generated.
"""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import get_proxy_slot

from pd2bw_fx.graph import GIVEN_AS, RETURNED_AT, RETURNED_INSIDE

_ROOT = "_export_root"  # torch.export's name for the traced module until it is done


@contextmanager
def record_value_names() -> Iterator[None]:
    """Records in `node.meta` how values are passed to forwards of modules and returned from them.

    Each entry is a dict by the call's key in nn_module_stack:

        GIVEN_AS         an argument's place and name, and the number of arguments; elements of a list or
                         tuple have the names that the forward gives them (`cos, sin = angles`), else ""
        RETURNED_AT      a result's place and name, and the number of results; the name is "" unless the
                         forward returns a dict
        RETURNED_INSIDE  the place of an element of a tuple that is a result, after that of the tuple
    """
    plain = fx.Tracer.call_module

    @functools.wraps(plain)
    def call_module(
        tracer: fx.Tracer, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        def noted(*given: Any, **named: Any) -> Any:
            key = _key(tracer)
            arguments = list(enumerate(_arguments(m, given, named)))
            # A value that is given twice is called what it stays: `queries` may stand for another one later.
            others = _names_set_by(m)
            arguments.sort(key=lambda argument: argument[1][0] in others)
            _note(tracer, key, GIVEN_AS, arguments)
            returned = forward(*given, **named)
            results = _results(returned)
            _note(tracer, key, RETURNED_AT, list(enumerate(results)))
            _note_inside(tracer, key, results)
            return returned

        return plain(tracer, m, noted, args, kwargs)

    owner: Any = fx.Tracer
    owner.call_module = call_module
    try:
        yield
    finally:
        owner.call_module = plain


def _key(tracer: fx.Tracer) -> str:
    """Returns the key of the innermost call in nn_module_stack, as the exported program has it."""
    key = next(reversed(tracer.module_stack), "")
    return f"L__self__{key[len(_ROOT) :].removeprefix('.')}" if key.startswith(_ROOT) else key


def _arguments(module: nn.Module, given: tuple[Any, ...], named: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Returns names and values in the order of the signature.

    Elements of lists and tuples have the names to which the forward unpacks them, if it does, else "".
    """
    try:
        bound = inspect.signature(module.forward).bind(*given, **named).arguments
    except (TypeError, ValueError):
        return []
    found: list[tuple[str, Any]] = []
    for name, value in bound.items():
        if isinstance(value, dict):
            found += [(str(entry), inner) for entry, inner in value.items()]
        elif isinstance(value, list | tuple):
            found += zip(_names_unpacked(module, name, len(value)), value, strict=True)
        else:
            found.append((name, value))
    return found


def _names_set_by(module: nn.Module) -> frozenset[str]:
    """Returns the names to which a module's forward assigns."""
    code = _code(module)
    return frozenset() if code is None else _names_set_in(code)


def _names_unpacked(module: nn.Module, argument: str, number: int) -> tuple[str, ...]:
    """Returns the names of the elements where the forward unpacks an argument (`cos, sin = angles`)."""
    code = _code(module)
    names = () if code is None else _unpacked_in(code).get(argument, ())
    return names if len(names) == number else ("",) * number


def _code(module: nn.Module) -> CodeType | None:
    code = getattr(inspect.unwrap(module.forward), "__code__", None)
    return code if inspect.iscode(code) else None


@functools.cache
def _names_set_in(code: CodeType) -> frozenset[str]:
    return frozenset(name for each in dis.get_instructions(code) for name in _stored(each))


@functools.cache
def _unpacked_in(code: CodeType) -> dict[str, tuple[str, ...]]:
    """Returns the names to which a function unpacks its variables, the first time that it does."""
    found: dict[str, tuple[str, ...]] = {}
    steps = list(dis.get_instructions(code))
    for at, (loads, unpacks) in enumerate(itertools.pairwise(steps)):
        if not loads.opname.startswith("LOAD_FAST") or unpacks.opname != "UNPACK_SEQUENCE":
            continue
        stores = itertools.takewhile(lambda each: _stored(each), steps[at + 2 :])
        names = tuple(name for each in stores for name in _stored(each))[: unpacks.arg]
        loaded = loads.argval[-1] if isinstance(loads.argval, tuple) else loads.argval
        if len(names) == unpacks.arg:
            found.setdefault(loaded, names)
    return found


def _stored(step: dis.Instruction) -> tuple[str, ...]:
    if not step.opname.startswith("STORE_FAST"):
        return ()
    return step.argval if isinstance(step.argval, tuple) else (step.argval,)


def _results(returned: Any) -> list[tuple[str, Any]]:
    if isinstance(returned, Mapping):
        return [(str(entry), value) for entry, value in returned.items()]
    values = returned if isinstance(returned, list | tuple) else [returned]
    return [("", value) for value in values]


def _note(tracer: fx.Tracer, key: str, kind: str, values: list[tuple[int, tuple[str, Any]]]) -> None:
    for place, (name, value) in values:
        node = _node(tracer, value)
        if node is not None:
            node.meta.setdefault(kind, {}).setdefault(key, (place, name, len(values)))


def _note_inside(tracer: fx.Tracer, key: str, results: list[tuple[str, Any]]) -> None:
    """Records the elements of a tuple among the results (`state` of `return out, state`).

    They get places between that of the tuple and the next one.
    """
    for place, (_, value) in enumerate(results):
        inner = value if isinstance(value, list | tuple) else ()
        for number, each in enumerate(inner):
            node = _node(tracer, each)
            if node is not None:
                inside = node.meta.setdefault(RETURNED_INSIDE, {})
                inside.setdefault(key, place + (number + 1) / (len(inner) + 1))


def _node(tracer: Any, value: Any) -> fx.Node | None:
    if isinstance(value, fx.Proxy):  # a proxy for an attribute has no node until it is used
        return None if isinstance(value, fx.proxy.Attribute) else value.node
    if not isinstance(value, torch.Tensor) or not hasattr(tracer, "tensor_tracker"):
        return None  # to torch.fx, a tensor is a constant
    slot: Any = get_proxy_slot(value, tracer, None)
    return None if slot is None else slot.proxy.node
