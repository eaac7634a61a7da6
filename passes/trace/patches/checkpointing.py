"""The model's own activation checkpointing, left out of traces: the plan decides what is recomputed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint


@contextmanager
def skip_checkpointing(found: Callable[[], None]) -> Iterator[None]:
    """Makes torch.utils.checkpoint only call its function; `found` is called as well.

    Torch does not export the backward of `use_reentrant=True` at all. With `use_reentrant=False` it exports
    what follows a checkpoint within a checkpoint as if under no_grad. Both update running statistics twice,
    which a stage does not.
    """

    def without_saving(*_args: Any, **_kwargs: Any) -> Iterator[None]:
        found()
        yield

    class Reentrant:
        @staticmethod
        def apply(function: Callable[..., Any], _preserve_rng_state: bool, *args: Any) -> Any:
            """Calls the function; as in torch, nothing inside has a gradient if no argument has one."""
            found()
            has_gradient = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
            with torch.set_grad_enabled(torch.is_grad_enabled() and has_gradient):
                return function(*args)

    module: Any = torch.utils.checkpoint
    before = module.CheckpointFunction, module._checkpoint_without_reentrant_generator
    module.CheckpointFunction, module._checkpoint_without_reentrant_generator = Reentrant, without_saving
    try:
        yield
    finally:
        module.CheckpointFunction, module._checkpoint_without_reentrant_generator = before
