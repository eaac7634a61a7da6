"""Operators on rows that a mask selects: as many as it selects, none and one among them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pd2bw_fx
from pd2bw_fx.errors import TraceError

ROWS = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
MASK = torch.tensor([1, 0, 1, 1, 0, 1]).bool()


class Selecting(nn.Module):
    """Points of a cloud that are filled up to one length, and a function of those that are points."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm, self.function = nn.BatchNorm1d(8), function

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden = self.second(self.first(x).relu())
        return self.function(self.norm(hidden[mask])).sum() + hidden.square().mean()


def _several(rows: Tensor) -> Tensor:
    attended = F.scaled_dot_product_attention(rows[None, None], rows[None, None], rows[None, None])
    return attended.sum() + rows.logsumexp(0).clamp(min=-1).sum() + (rows.roll(1, 0) * rows).sum()


def _policy(rows: Tensor) -> Tensor:
    policy = torch.distributions.Categorical(logits=rows)
    return -policy.log_prob(rows.argmax(1)).sum() - policy.entropy().sum()


def _split(model: nn.Module) -> pd2bw_fx.Pipeline:
    return pd2bw_fx.split(model, (ROWS, MASK), cluster=2, num_stages=2, costs="analytic")


@pytest.mark.parametrize(("function", "fewest"), [(_several, 0), (_policy, 2)])  # torch's policy needs a row
def test_what_is_computed_of_selected_rows_is_right_for_few_and_none(
    function: Callable[[Tensor], Tensor], fewest: int
) -> None:
    model = Selecting(function)
    pipe = _split(model)

    for mask in (MASK[:5], torch.arange(4) < fewest):
        assert pipe.verify(model, example={"x": ROWS[: len(mask)] * 2, "mask": mask}).exact


def test_a_batch_norm_refuses_a_single_selected_row_in_the_stage_as_in_the_model() -> None:
    model = Selecting(Tensor.square)
    pipe = _split(model)

    for run in (lambda *batch: model(*batch), lambda *batch: pipe.run(batch)):
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            run(ROWS, torch.arange(6) == 2)


def test_a_way_that_the_author_chooses_by_the_number_of_rows_is_not_answered() -> None:
    model = Selecting(lambda rows: rows.sum() * 0 if rows.shape[0] == 0 else rows.mean(0))

    with pytest.raises(TraceError, match=r"stopped at test_selected_rows.py:\d+: model = Selecting"):
        _split(model)
