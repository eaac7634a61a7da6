"""Connectionist temporal classification as an operator whose result's size is known before it runs.

torch's own has a second result for the backward, a table as long as the longest target. No trace can have it,
and so none of a model with `ctc_loss`. This operator returns only the loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from pd2bw_fx.custom_function import registered

_SCHEMA = (
    "ctc_loss(Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank=0, "
    "int reduction=1, bool zero_infinity=False) -> Tensor"
)
_torchs: Any = torch.ctc_loss


def _run(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int = 0,  # the dispatcher leaves out arguments that have their default value
    reduction: int = 1,
    zero_infinity: bool = False,
) -> Tensor:
    loss: Tensor = _torchs(log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity)
    return loss


def _fake(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> Tensor:
    is_batch = log_probs.dim() == 3
    return log_probs.new_empty((log_probs.shape[1],) if is_batch and reduction == 0 else ())


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, log_probs: Tensor, targets: Tensor, inputs: Tensor, lengths: Tensor, *rest: Any
    ) -> Any:
        ctx.save_for_backward(log_probs, targets, inputs, lengths)
        ctx.rest = rest
        with torch._C._AutoDispatchBelowAutograd():
            return operator()(log_probs, targets, inputs, lengths, *rest)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        log_probs, *others = ctx.saved_tensors
        nothing = (None,) * (len(others) + len(ctx.rest))
        if isinstance(log_probs, FakeTensor):
            return (torch.empty_like(log_probs), *nothing)
        with torch.enable_grad():
            leaf = log_probs.detach().requires_grad_()
            loss = _run(leaf, *others, *ctx.rest)
        return (*torch.autograd.grad(loss, leaf, gradient), *nothing)


_OPERATOR = registered(_SCHEMA, run=_run, differentiable=_Differentiable.apply, fake=_fake)


def operator() -> torch._ops.OpOverload:
    return _OPERATOR


@contextmanager
def keep_ctc_loss() -> Iterator[None]:
    """Turns calls of torch's function into calls of the operator, where the lengths are tensors."""

    def ctc_loss(
        log_probs: Tensor,
        targets: Tensor,
        inputs: Any,
        lengths: Any,
        blank: int = 0,
        reduction: int = 0,  # torch's word reduces nothing unless told to, other than its operator
        zero_infinity: bool = False,
    ) -> Any:
        rest = blank, reduction, zero_infinity
        if isinstance(inputs, Tensor) and isinstance(lengths, Tensor):
            return operator()(log_probs, targets, inputs, lengths, *rest)
        if all(type(length) is int for length in (*inputs, *lengths)):
            return operator()(log_probs, targets, torch.tensor(inputs), torch.tensor(lengths), *rest)
        return _torchs(log_probs, targets, inputs, lengths, *rest)

    torch.ctc_loss = ctc_loss  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.ctc_loss = _torchs
