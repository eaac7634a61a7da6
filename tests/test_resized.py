"""`resize_`: what is made to be given its size has it in the stages from the beginning."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import pd2bw_fx
from pd2bw_fx.errors import TraceError


class Computing(nn.Module):
    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.first(x))).square().mean()


def masked(hidden: Tensor) -> Tensor:
    """Drops values as AWD-LSTM drops words."""
    return hidden * hidden.data.new().resize_((hidden.size(1),)).bernoulli_(0.9)  # type: ignore[no-any-return]


def filled(hidden: Tensor) -> Tensor:
    made = hidden.new_empty(0)
    made.resize_(hidden.shape)
    made.fill_(0.5)
    return hidden + made


def like_another(hidden: Tensor) -> Tensor:
    return hidden + hidden.new_empty(0).resize_as_(hidden).zero_()


def made_larger(hidden: Tensor) -> Tensor:
    return hidden * hidden.data.new(2, 1).resize_((1, 8)).bernoulli_(0.5)  # type: ignore[no-any-return]


def in_another_shape(hidden: Tensor) -> Tensor:
    return hidden + hidden.detach().clone().resize_((hidden.shape[0], 2, 4)).flatten(1)


def split(between: Callable[[Tensor], Tensor]) -> pd2bw_fx.Pipeline:
    return pd2bw_fx.split(Computing(between), torch.randn(4, 8), cluster=2, costs="analytic")


@pytest.mark.parametrize("between", [masked, filled, like_another, made_larger, in_another_shape])
def test_a_tensor_without_values_is_made_at_the_size_that_it_is_given(
    between: Callable[[Tensor], Tensor],
) -> None:
    pipe = split(between)

    assert pipe.verify().exact
    assert ".resize" not in "".join(stage.source for stage in pipe.stages)


def test_one_with_values_is_given_no_other_number_of_them() -> None:
    with pytest.raises(TraceError, match=r"by resize_ \(test_resized.py:\d+\).*x.new_empty\(size\)"):
        split(lambda hidden: hidden + hidden.detach().clone().resize_((2, 8)).sum(0))
