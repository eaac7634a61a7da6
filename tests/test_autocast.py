"""Stages under autocast compute as the model does there, though it was traced without."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pd2bw_fx import Pipeline, split


class Model(nn.Module):
    """What `inside` makes of two projections, classified."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(16, 16)
        self.key = nn.Linear(16, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.inside(self.query(x), self.key(x))).mean(1), y)

    def inside(self, query: Tensor, key: Tensor) -> Tensor:
        raise NotImplementedError


class NormInFloat32(Model):
    def inside(self, query: Tensor, key: Tensor) -> Tensor:
        x = query.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return x + key.float().exp().log()


class AddedByIndex(Model):
    def inside(self, query: Tensor, key: Tensor) -> Tensor:
        total = torch.zeros(query.shape, dtype=self.head.weight.dtype) + query
        picked = torch.arange(query.shape[0]).flip(0)
        return total.index_add(0, picked, key.to(self.head.weight.dtype))


class Masked(Model):
    def inside(self, query: Tensor, key: Tensor) -> Tensor:
        scores = query @ key.mT
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        low = torch.finfo(scores.dtype).min
        return torch.softmax(self.hidden(scores, later, low), dim=-1) @ key

    def hidden(self, scores: Tensor, later: Tensor, low: float) -> Tensor:
        return scores.masked_fill(later, low)


class MaskedByIndex(Masked):
    def hidden(self, scores: Tensor, later: Tensor, low: float) -> Tensor:
        scores[:, later] = low
        return scores


class MaskedByWhere(Masked):
    def hidden(self, scores: Tensor, later: Tensor, low: float) -> Tensor:
        return torch.where(later, low, scores)


class MaskedOfAnExpression(Masked):
    def hidden(self, scores: Tensor, later: Tensor, low: float) -> Tensor:
        return (scores * 2).masked_fill(later, low) + scores.clamp(min=low)


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(8, 6, 16), torch.randint(0, 4, (8,))


def _split(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Pipeline:
    return split(model, batch, cluster=2, costs="analytic", check="full")


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "model", [NormInFloat32, AddedByIndex, Masked, MaskedByIndex, MaskedByWhere, MaskedOfAnExpression]
)
def test_stages_are_the_model_under_autocast(model, precision, batch):
    live = model()
    pipe = _split(live, batch)
    with torch.autocast("cpu", precision):
        expected = live(*batch)
        found = pipe.run(batch)["loss"]
    assert found.item() == pytest.approx(expected.item(), rel=2 * torch.finfo(precision).eps ** 2)


def test_only_casts_with_something_to_do_are_written(batch: tuple[Tensor, Tensor]) -> None:
    source = "".join(stage.source for stage in _split(NormInFloat32(), batch).stages)
    assert source.count(".to(torch.float32)") == 2


def test_a_model_without_low_precision_has_no_such_cast(batch: tuple[Tensor, Tensor]) -> None:
    class Plain(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy((x.float() * 2).mean(1).to(x.dtype).float()[:, :4], y)

    class Summed(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(16))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return super().forward(x * self.scale, y)

    assert all(".to(" not in stage.source for stage in _split(Summed(), batch).stages)


def test_limits_are_those_of_the_type(batch: tuple[Tensor, Tensor]) -> None:
    source = "".join(stage.source for stage in _split(MaskedOfAnExpression(), batch).stages)
    assert "product.clamp(torch.finfo(product.dtype).min)" in source
    assert "product_2.masked_fill(triu, torch.finfo(product_2.dtype).min)" in source
