"""Activation checkpointing of the model's own, which a trace leaves out: what a stage computes again in its
backward is the plan's to say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint


@contextmanager
def skip_checkpointing(found: Callable[[], None]) -> Iterator[None]:
    """While it lasts, torch.utils.checkpoint calls the function that it is given, and `found`.

    Torch exports the backward of one kind of it (`use_reentrant=True`) not at all, and what follows a
    checkpoint within a checkpoint of the other as if it were under no_grad. Both compute running statistics
    twice, which a stage does not.
    """

    def without_saving(*_args: Any, **_kwargs: Any) -> Iterator[None]:
        found()
        yield

    class Reentrant:
        @staticmethod
        def apply(function: Callable[..., Any], _preserve_rng_state: bool, *args: Any) -> Any:
            """As torch's: where no argument has a gradient, nothing inside has one."""
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
