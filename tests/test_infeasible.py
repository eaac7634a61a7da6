"""What is said where nothing fits, held against plans with other memory: of alike devices as of others."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import re
from typing import Any

import numpy as np
import pytest

from pd2bw_fx.cluster import Cluster
from pd2bw_fx.device import Device
from pd2bw_fx.errors import InfeasibleError
from pd2bw_fx.passes.partition import partition, plan_problem
from pd2bw_fx.passes.partition.bounds.frontiers import Frontiers
from pd2bw_fx.passes.partition.choices import Choices, Deadline
from pd2bw_fx.passes.partition.infeasibility import shortfall
from pd2bw_fx.passes.partition.instance import Instance, Integers, Net, SharedBytes, evaluate
from pd2bw_fx.passes.partition.search.search_state import SearchState
from pd2bw_fx.passes.solver import Status
from pd2bw_fx.problem import Block, ParameterSize, Problem, Value

pytestmark = pytest.mark.usefixtures("time_to_explain")


def chain(saved: tuple[int, ...], num_devices: int) -> Problem:
    blocks = tuple(
        Block(f"b{at}", (f"op{at}",), (1.0,) * num_devices, (2.0,) * num_devices, (f"w{at}",), num_bytes)
        for at, num_bytes in enumerate(saved)
    )
    values = tuple(Value(f"v{at}", f"b{at}", (f"b{at + 1}",), 10, 10) for at in range(len(saved) - 1))
    return Problem(blocks, values, {f"w{at}": ParameterSize(100) for at in range(len(saved))})


def with_memory(cluster: Cluster, **limits: float) -> Cluster:
    devices = tuple(
        dataclasses.replace(device, memory_bytes=int(limits.get(device.name, device.memory_bytes)))
        for device in cluster.devices
    )
    return dataclasses.replace(cluster, devices=devices)


def devices_of(*limits: int) -> Cluster:
    like = Cluster.uniform(len(limits), bytes_per_s=1e3, latency_s=0.0)
    devices = tuple(Device(f"d{at}", memory_bytes=limit) for at, limit in enumerate(limits))
    return dataclasses.replace(like, devices=devices)


def fits(problem: Problem, cluster: Cluster) -> bool:
    try:
        partition(problem, cluster)
    except InfeasibleError:
        return False
    return True


# Alike devices, for which one order is as good as another as long as none has other memory; and unlike ones
# that stand in more orders than have a program each.
@pytest.mark.parametrize(
    ("saved", "limits"),
    [
        ((100, 400, 900, 900, 900), (1700, 1700)),
        ((900, 400, 100), (2500, 2500, 800)),
        ((200, 100, 700, 200), (500, 3500, 800, 1700)),
    ],
)
def test_reasons_and_what_would_do_are_right_for_every_device(
    saved: tuple[int, ...], limits: tuple[int, ...]
) -> None:
    problem, cluster = chain(saved, len(limits)), devices_of(*limits)
    with pytest.raises(InfeasibleError) as caught:
        partition(problem, cluster)
    message = str(caught.value)
    limit = {device.name: device.memory_bytes for device in cluster.devices}
    reasons = re.findall(r"(d\d) \(has", message.split("because of")[1])
    others = {name: 10**12 for name in limit if name not in reasons}
    assert not fits(problem, with_memory(cluster, **others))
    assert all(fits(problem, with_memory(cluster, **(others | {name: 10**12}))) for name in reasons)
    more = re.findall(r"\((\d+) bytes\) more on (d\d) \(", message)
    assert more
    for num_bytes, name in more:
        assert fits(problem, with_memory(cluster, **{name: limit[name] + int(num_bytes)}))
        assert not fits(problem, with_memory(cluster, **{name: limit[name] + 0.97 * int(num_bytes)}))
    if "without any of these there is a plan" in message:
        assert all(fits(problem, with_memory(cluster, **{name: 10**12})) for name in reasons)
    assert ("whatever the other limits are" in message) == (len(reasons) < len(limit))
    share = float(re.findall(r"All fits with ([\d.]+) times", message)[0])
    assert fits(problem, with_memory(cluster, **{name: share * num for name, num in limit.items()}))
    assert not fits(
        problem, with_memory(cluster, **{name: 0.97 * share * num for name, num in limit.items()})
    )


def test_devices_of_equal_memory_are_asked_once_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """No order of unlike devices is asked again what another one with the same memory has shown."""
    problem = chain((100, 300, 200, 300) * 3, 5)
    speeds = (1.0, 1.1, 1.2, 1.3, 1.4)
    blocks = tuple(dataclasses.replace(block, forward_s=speeds) for block in problem.blocks)
    asked: list[float] = []
    ask, chain_within = SearchState._ask, Frontiers.chain

    def counted(state: SearchState, choice: int, target_s: float) -> tuple[Status, Integers | None]:
        asked.append(target_s)
        return ask(state, choice, target_s)

    def counted_too(frontiers: Frontiers, instance: Instance, target_s: float, deadline: Any) -> Any:
        asked.append(target_s)
        return chain_within(frontiers, instance, target_s, deadline)

    monkeypatch.setattr(SearchState, "_ask", counted)
    monkeypatch.setattr(Frontiers, "chain", counted_too)
    monkeypatch.setattr(plan_problem, "infeasible_error", lambda *_, **__: InfeasibleError("as said"))
    with pytest.raises(InfeasibleError):
        partition(dataclasses.replace(problem, blocks=blocks), devices_of(*(1700,) * 5))

    assert len(asked) == 1


@pytest.mark.parametrize("num_blocks", [8, 16])
def test_one_byte_short_of_fitting_is_infeasible(num_blocks: int) -> None:
    """A solver's tolerance is kilobytes of some gigabytes, and it found one assignment after another."""
    gigabyte = 10**9
    blocks = tuple(
        Block(f"b{at}", (f"o{at}",), (1.0,) * 2, (2.0,) * 2, (f"w{at}",)) for at in range(num_blocks)
    )
    sizes = {f"w{at}": ParameterSize(0, gigabyte) for at in range(num_blocks)}
    enough = num_blocks // 2 * gigabyte

    assert partition(Problem(blocks, (), sizes), Cluster.uniform(2, memory_bytes=enough))
    with pytest.raises(InfeasibleError, match=f"needs .* \\({enough} bytes\\)"):
        partition(Problem(blocks, (), sizes), Cluster.uniform(2, memory_bytes=enough - 1))


