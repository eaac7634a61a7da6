"""How far stages get within their memory: what is refuted does not exist, and the search ends with it."""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pd2bw_fx.cluster import Cluster
from pd2bw_fx.errors import InfeasibleError, SolverError
from pd2bw_fx.passes.partition import NothingFaster, partition
from pd2bw_fx.passes.partition.bounds.downsets import OutOfTime
from pd2bw_fx.passes.partition.bounds.frontiers import Frontiers
from pd2bw_fx.passes.partition.choices import Deadline
from pd2bw_fx.passes.partition.instance import Instance, Net, evaluate, respects_edges
from pd2bw_fx.passes.partition.search.search_state import SearchState
from pd2bw_fx.passes.solver import Status
from pd2bw_fx.problem import Block, ParameterSize, Problem, Value


def drawn_instance(seed: int, *, with_the_rest: bool) -> Instance:
    """Returns an instance of six nodes on three stages; `with_the_rest` it has what frontiers leave out."""
    draw = random.Random(seed)
    n, k = 6, 3

    def amounts(most: int, *shape: int) -> Any:
        return np.array([draw.randint(0, most) for _ in range(int(np.prod(shape)))], float).reshape(shape)

    edges = tuple((u, v) for u, v in itertools.combinations(range(n), 2) if draw.random() < 0.4)
    nets = tuple(Net(u, (v,), draw.randint(0, 3)) for u, v in edges) if with_the_rest else ()
    gradients, again_s = amounts(5, n), amounts(4, k, n)
    return Instance(
        num_stages=k,
        edges=edges,
        work_s=again_s + amounts(8, k, n),
        again_s=again_s,
        nets=nets,
        cost_s=np.repeat(amounts(2, len(nets), 1, 1), k * k, axis=1).reshape(-1, k, k),
        per_destination=True,
        overlap=False,
        recompute=draw.choice([False, True, "auto"]),
        may_be_empty=True,
        limit_bytes=amounts(60, k) + 10,
        in_flight=np.array([3, 2, 1]),
        static_bytes=np.tile(gradients + amounts(10, n), (k, 1)),
        gradient_bytes=gradients,
        gradients_wait=np.array([draw.random() < 0.5] * k),
        updates_each=np.array([draw.random() < 0.5] * k),
        flushes=np.zeros(k, bool),
        saved_bytes=amounts(12, n),
        workspace_bytes=amounts(6, n) if with_the_rest else np.zeros(n),
        stepped_bytes=np.zeros(n),
        forbidden=amounts(3, k, n) == 3 if draw.random() < 0.3 else None,
    )


def fastest(instance: Instance) -> float:
    """Returns the least bottleneck of all assignments that fit; infinite where none does."""
    loads = (
        evaluate(instance, np.array(stage_of))
        for stage_of in itertools.product(range(instance.num_stages), repeat=instance.num_nodes)
        if respects_edges(instance, stage_of)
    )
    return min((each.bottleneck_s for each in loads if each.fits), default=np.inf)


def chain(instance: Instance, target_s: float) -> Any:
    frontiers = Frontiers.of(instance.num_nodes, instance.edges, Deadline(30.0))
    assert frontiers is not None
    return frontiers.chain(instance, target_s, Deadline(30.0))


@pytest.mark.parametrize("seed", range(40))
def test_nothing_is_refuted_that_exists(seed: int) -> None:
    instance = drawn_instance(seed, with_the_rest=True)
    best_s = fastest(instance)
    if np.isfinite(best_s):
        assert chain(instance, best_s) is not None
        assert chain(instance, np.inf) is not None


@pytest.mark.parametrize("seed", range(40))
def test_of_work_and_memory_alone_all_is_refuted_that_does_not_exist(seed: int) -> None:
    instance = replace(
        drawn_instance(seed, with_the_rest=False),
        gradients_wait=np.zeros(3, bool),
        updates_each=np.zeros(3, bool),
    )
    best_s = fastest(instance)
    if not np.isfinite(best_s):
        assert chain(instance, np.inf) is None
        return
    assert chain(instance, best_s * (1 - 1e-6)) is None
    found = evaluate(instance, chain(instance, best_s))
    assert found.fits
    assert found.bottleneck_s == pytest.approx(best_s)


