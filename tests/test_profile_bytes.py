"""Bytes of analytic costs: what a kernel has to move."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pd2bw_fx.device import Device
from pd2bw_fx.passes.normalise import normalise
from pd2bw_fx.passes.profile import profile
from pd2bw_fx.passes.trace import trace


def bytes_of(model: nn.Module, inputs: tuple[Tensor, ...], tracer: str = "auto") -> dict[str, list[float]]:
    """Memory traffic of each operator's forward and backward as the analytic costs have it."""
    traced = trace(model, inputs, {}, tracer=tracer)
    costs = profile(normalise(traced), traced.examples, device=Device("cpu:0", 2**33), method="analytic")
    works = {name: (cost.forward_work, cost.backward_work) for name, cost in costs.operators.items()}
    return {name: [0 if work is None else work[1] for work in pair] for name, pair in works.items()}


class Viewing(nn.Module):
    """Queries, keys and values of one product, as views; a bias repeated; a table that is looked up in."""

    def __init__(self) -> None:
        super().__init__()
        self.product, self.bias = nn.Linear(8, 24), nn.Parameter(torch.zeros(1, 1, 8))
        self.table, self.words = nn.Parameter(torch.zeros(1000, 8)), nn.Embedding(1000, 8)

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        query, key, value = self.product(x).chunk(3, -1)
        heads = query.view(2, 5, 4, 2).transpose(1, 2).reshape(2, 4, 10)
        rows = self.table[places] + self.words(places)
        return (key * value + self.bias.expand(2, 5, 8) + rows).sum() + heads.sum() + key[:, :1].sum()


def test_views_move_nothing_and_looking_up_reads_the_rows_that_it_gives() -> None:
    places = torch.zeros(2, 5, dtype=torch.long)
    product, bias, table = 2 * 5 * 24 * 4, 8 * 4, 1000 * 8 * 4

    moved = bytes_of(Viewing(), (torch.randn(2, 5, 8), places))

    nothing = ["view", "transpose", "getitem", "getitem_1", "getitem_2"]
    assert [moved[name] for name in nothing] == [[0, 0]] * 5
    assert moved["chunk"] == [0, 2 * product]  # gradients of three are put together
    assert moved["slice_1"] == [0, 2 * 5 * 8 * 4 + 2 * 8 * 4]
    assert moved["expand"] == [0, 2 * 5 * 8 * 4 + bias]
    assert moved["reshape"][0] == 2 * 2 * 5 * 8 * 4  # of what lies otherwise: a copy
    rows = 2 * 5 * (8 * 4 + 8 * 4 + 8)  # read, written, and their numbers
    assert moved["index"] == moved["embedding"]
    assert moved["index"][0] == rows
    assert moved["index"][1] == 2 * (table + rows - 2 * 5 * 8 * 4)


def test_a_layer_is_looked_up_in_by_what_it_is_and_not_by_its_name() -> None:
    layers = nn.ModuleDict({"embedding_projection": nn.Linear(8, 16), "projection": nn.Linear(16, 16)})
    moved = bytes_of(nn.Sequential(*layers.children()), (torch.randn(3, 8),), tracer="fx")

    named = nn.Sequential()
    for name, layer in layers.items():
        named.add_module(name, layer)

    assert [*bytes_of(named, (torch.randn(3, 8),), tracer="fx").values()] == [*moved.values()]
