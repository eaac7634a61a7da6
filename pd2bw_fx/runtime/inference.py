"""Leaves a caller's torch.inference_mode() and torch.autocast where the engine begins.

Tensors of inference mode could not be trained on. An autocast around one call would be in some of a
microbatch's actions and not in others, which are in the next call.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from pd2bw_fx.errors import InputError
from pd2bw_fx.program import surrounding_autocast


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Makes tensors that are created inside ordinary ones of their own types, whatever the caller's modes."""
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        for device_type in surrounding_autocast():
            stack.enter_context(torch.autocast(device_type, enabled=False))
        yield


def require_own_precision(precision: str | None) -> None:
    """Raises InputError where the caller's autocast would be left, and `precision` is no other one."""
    if precision is None and surrounding_autocast():
        raise InputError(
            "torch.autocast is on around this call, and microbatches are computed in others too; "
            'precision="bf16", an option of the training, computes all of them under autocast'
        )


def ordinary(tensor: Tensor) -> Tensor:
    """Returns the tensor, or a copy of one that was made in inference mode."""
    return tensor.clone() if tensor.is_inference() else tensor