def test_a_graph_of_too_many_down_sets_is_left_to_others() -> None:
    assert Frontiers.of(20, (), Deadline(30.0), max_sets=1000) is None
    instance = drawn_instance(0, with_the_rest=False)
    frontiers = Frontiers.of(instance.num_nodes, instance.edges, Deadline(30.0))
    assert frontiers is not None
    with pytest.raises(OutOfTime):
        frontiers.chain(instance, np.inf, Deadline(0.0))


def row(num_blocks: int) -> Problem:
    """A row of blocks with 10 bytes of weights each, of which every fourth saves 40 bytes and others 2."""
    names = [f"b{at}" for at in range(num_blocks)]
    return Problem(
        tuple(
            Block(name, (name,), (1.0,) * 8, (2.0,) * 8, (f"w{at}",), 2 if at % 4 else 40, 0)
            for at, name in enumerate(names)
        ),
        tuple(Value(f"v{at}", names[at], (names[at + 1],), 1, 1) for at in range(num_blocks - 1)),
        {f"w{at}": ParameterSize(10, 10) for at in range(num_blocks)},
    )


def test_thousands_of_blocks_that_do_not_fit_are_told_so_in_time() -> None:
    cluster = Cluster.uniform(8, memory_bytes=12_500)

    with pytest.raises(InfeasibleError, match="no assignment fits"):
        partition(row(1500), cluster, num_stages=8, time_limit_s=20)


def test_a_plan_that_memory_holds_back_is_proven_for_thousands_of_blocks() -> None:
    problem = row(2400)
    cluster = Cluster.uniform(8, memory_bytes=33_000)

    plan = partition(problem, cluster, num_stages=8, time_limit_s=20, max_gap=0.01)

    assert plan.gap <= 0.01
    assert max(stage.load_s for stage in plan.stages) > 1.1 * 3.0 * 2400 / 8  # memory binds


def test_where_the_time_is_too_short_the_nearest_and_what_would_be_enough_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Neither frontiers nor programs tell that nothing fits, however fast the machine is.
    monkeypatch.setattr(Frontiers, "of", lambda *_, **__: None)
    ask = SearchState._ask

    def unsettled(state: SearchState, choice: int, target_s: float) -> tuple[Status, Any]:
        status, stage_of = ask(state, choice, target_s)
        return Status.UNKNOWN if status is Status.INFEASIBLE else status, stage_of

    monkeypatch.setattr(SearchState, "_ask", unsettled)

    with pytest.raises(SolverError, match="no time to find a plan, or that there is none") as caught:
        partition(row(1500), Cluster.uniform(8, memory_bytes=18_500), num_stages=8, time_limit_s=6)

    assert re.search(r"the nearest that was found needs .* on cpu:\d, which has 18.1 KiB", str(caught.value))
    assert 'recompute="auto"' in str(caught.value)


def test_only_a_faster_plan_is_looked_for_where_one_is_known() -> None:
    problem, cluster = row(600), Cluster.uniform(8, memory_bytes=8_500)
    plan = partition(problem, cluster, num_stages=8, max_gap=0.01)

    with pytest.raises(NothingFaster) as caught:
        partition(problem, cluster, num_stages=8, max_gap=0.01, faster_than_s=0.9 * plan.bottleneck_s)
    assert caught.value.bound_s == pytest.approx(0.9 * plan.bottleneck_s, rel=0.011)
    faster = partition(
        problem, cluster, num_stages=8, max_gap=0.01, faster_than_s=1.2 * plan.bottleneck_s, time_limit_s=20
    )
    assert faster.bottleneck_s < 1.2 * plan.bottleneck_s
