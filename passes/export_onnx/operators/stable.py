"""Logarithms and exponentials that neither overflow nor lose small arguments, and the losses made of them.

The exporter writes them out as log(sigmoid(x)), log(exp(a) + exp(b)) and log(1 + x), which do both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .ordering import at_most

_LEAST_LOG = -100.0  # torch's binary cross entropy clamps the logarithm of a probability to it


def _of_one_more(x: Tensor) -> Tensor:
    """Computes log(1 + x), corrected by the part of x that 1 + x keeps (W. Kahan)."""
    above = 1 + x
    as_it_is = (above == 1) | (x == math.inf)
    return torch.where(as_it_is, x, above.log() * (x / torch.where(as_it_is, 1.0, above - 1)))


def _one_less(self: Tensor) -> Tensor:
    """Computes exp(x) - 1 with the same correction."""
    power = self.exp()
    less = power - 1
    as_it_is = (power == 1) | (less == -1) | (power == math.inf)
    near = less * (self / torch.where(as_it_is, 1.0, power.log()))
    return torch.where(power == 1, self, torch.where(as_it_is, less, near))


def _log_sigmoid(input: Tensor) -> Tensor:  # noqa: A002 - as torch calls it
    return at_most(input, 0.0) - _of_one_more((-input.abs()).exp())


def _log_add_exp(self: Tensor, other: Tensor) -> Tensor:
    apart = torch.where(self == other, 0.0, -(self - other).abs())  # also for equal infinities
    return torch.maximum(self, other) + _of_one_more(apart.exp())


def _log_add_exp2(self: Tensor, other: Tensor) -> Tensor:
    apart = torch.where(self == other, 0.0, -(self - other).abs())
    return torch.maximum(self, other) + _of_one_more(torch.exp2(apart)) / math.log(2)


def _log_cum_sum_exp(self: Tensor, dim: int) -> Tensor:
    """Sums over a row for each entry, which holds the entries up to it."""
    rows = up_to_each(self, dim, -math.inf)
    largest = rows.amax(-1, keepdim=True)
    finite = torch.where(largest.isinf(), 0.0, largest)
    return ((rows - finite).exp().sum(-1).log() + finite.squeeze(-1)).movedim(-1, dim)


def up_to_each(tensor: Tensor, dim: int, neutral: float) -> Tensor:
    """Returns (.., n, n): `dim` moved to the end, a row per entry with those up to it, then `neutral`."""
    moved = tensor.movedim(dim, -1)
    places = torch.arange(moved.shape[-1], device=tensor.device)
    return torch.where(places <= places.unsqueeze(1), moved.unsqueeze(-2), neutral)


def _reduced(losses_of: Callable[..., Tensor]) -> Callable[..., Any]:
    """Returns the torch function of a loss, from one that computes the losses of all entries or rows."""

    def loss(
        input: Tensor,  # noqa: A002 - as torch calls it
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        reduce: bool | None = None,
        reduction: str = "mean",
        *more: Any,
        **named: Any,
    ) -> Any:
        if size_average is not None or reduce is not None:  # torch has deprecated both
            return NotImplemented
        losses = losses_of(input, target, weight, *more, **named)
        return losses.mean() if reduction == "mean" else losses.sum() if reduction == "sum" else losses

    return loss


def _weighed(losses: Tensor, weight: Tensor | None) -> Tensor:
    return losses if weight is None else losses * weight


@_reduced
def _bce(probability: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
    own, other = probability.log().clamp(min=_LEAST_LOG), (1 - probability).log().clamp(min=_LEAST_LOG)
    return _weighed(-(target * own + (1 - target) * other), weight)


@_reduced
def _bce_with_logits(
    logits: Tensor, target: Tensor, weight: Tensor | None, pos_weight: Tensor | None = None
) -> Tensor:
    positive = target if pos_weight is None else pos_weight * target
    return _weighed(-(positive * _log_sigmoid(logits) + (1 - target) * _log_sigmoid(-logits)), weight)


@_reduced
def _multilabel(logits: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
    losses = -(target * _log_sigmoid(logits) + (1 - target) * _log_sigmoid(-logits))
    return _weighed(losses, weight).mean(-1)


BY_NAME: Mapping[str, Callable[..., Any]] = {
    "expm1": _one_less,
    "log1p": _of_one_more,
    "logaddexp": _log_add_exp,
    "logaddexp2": _log_add_exp2,
    "logcumsumexp": _log_cum_sum_exp,
    "logsigmoid": _log_sigmoid,
    "binary_cross_entropy": _bce,
    "binary_cross_entropy_with_logits": _bce_with_logits,
    "multilabel_soft_margin_loss": _multilabel,
}
"""Functions of torch, torch.nn.functional and tensors."""

BY_FUNCTION: Mapping[Any, Callable[..., Any]] = {
    torch.special.expm1: _one_less,
    torch.special.log1p: _of_one_more,
}