def test_of_many_devices_that_are_too_small_a_few_are_named() -> None:
    with pytest.raises(InfeasibleError) as caught:
        partition(chain((100,) * 12, 12), devices_of(*(1900,) * 12))

    reasons = str(caught.value).partition("It is impossible because of ")[2].partition("; without")[0]
    assert reasons.count("(has 1.86 KiB") == 6
    assert reasons.endswith("; 6 more devices")


def row_of(seed: int, *, with_the_rest: bool) -> Instance:
    """Returns seven nodes one after another on three stages with little memory. `with_the_rest` some of it is
    no sum over nodes: a parameter that the first and the last node share, and workspaces."""
    draw = random.Random(seed)
    n, k = 7, 3

    def amounts(most: int, *shape: int) -> Any:
        return np.array([draw.randint(0, most) for _ in range(math.prod(shape))], float).reshape(shape)

    edges = tuple(itertools.pairwise(range(n)))
    return Instance(
        num_stages=k,
        edges=edges,
        work_s=amounts(8, k, n),
        again_s=amounts(4, k, n),
        nets=tuple(Net(u, (v,), draw.randint(0, 3)) for u, v in edges),
        cost_s=np.ones((len(edges), k, k)),
        per_destination=True,
        overlap=draw.random() < 0.5,
        recompute=draw.choice([False, True]),
        may_be_empty=True,
        limit_bytes=amounts(10, k) + 5,
        in_flight=np.array([3, 2, 1]),
        static_bytes=np.tile(amounts(10, n), (k, 1)),
        gradient_bytes=np.zeros(n),
        gradients_wait=np.zeros(k, bool),
        updates_each=np.zeros(k, bool),
        flushes=np.zeros(k, bool),
        saved_bytes=amounts(12, n),
        workspace_bytes=amounts(20, n) if with_the_rest else np.zeros(n),
        stepped_bytes=np.zeros(n),
        shared=(SharedBytes(np.full(k, 25.0), 0.0, (0, n - 1)),) if with_the_rest else (),
    )


def least_share(row: Instance) -> float:
    stages = itertools.combinations_with_replacement(range(row.num_stages), row.num_nodes)
    needs = (evaluate(row, np.array(stage_of)).memory_bytes for stage_of in stages)
    return min(float((need / row.limit_bytes).max()) for need in needs)


@pytest.mark.parametrize("seed", range(20))
def test_a_row_is_cut_where_the_fullest_stage_is_least_full(seed: int) -> None:
    row = row_of(seed, with_the_rest=False)
    found = shortfall._evened(Choices(1, lambda _: row), None, Deadline(60.0))
    assert found is not None
    assert found.share == pytest.approx(least_share(row))
    assert not found.is_least  # it is not proven


def test_what_is_no_sum_over_nodes_is_counted_where_the_cut_before_had_it() -> None:
    shares = []
    for seed in range(40):
        row = row_of(seed, with_the_rest=True)
        found = shortfall._evened(Choices(1, lambda _, row=row: row), None, Deadline(60.0))
        assert found is not None
        shares.append(found.share / least_share(row))
    assert min(shares) >= 1.0
    assert np.mean(shares) < 1.05


def test_a_model_too_large_for_programs_is_cut_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks with two microbatches in flight, and four with one: three and three would need 3.32 KiB."""
    monkeypatch.setattr(shortfall, "takes_too_long", lambda *_: True)
    monkeypatch.setattr(shortfall, "_ORDERS_TIME_S", 0.0)
    problem = chain((300, 300, 300, 300, 300, 300), 2)
    with pytest.raises(InfeasibleError, match=r"All fits with 2\.14 times the memory"):
        partition(problem, devices_of(1500, 1500))
