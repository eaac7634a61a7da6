"""What milder rules propose is as fast by the real ones: who hands a tensor on, and no stage is empty."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from pd2bw_fx.cluster import Cluster
from pd2bw_fx.costs import Kept, MemoryModel
from pd2bw_fx.passes.partition.bounds.relaxed_bound import RelaxedBound
from pd2bw_fx.passes.partition.choices import Deadline
from pd2bw_fx.passes.partition.instance import Instance
from pd2bw_fx.passes.partition.reader import Reader
from pd2bw_fx.passes.partition.route import loads_of
from pd2bw_fx.passes.solver import Status
from pd2bw_fx.problem import Block, Problem, Value

NUM_LAYERS = 12


def decoder(num_stages: int, layer_s: Sequence[float], row_bytes: int, read_bytes: int) -> Instance:
    """A row in which every layer reads what the first block makes too, on links of a byte a second.

    read   o--+--+--+--+
           |  |  |  |  |
    row    o->o->o->o->o
    """
    seconds = [6.0, *layer_s]
    blocks = tuple(
        Block(f"b{at}", (f"o{at}",), (time_s,) * num_stages, (0.0,) * num_stages)
        for at, time_s in enumerate(seconds)
    )
    names = [block.name for block in blocks]
    row = [Value(f"row{at}", names[at], (names[at + 1],), row_bytes) for at in range(len(layer_s))]
    read = Value("read", names[0], tuple(names[1:]), read_bytes)
    rates = ((1.0,) * num_stages,) * num_stages
    cluster = Cluster(Cluster.uniform(num_stages).devices, rates, ((0.0,) * num_stages,) * num_stages)
    reader = Reader(
        Problem(blocks, (*row, read), {}),
        cluster,
        memory_model=MemoryModel(),
        kept=[Kept(1, 1)] * num_stages,
        overlap=False,
        recompute=False,
    )
    return replace(reader.instance(range(num_stages)), hands_on=True)


def fastest_s(instance: Instance) -> float:
    """Returns the least bottleneck of all ways to cut the row, with the routes that they are given."""
    nodes = np.arange(instance.num_nodes)
    ways = itertools.combinations(nodes[1:], instance.num_stages - 1)
    return min(loads_of(instance, np.searchsorted(cuts, nodes, side="right")).bottleneck_s for cuts in ways)


def proposed_s(instance: Instance) -> tuple[float, float]:
    """The fastest that milder rules propose, and what they refute, where the target is halved in between."""
    rules = RelaxedBound.of(instance, Deadline(30.0))
    assert rules is not None
    low_s, high_s, best_s = 0.0, 100.0, np.inf
    while high_s - low_s > 1e-3:
        target_s = (low_s + high_s) / 2
        status, _, stage_of = rules(target_s, Deadline(30.0))
        if stage_of is not None:
            assert sorted(set(stage_of.tolist())) == list(range(instance.num_stages))
            best_s = min(best_s, loads_of(instance, stage_of).bottleneck_s)
        if status is Status.FEASIBLE:
            assert best_s <= target_s
        if status is Status.INFEASIBLE:
            low_s = target_s
        else:
            high_s = target_s
    return best_s, low_s


@pytest.mark.parametrize("seed", range(12))
def test_a_tensor_that_all_layers_read_is_handed_on_by_stages_that_have_the_time(seed: int) -> None:
    draw = random.Random(seed)
    layer_s = [draw.uniform(1.0, 3.0) for _ in range(NUM_LAYERS)]
    instance = decoder(draw.choice([4, 5, 6]), layer_s, row_bytes=draw.choice([0, 1]), read_bytes=1)

    best_s, refuted_s = proposed_s(instance)

    # Room is counted in seconds, and a send is whole: one of them more than the best at most.
    assert fastest_s(instance) <= best_s * (1 + 1e-9)
    assert best_s <= fastest_s(instance) + 1.0
    assert refuted_s <= fastest_s(instance)


def test_as_many_stages_are_proposed_as_there_are_devices_where_fewer_are_as_fast() -> None:
    layer_s, row_bytes = [3.0] * 6, 6
    instance = decoder(3, layer_s, row_bytes, read_bytes=0)

    best_s, _ = proposed_s(instance)

    assert best_s == fastest_s(instance) == 18.0
    assert fastest_s(decoder(2, layer_s, row_bytes, read_bytes=0)) == 18.0
