"""The module that is traced: flat tensors in, flat named tensors out, the user's model inside."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pd2bw_fx.errors import InputError

from .inputs import FlatArguments

MODEL_PREFIX = "model."


@dataclass(slots=True)
class Record:
    """What a run of the program found out: how the flat results are called and what was no tensor."""

    output_names: tuple[str, ...] = ()
    loss: str | None = None
    left_out: tuple[str, ...] = ()


class Program(nn.Module):
    """Calls the model as the user would, and remembers what the flat results are called.

    `record` is filled in once it has run; a thing of its own, for export undoes what a forward assigns to a
    module. For the same reason a buffer that the forward assigns anew (`self.count = self.count + 1`) is
    written back in place here.
    """

    def __init__(self, model: nn.Module, flat: FlatArguments, loss_fn: Callable[..., Any] | None) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.flat = flat
        self.record = Record()

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        args, kwargs, targets = self.flat.rebuild(tensors)
        before = dict(self.model.named_buffers())
        output = self.model(*args, **kwargs)
        self._write_back(before)
        if self.loss_fn is not None:
            loss = self.loss_fn(output, targets)
            _check_loss(loss)
            named = [("loss", loss), *_named_outputs(output, has_loss=False)]
        else:
            named = _named_outputs(output, has_loss=True)
        kept = [(name, value) for name, value in named if isinstance(value, torch.Tensor)]
        self.record.left_out = tuple(
            f"{name} ({type(value).__name__})"
            for name, value in named
            if not isinstance(value, torch.Tensor) and value is not None
        )
        self.record.output_names = _distinct([name for name, _ in kept])
        self.record.loss = "loss" if kept and kept[0][0] == "loss" else None
        return tuple(value for _, value in kept)

    def call(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The model run as it is: results by output name."""
        results = self.forward(*(tensors[name] for name in self.flat.names))
        return dict(zip(self.record.output_names, results, strict=True))

    def _write_back(self, before: Mapping[str, torch.Tensor]) -> None:
        after = dict(self.model.named_buffers())
        for name, buffer in before.items():
            if name in after and after[name] is not buffer:
                with torch.no_grad():
                    buffer.copy_(after[name])
                path, _, attribute = name.rpartition(".")
                setattr(self.model.get_submodule(path), attribute, buffer)


def _check_loss(loss: Any) -> None:
    if isinstance(loss, torch.Tensor) and loss.dim() == 0 and loss.is_floating_point():
        return
    found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(type(loss))
    raise InputError(f"loss_fn returned {found}, expected a floating-point scalar; try a mean over the batch")


def is_loss(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_floating_point()


def _named_outputs(output: Any, *, has_loss: bool) -> list[tuple[str, Any]]:
    """Every leaf of what the model returned with its name, the loss first."""
    if isinstance(output, torch.Tensor):
        return [("loss" if has_loss and is_loss(output) else "output", output)]
    leaves = list(_leaves(output, ()))
    named = [("_".join(path) if _has_keys(output) else "_".join(("output", *path)), v) for path, v in leaves]
    if not has_loss:
        return [("output_loss" if name == "loss" else name, value) for name, value in named]
    if not _has_keys(output):
        first = named[0][1] if named else None
        if is_loss(first) and first.requires_grad:
            named[0] = ("loss", first)
        return named
    losses = [(name, value) for name, value in named if name == "loss" and is_loss(value)]
    return [*losses, *((name, value) for name, value in named if name != "loss")]


def _has_keys(output: Any) -> bool:
    return isinstance(output, Mapping) or (dataclasses.is_dataclass(output) and not isinstance(output, type))


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, (*path, str(key)))
    elif isinstance(value, (tuple, list)):
        for position, item in enumerate(value):
            yield from _leaves(item, (*path, str(position)))
    elif _has_keys(value):
        for entry in dataclasses.fields(value):
            yield from _leaves(getattr(value, entry.name), (*path, entry.name))
    else:
        yield path, value


def _distinct(names: list[str]) -> tuple[str, ...]:
    distinct: list[str] = []
    for name in names:
        candidate, count = name, 0
        while candidate in distinct:
            count += 1
            candidate = f"{name}_{count}"
        distinct.append(candidate)
    return tuple(distinct)
