"""Finds where a forward may keep numbers, generators and lists other than in attributes of its modules.

self.state["step"] += 1        entries of containers and attributes of objects
Model.calls += 1               attributes of classes
CALLS[0] += 1                  variables of the files that define the model and its loss
nonlocal calls; calls += 1     variables of closures
"""

from __future__ import annotations

import itertools
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from pd2bw_fx.attributes import is_of_attributes

LOSS = "loss_fn"  # the loss in names of places
PLAIN = (bool, int, float, str, type(None))
_OF_OTHERS = {"torch", "pd2bw_fx", *sys.stdlib_module_names}
_OF_ANY_MODULE = vars(nn.Module()).keys()
_DEEPEST = 4  # containers in one another
_LARGEST = 256  # entries of a container; larger ones are taken for tables
_LARGEST_ARRAY = 4096


@dataclass(frozen=True, slots=True)
class Place:
    """An entry of a dict or list, an attribute, or a variable, found by the keys that lead to it.

    The container itself is not kept: a tracer undoes what a forward has changed, and replaces containers.
    """

    root: Any  # the attributes of a module or object, variables of a file, a class, the cell of a closure
    keys: tuple[Any, ...]
    name: str
    is_outside: bool  # not in the model, so that keeping its attributes does not restore this

    @property
    def identity(self) -> tuple[Any, ...]:
        return id(self.root), self.keys

    def value(self) -> Any:
        """Returns the value. Raises KeyError or IndexError where the place is gone."""
        value = self.root
        for key in self.keys:
            value = _entry(value, key)
        return value

    def put(self, value: Any) -> None:
        holder = self.root
        for key in self.keys[:-1]:
            holder = _entry(holder, key)
        if isinstance(holder, type):
            setattr(holder, self.keys[-1], value)
        elif isinstance(holder, CellType):
            holder.cell_contents = value
        else:
            (vars(holder) if _is_object(holder) else holder)[self.keys[-1]] = value

    def inner(self, key: Any, name: str) -> Place:
        return Place(self.root, (*self.keys, key), f"{self.name}{name}", self.is_outside)


def _entry(holder: Any, key: Any) -> Any:
    if isinstance(holder, CellType):
        return holder.cell_contents
    if isinstance(holder, type) or _is_object(holder):
        return vars(holder)[key]
    return holder[key]


def places_of(model: nn.Module, loss_fn: Callable[..., Any] | None) -> Iterator[tuple[Place, Any]]:
    """Yields all places with their values, except the plain attributes of modules themselves."""
    known = (module for root in (model, loss_fn) if isinstance(root, nn.Module) for module in root.modules())
    seen = {id(vars(module)) for module in known}
    roots = [("", model), (LOSS, loss_fn)]
    classes, files = dict[type, None](), dict[str, None]()
    for start, root in roots:
        modules = dict(root.named_modules()) if isinstance(root, nn.Module) else {}
        for path, module in modules.items():
            for name, value in vars(module).items():
                if name not in _OF_ANY_MODULE and not isinstance(value, PLAIN):
                    path_to = ".".join(filter(None, (start, path, name)))
                    yield from _within(Place(vars(module), (name,), path_to, bool(start)), value, seen)
        classes |= dict.fromkeys(cls for module in modules.values() for cls in type(module).__mro__)
        if root is not None and not modules:
            yield from _of_callable(root, start, seen)
            files[getattr(root, "__module__", None) or ""] = None
            classes |= dict.fromkeys(type(root).__mro__)
    for cls in classes:
        if is_of_others(cls.__module__):
            continue
        files[cls.__module__] = None
        for name, value in list(vars(cls).items()):
            if isinstance(value, FunctionType):
                yield from _of_closure(value, f"{cls.__name__}.{name}", seen)
            elif not name.startswith("__"):
                yield from _within(Place(cls, (name,), f"{cls.__name__}.{name}", True), value, seen)
    for file in files:
        own = None if is_of_others(file) else sys.modules.get(file)
        for name, value in list(vars(own).items()) if isinstance(own, ModuleType) else ():
            if not name.startswith("__"):
                yield from _within(Place(vars(own), (name,), f"{name} of {file}", True), value, seen, 2)


def is_of_others(name: str) -> bool:
    """Returns whether a module of this name belongs to torch, Python or this project."""
    return name.partition(".")[0] in _OF_OTHERS


def _of_callable(function: Any, name: str, seen: set[int]) -> Iterator[tuple[Place, Any]]:
    if isinstance(function, partial):
        yield from _of_callable(function.func, name, seen)
        for key, value in (*enumerate(function.args), *function.keywords.items()):
            held: Any = function.args if isinstance(key, int) else function.keywords
            yield from _within(Place(held, (key,), f"{name}.{key}", True), value, seen)
    if isinstance(function, MethodType):
        yield from _of_callable(function.__func__, name, seen)
        if not isinstance(function.__self__, nn.Module | type):
            yield from _of_callable(function.__self__, name, seen)
    if isinstance(function, FunctionType):
        yield from _of_closure(function, name, seen)
    if isinstance(function, FunctionType) or is_of_attributes(function):
        for key, value in vars(function).items():
            yield from _within(Place(vars(function), (key,), f"{name}.{key}", True), value, seen)


