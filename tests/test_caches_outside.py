"""Tables that a model keeps outside of itself, in a cache of its file's or its class's."""

from __future__ import annotations

import functools
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

import pd2bw_fx

_TABLES: dict[int, Tensor] = {}


def _table(width: int) -> Tensor:
    return torch.arange(width).double().sin()


@functools.lru_cache(maxsize=8)
def _remembered(width: int) -> Tensor:
    return _table(width)


class _Layers(nn.Module):
    tables: ClassVar[dict[int, Tensor]] = {}

    def __init__(self, cache: str) -> None:
        super().__init__()
        self.cache = cache
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x) * self.table()).square().mean()

    def table(self) -> Tensor:
        if self.cache == "lru_cache":
            return _remembered(8)
        tables = _TABLES if self.cache == "of the file" else self.tables
        if 8 not in tables:
            tables[8] = _table(8)
        return tables[8]


@pytest.mark.parametrize("cache", ["lru_cache", "of the file", "of the class"])
def test_a_table_that_is_kept_outside_of_the_model_is_one_with_data(cache: str) -> None:
    torch.manual_seed(0)
    model, x = _Layers(cache).double(), torch.randn(4, 8).double()
    _remembered.cache_clear()

    pipe = pd2bw_fx.split(model, x, cluster=2, costs="analytic")

    assert type(model.table()) is Tensor
    torch.testing.assert_close(model.table(), _table(8))
    torch.testing.assert_close(pipe.run(x)["loss"], model(x))
