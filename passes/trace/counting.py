"""`len(x)` of a batch, which Python makes a plain int of: a trace would be for the example's size alone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def open_len(model: nn.Module, loss_fn: Callable[..., Any] | None) -> Iterator[None]:
    """While torch traces, `len` of a tensor is `x.shape[0]` in the files that define the model and its loss.

    What else is called `len` there stays; other files see the built-in.
    """
    names = {type(module).__module__ for module in model.modules()}
    names |= {getattr(loss_fn, "__module__", None) or "", type(loss_fn).__module__}
    files = [vars(sys.modules[name]) for name in names if name in sys.modules and not _is_of_torch(name)]
    patched = [file for file in files if "len" not in file]
    try:
        for file in patched:
            file["len"] = _len
        yield
    finally:
        for file in patched:
            del file["len"]


def _len(counted: Any) -> Any:
    return counted.shape[0] if isinstance(counted, torch.Tensor) and counted.dim() else len(counted)


def _is_of_torch(name: str) -> bool:
    return name.partition(".")[0] in ("torch", "builtins", "pd2bw_fx")