def _of_closure(function: FunctionType, name: str, seen: set[int]) -> Iterator[tuple[Place, Any]]:
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        yield from _within(Place(cell, (variable,), f"{variable} of {name}", True), value, seen)


def _within(place: Place, value: Any, seen: set[int], depth: int = 0) -> Iterator[tuple[Place, Any]]:
    if isinstance(value, PLAIN) or is_generator(value) or is_stepped(value):
        yield place, value
        return
    is_object = _is_object(value)
    inner = vars(value) if is_object else value
    if not isinstance(inner, dict | list | tuple | deque) or id(inner) in seen:
        return
    seen.add(id(inner))
    if isinstance(inner, list | deque):
        yield place, inner
    if depth == _DEEPEST or len(inner) > _LARGEST:
        return
    for key, entry in list(inner.items() if isinstance(inner, dict) else enumerate(inner)):
        if isinstance(inner, tuple) and isinstance(entry, PLAIN):
            continue  # it cannot change
        if isinstance(value, nn.Module) and key in _OF_ANY_MODULE and key != "_modules":
            continue
        inside = place.inner(key, f".{key}" if is_object else f"[{key!r}]")
        yield from _within(inside, entry, seen, depth + 1)


def _is_object(value: Any) -> bool:
    """Returns whether places are sought in its attributes; modules of model and loss were seen before."""
    return isinstance(value, nn.Module) or (is_of_attributes(value) and not isinstance(value, ModuleType))


def is_generator(value: Any) -> bool:
    """Returns whether it is a generator of its own, other than the global ones of Python and numpy."""
    if isinstance(value, random.Random | torch.Generator):
        return True
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.random.Generator | numpy.random.RandomState)


def is_stepped(value: Any) -> bool:
    """Returns whether it holds numbers that cannot be followed: an `itertools.count`, or numpy's numbers."""
    if isinstance(value, itertools.count):
        return True
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.generic | numpy.ndarray):
        return False
    return bool(value.dtype.kind in "iuf" and value.size <= _LARGEST_ARRAY)


def snapshot(value: Any) -> Any:
    """Returns something to compare with a later snapshot of the same place."""
    if isinstance(value, list | deque):
        return len(value)
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        with _disable_current_modes():
            return value.get_state().tolist()
    if is_generator(value):
        return repr(value.bit_generator.state if hasattr(value, "bit_generator") else value.get_state())
    if isinstance(value, itertools.count):
        return repr(value)
    return value.tolist() if is_stepped(value) else value


def differ(before: Any, after: Any) -> bool:
    """Returns whether two snapshots of a place differ; what is nan in both does not, unequal as it is."""
    return before != after and repr(before) != repr(after)


@contextmanager
def keep_outside(model: nn.Module, loss_fn: Callable[..., Any] | None) -> Iterator[None]:
    """Restores numbers and lists outside of the model, such as those of its loss, afterwards.

    Counters of itertools and arrays of numpy are restored wherever they are.
    """
    before = [
        (place, value, _copied(value))
        for place, value in places_of(model, loss_fn)
        if place.is_outside or is_stepped(value)
    ]
    try:
        yield
    finally:
        for place, value, kept in before:
            _put_back(place, value, kept)


def _copied(value: Any) -> Any:
    if isinstance(value, list | deque):
        return list(value)
    if isinstance(value, itertools.count):
        return counted_from(value, 0)
    return value.copy() if is_stepped(value) else value


def _put_back(place: Place, value: Any, kept: Any) -> None:
    if isinstance(value, list | deque):
        if [*map(id, value)] != [*map(id, kept)]:
            value.clear()
            value.extend(kept)
        return
    try:
        if isinstance(value, itertools.count):
            if repr(value) != repr(kept):
                place.put(kept)
            return
        if is_stepped(value) and value.ndim and (value != kept).any():
            value[...] = kept
        if place.value() is not value:
            place.put(value)
    except (KeyError, IndexError, TypeError):  # the entry is gone, or its container is made anew
        return


def step_on(place: Place, before: Any, after: Any, num_calls: int) -> None:
    """Changes the place to what it is after so many calls that all do what one has done to its snapshot."""
    value = place.value()
    if isinstance(value, list | deque):
        grown = after - before
        if grown > 0 and value:
            value.extend([value[-1]] * (grown * num_calls))
    elif isinstance(value, itertools.count):
        place.put(counted_from(value, num_calls))
    elif is_stepped(value):
        numpy = sys.modules["numpy"]
        step = numpy.asarray(after) - numpy.asarray(before)
        moved = (value + step * num_calls).astype(value.dtype)
        if isinstance(value, numpy.ndarray):
            value[...] = moved
        else:
            place.put(moved)


def counted_from(counter: itertools.count[Any], num_calls: int) -> itertools.count[Any]:
    """Returns a counter that continues after calls that have taken one number each."""
    start, _, step = repr(counter).partition("(")[2].rstrip(")").partition(", ")
    by = _number(step) if step else 1
    return itertools.count(_number(start) + num_calls * by, by)


def _number(text: str) -> Any:
    return float(text) if any(sign in text for sign in ".einf") else int(text)
