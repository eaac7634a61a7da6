"""What may hold tensors among a call's arguments: what torch's pytree looks into, and dataclasses."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

_DEPTH = 4
_NO_CONTAINERS = (type, nn.Module, types.ModuleType, types.FunctionType, types.MethodType, torch.Generator)


def look_into_dataclasses(value: Any) -> None:
    """Has torch's pytree look into the dataclasses within `value`, as it looks into tuples and dicts.

    Their classes are registered with torch for that, as `torch.export.register_dataclass` would.
    """
    while unknown := {type(leaf) for leaf in pytree.tree_leaves(value) if _is_holding_dataclass(leaf)}:
        for kind in unknown:
            pytree.register_dataclass(kind)


def hidden_tensor(leaf: Any) -> str | None:
    """Where an object that torch does not look into holds a tensor: ".store['x']". None: nowhere."""
    if isinstance(leaf, torch.Tensor):
        return None
    return next(_hidden(leaf, "", _DEPTH), None)


def _is_holding_dataclass(leaf: Any) -> bool:
    """One without tensors is a plain value, such as a configuration."""
    if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type) or hidden_tensor(leaf) is None:
        return False
    return all(field.init for field in dataclasses.fields(leaf))  # torch makes it anew from its fields


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
