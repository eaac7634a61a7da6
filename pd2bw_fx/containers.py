"""The containers of tensors among a call's arguments: what torch's pytree looks into, and dataclasses."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from pd2bw_fx.errors import InputError

_DEPTH = 4
_NO_CONTAINERS = (type, nn.Module, types.ModuleType, types.FunctionType, types.MethodType, torch.Generator)


def look_into_dataclasses(value: Any) -> None:
    """Lets torch's pytree look into the dataclasses within `value`, as it looks into tuples and dicts.

    Their classes are registered with torch for that, as `torch.export.register_dataclass` does.
    """
    while unknown := {type(leaf) for leaf in pytree.tree_leaves(value) if _is_holding_dataclass(leaf)}:
        for kind in unknown:
            pytree.register_dataclass(kind)


def hidden_tensor(leaf: Any) -> str | None:
    """Returns where an object that pytree does not look into holds a tensor (".store['x']"), or None."""
    if isinstance(leaf, torch.Tensor):
        return None
    return next(_hidden(leaf, "", _DEPTH), None)


def leaves_of(value: Any) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Yields tensors, None, empty containers and all else that is not a container, with the path to each."""
    if isinstance(value, torch.Tensor):
        yield (), value
        return
    if isinstance(value, Mapping) and type(value) not in pytree.SUPPORTED_NODES:
        value = dict(value)
    look_into_dataclasses(value)
    leaves, _ = pytree.tree_flatten_with_path(value, is_leaf=_is_empty)
    for path, leaf in leaves:
        yield tuple(_step(key) for key in path), leaf


def entry_at(value: Any, path: Iterable[str | int]) -> Any:
    """Returns what is found at such a path.

    Raises LookupError, AttributeError or TypeError where nothing is.
    """
    for key in path:
        value = value[key] if not isinstance(key, str) or isinstance(value, Mapping) else getattr(value, key)
    return value


def place_of(argument: str, path: Iterable[str | int]) -> str:
    return argument + "".join(f"[{key!r}]" for key in path)


def _is_empty(value: Any) -> bool:
    return isinstance(value, list | tuple | dict) and not value


def step_of(key: Any) -> str | int | None:
    """Returns what an entry of a pytree path stands for: a dict's key, an index, or an attribute's name.

    None for an entry that a class of the user's own makes in another form.
    """
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            found: str | int = getattr(key, attribute)
            return found
    return None


def _step(key: Any) -> str | int:
    if (found := step_of(key)) is not None:
        return found
    raise InputError(f"an example input is nested in a way that has no path ({key!r}); use tuples and dicts")


def _is_holding_dataclass(leaf: Any) -> bool:
    """Returns whether it is a dataclass with tensors: one without is a plain value, as a configuration is."""
    if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type) or hidden_tensor(leaf) is None:
        return False
    return all(field.init for field in dataclasses.fields(leaf))  # torch rebuilds it from its fields


def _hidden(value: Any, path: str, depth: int) -> Iterator[str]:
    if isinstance(value, torch.Tensor):
        yield path
    elif depth == 0 or isinstance(value, _NO_CONTAINERS):
        return
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _hidden(entry, f"{path}[{key!r}]", depth - 1)
    elif isinstance(value, list | tuple):
        for index, entry in enumerate(value):
            yield from _hidden(entry, f"{path}[{index}]", depth - 1)
    else:
        for name, entry in getattr(value, "__dict__", {}).items():
            yield from _hidden(entry, f"{path}.{name}", depth - 1)
