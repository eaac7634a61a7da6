"""Restores a model after a run that leaves marks on it."""

from __future__ import annotations

import copy
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pd2bw_fx.errors import InputError

_DEEPEST = 4  # levels of objects in objects
_PLAIN = (Tensor, nn.Parameter)  # others may keep their own parts in attributes
_WITHOUT_PARTS = frozenset((type(None), bool, int, float, str, *_PLAIN))  # most of a module's attributes


@contextmanager
def keep_attributes(model: nn.Module | None, loss_fn: Callable[..., Any] | None = None) -> Iterator[None]:
    """Undoes what a traced forward does to its modules.

    That is what it assigns to them, to their parameters and buffers and to objects in them (tensors without
    data, counters), what it puts into their caches, and the hooks that it registers. Where a forward leaves a
    mark in its first call, the next call would do something else. The same holds for a loss that is a module
    or an object.
    """
    holders: list[Any] = []
    for root in (model, getattr(loss_fn, "__self__", loss_fn)):
        if isinstance(root, nn.Module):
            tensors = (tensor for tensor in (*root.parameters(), *root.buffers()) if type(tensor) in _PLAIN)
            holders += (*root.modules(), *tensors)
        elif is_of_attributes(root):
            holders.append(root)
    before = [(holder, dict(vars(holder))) for holder in holders]
    contents = [
        (held, copy.copy(held)) for _, attributes in before for held in _containers(attributes, set())
    ]
    try:
        yield
    finally:
        for holder, attributes in before:
            for name in [name for name in vars(holder) if name not in attributes]:
                del vars(holder)[name]
            vars(holder).update(attributes)
        for held, kept in contents:
            _put_back(held, kept)


@contextmanager
def keep_model(model: nn.Module) -> Iterator[None]:
    """Undoes what `keep_attributes` does, and restores modes and the values of parameters and buffers.

    Raises InputError for a buffer that has another size after the run.
    """
    live: dict[str, Tensor] = dict(model.named_parameters()) | dict(model.named_buffers())
    before = {name: tensor.detach().clone() for name, tensor in live.items()}
    with keep_attributes(model):
        try:
            yield
        finally:
            with torch.no_grad():
                resized = {name: t.shape for name, t in live.items() if t.shape != before[name].shape}
                for name, tensor in live.items():
                    if name in resized:
                        tensor.data = before[name]
                    else:
                        without_repeats(tensor).copy_(without_repeats(before[name], tensor))
    if resized:
        name, shape = next(iter(resized.items()))
        raise InputError(
            f"buffer {name!r} has shape {tuple(before[name].shape)}, and {tuple(shape)} after a forward (an "
            "observer of ranges has no size before its first batch); run the model once, then split it"
        )


def without_repeats(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Returns a view with each element of an expanded tensor once: torch refuses to write an expanded one."""
    for dimension, stride in enumerate((tensor if like is None else like).stride()):
        if stride == 0 and tensor.shape[dimension] > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def is_of_attributes(value: Any) -> bool:
    """Returns whether it is an object of the user's, or of a library other than torch, and not a module."""
    if isinstance(value, type | Tensor | nn.Module) or not isinstance(getattr(value, "__dict__", None), dict):
        return False
    library = type(value).__module__.partition(".")[0]
    return isinstance(value, types.SimpleNamespace) or not (
        library in ("torch", "pd2bw_fx") or library in sys.stdlib_module_names
    )


def _containers(value: Any, seen: set[int], depth: int = 0) -> Iterator[Any]:
    """Yields the dicts, lists, sets and queues in a value, nested ones too, and objects' attributes."""
    if is_of_attributes(value) and depth < _DEEPEST:
        depth, value = depth + 1, vars(value)
    if not isinstance(value, dict | list | set | tuple | deque) or id(value) in seen:
        return
    seen.add(id(value))
    if not isinstance(value, tuple):
        yield value
    for inner in value.values() if isinstance(value, dict) else value:
        if type(inner) not in _WITHOUT_PARTS:
            yield from _containers(inner, seen, depth)


def _put_back(held: Any, kept: Any) -> None:
    if isinstance(held, dict):
        if [*map(id, held), *map(id, held.values())] != [*map(id, kept), *map(id, kept.values())]:
            held.clear()
            held.update(kept)
    elif isinstance(held, list | deque):
        if [*map(id, held)] != [*map(id, kept)]:
            held.clear()
            held.extend(kept)
    elif held != kept:
        held.clear()
        held.update(kept)
