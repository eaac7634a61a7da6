"""Inputs in classes of a user's own: dataclasses are looked into, other objects with tensors are refused."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pd2bw_fx
from pd2bw_fx.errors import InputError
from pd2bw_fx.runtime.reference import train_reference


@dataclass
class Options:
    """Without a tensor: a plain value."""

    scale: float = 2.0


@dataclass
class Graph:
    nodes: Tensor
    edges: tuple[Tensor, Tensor]


@dataclass
class Sample:
    graph: Graph
    weights: Tensor
    options: Options


class Reading(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, sample: Any, extra: Tensor) -> Tensor:
        hidden = self.first(sample.graph.nodes).tanh() * sample.options.scale
        hidden = hidden + sample.graph.edges[0] - sample.graph.edges[1]
        result: Tensor = (self.last(hidden).squeeze(-1) * sample.weights + extra).square().mean()
        return result


def arguments(size: int) -> tuple[Sample, Tensor]:
    nodes, one, other = torch.randn(3, size, 8, dtype=torch.float64)
    weights, extra = torch.rand(2, size, dtype=torch.float64)
    return Sample(Graph(nodes, (one, other)), weights, Options()), extra


def test_dataclasses_of_tensors_are_inputs_and_batches() -> None:
    torch.manual_seed(0)
    model = Reading().double()
    pipe = pd2bw_fx.split(model, arguments(2), cluster=2, costs="analytic")

    assert list(pipe.graph.inputs) == [
        "sample_graph_nodes",
        "sample_graph_edges_0",
        "sample_graph_edges_1",
        "sample_weights",
        "extra",
    ]
    batch = arguments(6)
    torch.testing.assert_close(pipe.run(batch)["loss"], model(*batch))

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    batches = [arguments(8) for _ in range(3)]
    expected = train_reference(model, batches, optimizer=sgd, microbatches_per_update=4)
    found = pipe.train_local(batches, optimizer=sgd, microbatches_per_update=4)
    assert found.losses == pytest.approx(expected.losses, rel=1e-12)


class Store:
    def __init__(self, x: Tensor) -> None:
        self.parts = {"x": [x]}


def test_arrays_that_would_be_constants_are_refused() -> None:
    sample, extra = arguments(4)

    with pytest.raises(InputError, match=r"input extra is a ndarray, .*expected a tensor: torch\.as_tensor"):
        pd2bw_fx.split(Reading(), (sample, extra.numpy()), cluster=2, costs="analytic")


@pytest.mark.parametrize(
    ("sample", "place"),
    [
        (SimpleNamespace(graph=torch.randn(4, 8)), r"\(sample\.graph\)"),
        (Store(torch.randn(4, 8)), r"\(sample\.parts\['x'\]\[0\]\)"),
    ],
)
def test_tensors_that_would_be_constants_are_refused(sample: Any, place: str) -> None:
    with pytest.raises(
        InputError, match=rf"input sample is a {type(sample).__name__} with a tensor.*{place}"
    ):
        pd2bw_fx.split(Reading(), (sample, torch.randn(4)), cluster=2, costs="analytic")
