"""Less to send where the slowest stage is as fast: what moves, what may not, and that nothing is left."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pd2bw_fx.cluster import Cluster
from pd2bw_fx.constraints import Constraints
from pd2bw_fx.passes.partition import partition, plan_problem
from pd2bw_fx.passes.partition.choices import Deadline
from pd2bw_fx.passes.partition.instance import Instance, Integers, Loads, evaluate, respects_edges
from pd2bw_fx.passes.partition.thin_cuts import with_thin_cuts
from pd2bw_fx.plan import Plan
from pd2bw_fx.problem import Block, ParameterSize, Problem, Value
from tests.test_frontiers import drawn_instance


def stages_s(loads: Loads) -> Any:
    return loads.work_s + loads.again_s + loads.send_s + loads.receive_s


def assignments(instance: Instance) -> list[Integers]:
    """Returns the assignments that fit and have no empty stage."""
    stages = itertools.product(range(instance.num_stages), repeat=instance.num_nodes)
    found = [np.array(each) for each in stages if len(set(each)) == instance.num_stages]
    return [each for each in found if respects_edges(instance, each) and evaluate(instance, each).fits]


@pytest.mark.parametrize("seed", range(40))
def test_no_stage_is_slower_than_the_slowest_was_and_no_single_node_is_left_to_move(seed: int) -> None:
    instance = replace(drawn_instance(seed, with_the_rest=True), may_be_empty=False)
    for stage_of in assignments(instance)[::29]:
        before = evaluate(instance, stage_of)
        found = with_thin_cuts(instance, stage_of, Deadline(60.0))
        after = evaluate(instance, found)

        assert respects_edges(instance, found)
        assert after.fits
        assert after.bottleneck_s <= before.bottleneck_s
        assert stages_s(after).sum() <= stages_s(before).sum()
        assert (stages_s(after) ** 2).sum() <= (stages_s(before) ** 2).sum()
        for node, stage in itertools.product(range(instance.num_nodes), range(instance.num_stages)):
            moved = found.copy()
            moved[node] = stage
            if not respects_edges(instance, moved) or not beside(instance, found, node, stage):
                continue
            other = evaluate(instance, moved)
            recomputes_alike = other.recompute == after.recompute
            if other.fits and other.bottleneck_s <= after.bottleneck_s and recomputes_alike:
                less = stages_s(other).sum() < stages_s(after).sum() - 1e-6
                assert not less or (stages_s(other) ** 2).sum() >= (stages_s(after) ** 2).sum() - 1e-6


def beside(instance: Instance, stage_of: Integers, node: int, stage: int) -> bool:
    """Returns whether a neighbour of the node is in this stage."""
    return any(stage_of[u + v - node] == stage for u, v in instance.edges if node in (u, v))


def row(times: tuple[float, ...], sizes: tuple[int, ...]) -> Problem:
    """Blocks one after another, and the bytes of the value that goes from each to the next."""
    blocks = tuple(
        Block(f"b{at}", (f"op{at}",), (time / 3,) * 3, (time * 2 / 3,) * 3, (f"w{at}",), 0)
        for at, time in enumerate(times)
    )
    values = tuple(Value(f"v{at}", f"b{at}", (f"b{at + 1}",), size, size) for at, size in enumerate(sizes))
    return Problem(blocks, values, {f"w{at}": ParameterSize(4) for at in range(len(times))})


CLUSTER = Cluster.uniform(3, bytes_per_s=1e3, latency_s=0.0, memory_bytes=10**6)
WIDENS = row((9.0, 2.0, 1.0, 1.0, 2.0), (10, 2000, 10, 10))  # 9 s, and 6 s for two stages


def stages_of(plan: Plan) -> list[tuple[str, ...]]:
    return [stage.operators for stage in plan.stages]


def test_a_wide_value_does_not_cross_where_a_thin_one_can(monkeypatch: pytest.MonkeyPatch) -> None:
    thin = partition(WIDENS, CLUSTER)
    monkeypatch.setattr(plan_problem, "with_thin_cuts", lambda _, stage_of, *__: stage_of)
    wide = partition(WIDENS, CLUSTER)

    assert thin.bottleneck_s == wide.bottleneck_s == pytest.approx(9.02)
    assert stages_of(wide) == [("op0",), ("op1",), ("op2", "op3", "op4")]
    assert stages_of(thin) == [("op0",), ("op1", "op2"), ("op3", "op4")]


def test_a_stage_is_not_given_much_to_do_for_little_to_send() -> None:
    """To send 10 bytes in place of 20, the second stage would have 8 s to work, and the last one half a
    second."""
    plan = partition(row((9.0, 4.0, 4.0, 0.5), (10, 20, 10)), CLUSTER)
    assert stages_of(plan) == [("op0",), ("op1",), ("op2", "op3")]


def test_what_is_pinned_stays() -> None:
    plan = partition(WIDENS, CLUSTER, constraints=Constraints(stage_of={"op1": 1, "op2": 2}))
    assert stages_of(plan) == [("op0",), ("op1",), ("op2", "op3", "op4")]


def test_after_the_deadline_all_stays_as_it_is() -> None:
    instance = replace(drawn_instance(0, with_the_rest=True), may_be_empty=False)
    stage_of = assignments(instance)[0]
    assert (with_thin_cuts(instance, stage_of, Deadline(0.0)) == stage_of).all()
