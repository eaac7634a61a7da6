"""The fastest setting of all, against every setting priced by hand."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from pd2bw_fx.cluster import Cluster
from pd2bw_fx.constraints import Constraints
from pd2bw_fx.costs import MemoryModel
from pd2bw_fx.device import Device
from pd2bw_fx.errors import InfeasibleError, InputError
from pd2bw_fx.passes.partition import sweep
from pd2bw_fx.problem import Block, ParameterSize, Problem, Value

WORK_S = (3.0, 1.0, 4.0, 1.0, 5.0, 2.0)


def row(microbatch_size: int, *, num_devices: int = 4, weight_bytes: int = 60) -> Problem:
    """Blocks in a row whose forward has a fixed part and one that grows with the microbatch."""
    blocks = tuple(
        Block(
            f"b{at}",
            (f"b{at}",),
            (0.5 + work_s * microbatch_size,) * num_devices,
            (work_s * microbatch_size,) * num_devices,
            (f"w{at}",),
            100 * microbatch_size,
        )
        for at, work_s in enumerate(WORK_S)
    )
    moved = 10 * microbatch_size
    values = tuple(Value(f"v{at}", f"b{at}", (f"b{at + 1}",), moved, moved) for at in range(len(WORK_S) - 1))
    return Problem(blocks, values, {f"w{at}": ParameterSize(weight_bytes) for at in range(len(WORK_S))})


def by_hand(
    batch_size: int,
    sizes: Any,
    stages: Any,
    replicas: Any,
    memory_bytes: int,
    *,
    drains: bool = False,
    latency_s: float = 0.0,
) -> float:
    """The least time of an update over all settings and all ways to cut the row."""
    best = float("inf")
    for size, d, w in itertools.product(sizes, stages, replicas):
        m, rest = divmod(batch_size, size * w)
        if rest or (m < d and not drains) or m < 1 or d * w > 4:
            continue
        for cuts in itertools.combinations(range(1, len(WORK_S)), d - 1):
            edges = [0, *cuts, len(WORK_S)]
            loads, moved_s = [], 2 * (latency_s + 10 * size / 100.0)
            for stage, (start, end) in enumerate(itertools.pairwise(edges)):
                links = (start > 0) + (end < len(WORK_S))
                work_s = sum(0.5 + 2 * work_s * size for work_s in WORK_S[start:end])
                gradients_s = 2 * (w - 1) / w * 60 * (end - start) / 100.0 / m
                held = (end - start) * 100 * size + links * 10 * size
                worked_on, stepped = (d - stage) * held, (d - stage - 1) * held + 2 * 60
                fits = 5 * 60 * (end - start) + max(worked_on, stepped) <= memory_bytes
                loads.append(work_s + gradients_s + links * moved_s if fits else float("inf"))
            first_s = sum(loads) - (d - 1) * moved_s  # each transfer keeps two stages busy, at the same time
            added_up_s = 2 * (w - 1) * latency_s  # all gradients are in one bucket
            took_s = first_s + (m - 1) * max(loads) if drains else m * max(loads)
            best = min(best, took_s + added_up_s)
    return best


@pytest.mark.parametrize(
    ("memory_bytes", "latency_s"), [(10**6, 0.0), (10**6, 2.0), (2500, 0.5), (1500, 0.0)]
)
@pytest.mark.parametrize("batch_size", [8, 12, 24])
def test_best_setting_is_the_best_of_all_settings_priced_by_hand(
    batch_size: int, memory_bytes: int, latency_s: float
) -> None:
    cluster = Cluster.uniform(4, memory_bytes=memory_bytes, bytes_per_s=100.0, latency_s=latency_s)
    sizes, stages, replicas = (1, 2, 4), (1, 2, 3, 4), (1, 2, 4)
    expected = by_hand(batch_size, sizes, stages, replicas, memory_bytes, latency_s=latency_s)
    problems = {size: row(size) for size in sizes}

    def swept() -> Any:
        return sweep(problems, cluster, batch_size=batch_size, num_replicas=replicas, max_gap=1e-6)

    if expected == float("inf"):
        with pytest.raises(InfeasibleError, match="no setting fits"):
            swept()
        return
    found = swept()
    assert found.best.update_s == pytest.approx(expected, rel=2e-6)
    assert found.bound_s <= expected * (1 + 1e-9)
    best = found.best
    assert best.microbatch_size * best.microbatches_per_update * best.num_replicas == batch_size
    assert best.microbatches_per_update >= best.num_stages


@pytest.mark.parametrize("method", ["1f1b", "gpipe"])
@pytest.mark.parametrize("batch_size", [4, 8, 24])
def test_pipelines_that_drain_take_all_stages_once_more_an_update(batch_size: int, method: str) -> None:
    cluster = Cluster.uniform(4, memory_bytes=10**6, bytes_per_s=100.0, latency_s=0.0)
    sizes, stages, replicas = (1, 2, 4), (1, 2, 3, 4), (1, 2)
    expected = by_hand(batch_size, sizes, stages, replicas, 10**6, drains=True)

    found = sweep(
        {size: row(size) for size in sizes},
        cluster,
        batch_size=batch_size,
        num_replicas=replicas,
        method=method,
        max_gap=0.0,
    )

    # Of cuts with the same slowest stage it has the one that the program came upon.
    assert expected <= found.best.update_s * (1 + 1e-9)
    assert found.best.update_s <= 1.1 * expected
    assert found.bound_s <= expected * (1 + 1e-9)


def test_fewer_stages_than_devices_where_the_link_is_slow() -> None:
    cluster = Cluster.uniform(4, memory_bytes=10**6, bytes_per_s=0.5, latency_s=0.0)
    found = sweep({1: row(1)}, cluster, batch_size=8)
    assert found.best.num_stages == 1


def test_copies_on_unlike_devices_are_refused() -> None:
    devices = (Device("a", memory_bytes=10**6), Device("b", memory_bytes=10**5))
    cluster = Cluster(devices, ((0, 1e3), (1e3, 0)), ((0, 0), (0, 0)))
    problem = row(1, num_devices=2)
    with pytest.raises(InputError, match="need devices and links that are alike"):
        sweep({1: problem}, cluster, batch_size=8, num_replicas=(1, 2), memory_model=MemoryModel())


@pytest.mark.parametrize("wishes", [{"memory_bytes": {3: 100}}, {"device_of": {"b0": 3}}])
def test_copies_are_refused_where_wishes_make_devices_unlike(wishes: dict[str, Any]) -> None:
    cluster = Cluster.uniform(4, memory_bytes=10**6, bytes_per_s=100.0, latency_s=0.0)
    with pytest.raises(InputError, match="device_of and memory_bytes make devices unlike"):
        sweep({1: row(1)}, cluster, batch_size=8, num_replicas=(1, 2), constraints=Constraints(**wishes))


def test_copies_may_be_capped_all_alike() -> None:
    cluster = Cluster.uniform(4, memory_bytes=10**6, bytes_per_s=100.0, latency_s=0.0)
    capped = Constraints(memory_bytes=dict.fromkeys(range(4), 2500))
    found = sweep({1: row(1)}, cluster, batch_size=8, num_replicas=(1, 2), constraints=capped)
    assert found.best.update_s == pytest.approx(by_hand(8, (1,), (1, 2, 3, 4), (1, 2), 2500), rel=1e-3)


def test_batch_that_no_microbatch_divides_is_refused() -> None:
    cluster = Cluster.uniform(2, memory_bytes=10**6, bytes_per_s=100.0, latency_s=0.0)
    with pytest.raises(InputError, match=r"no microbatch size of \[2\] divides a batch of 7"):
        sweep({2: row(2, num_devices=2)}, cluster, batch_size=7)


@pytest.mark.parametrize(
    ("numbers", "message"), [((), "num_stages is empty"), ("auto", "num_stages is 'auto'; a sequence")]
)
def test_numbers_of_stages_that_are_none_are_refused(numbers: Any, message: str) -> None:
    cluster = Cluster.uniform(2, memory_bytes=10**6, bytes_per_s=100.0, latency_s=0.0)
    with pytest.raises(InputError, match=message):
        sweep({1: row(1, num_devices=2)}, cluster, batch_size=8, num_stages=numbers)
