"""What stages compute of the model's inputs: heavy work once, light work by each stage that reads it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pd2bw_fx
from pd2bw_fx.passes.coarsen import coarsen


class Neighbours(nn.Module):
    """Each point beside those that are nearest to it, which takes time and no weight."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(3, width)
        self.layers = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(3))

    def forward(self, points: Tensor) -> Tensor:
        nearest = torch.cdist(points, points).topk(4, largest=False).indices
        hidden = self.first(points)
        for layer in self.layers:
            places = nearest.reshape(points.shape[0], -1, 1).expand(-1, -1, hidden.shape[-1])
            around = hidden.gather(1, places).reshape(*hidden.shape[:2], 4, -1).mean(2)
            hidden = layer(torch.cat([hidden, around], -1)).relu()
        return hidden.square().mean()


@pytest.mark.parametrize(
    ("num_points", "stages_that_search", "sent"),
    [(384, 1, {1: 2 * 384 * 4 * 8, 2: 2 * 384 * 4 * 8}), (8, 2, {})],
)
def test_heavy_work_on_inputs_alone_is_done_once_and_what_is_light_by_each_stage(
    num_points: int, stages_that_search: int, sent: dict[int, int]
) -> None:
    pipe = pd2bw_fx.split(Neighbours(), torch.randn(2, num_points, 3), cluster=3, costs="analytic")

    searching = {
        name for name, o in pipe.graph.operators.items() if "topk" in o.target or "cdist" in o.target
    }
    placed = searching & pipe.plan.stage_of.keys()
    found = {t.target: t.bytes for t in pipe.plan.transfers if pipe.graph.operators[t.value].is_view}
    assert sum("topk" in stage.source for stage in pipe.stages) == stages_that_search
    assert placed == (searching if sent else set())
    assert found == sent  # the places that are found, not one of them for each width
    assert sum("expand(" in stage.source for stage in pipe.stages) == 2


class Masked(nn.Module):
    """A mask made of an input, that the backward of every layer keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

    def forward(self, x: Tensor, segments: Tensor) -> Tensor:
        mask = (segments[:, :, None] == segments[:, None, :]).to(x.dtype)
        for layer in self.layers:
            x = layer((x @ x.transpose(1, 2) * mask) @ x)
        return x.square().mean()


def kept_by(stage: Any, given: list[Tensor]) -> int:
    """Bytes that one forward of a stage keeps, weights and what it was sent left out."""
    own = {tensor.untyped_storage()._cdata for tensor in (*stage.module.parameters(), *given)}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        stage.module(*given)
    return sum(kept.values())


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_each_stage_counts_its_own_mask_among_what_it_keeps(num_stages: int) -> None:
    inputs = torch.randn(2, 64, 16), torch.randint(0, 4, (2, 64))
    pipe = pd2bw_fx.split(Masked(), inputs, cluster=num_stages, costs="analytic", check=False)
    values = dict(zip(pipe.graph.inputs, inputs, strict=True))

    for stage, planned in zip(pipe.stages, pipe.plan.stages, strict=True):
        given = [
            values[port.value] if port.source is None else torch.randn(2, 64, 16, requires_grad=True)
            for port in stage.program.inputs
        ]
        one = planned.memory.activation_bytes / planned.microbatches_in_flight

        assert one == pytest.approx(kept_by(stage, given), rel=0.15)  # without its mask .24 less


def test_what_each_stage_computes_of_inputs_takes_time_of_the_first_that_reads_it() -> None:
    inputs = torch.randn(2, 64, 16), torch.randint(0, 4, (2, 64))
    pipe = pd2bw_fx.split(Masked(), inputs, cluster=2, costs="analytic", check=False)
    graph, costs = pipe.graph, pipe.costs

    first, *others = coarsen(graph, costs, pipe.cluster).blocks

    mask = [costs.operators[name].forward_s for name, o in graph.operators.items() if o.is_replicable]
    assert sum(block.forward_s[0] for block in (first, *others)) == pytest.approx(costs.forward_s)
    assert len(mask) >= 4
