"""A value that several stages read is sent by whoever the links make cheapest."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping

import pytest

from pd2bw_fx.cluster import Cluster
from pd2bw_fx.passes.partition import partition
from pd2bw_fx.plan import Transfer
from pd2bw_fx.problem import Block, Problem, Value
from tests.readers import FAR, NEAR, readers_in_stages


def hops(transfers: tuple[Transfer, ...], value: str) -> set[tuple[int, int]]:
    return {(transfer.source, transfer.target) for transfer in transfers if transfer.value == value}


def test_a_slow_link_carries_a_value_once_and_equal_links_carry_it_straight() -> None:
    _, across = readers_in_stages(FAR)
    _, alike = readers_in_stages(NEAR)

    # stage 0 ===> 1 -> 2, 1 -> 3                 stage 0 -> 1, 0 -> 2, 0 -> 3
    assert hops(across.plan.transfers, "linear") == {(0, 1), (1, 2), (1, 3)}
    assert hops(alike.plan.transfers, "linear") == {(0, 1), (0, 2), (0, 3)}
    assert across.plan.stages[0].device == 0
    assert "encoded: float64 (batch, 16), handed on to stage 2 and to stage 3" in across.stages[1].source
    assert "handed on" not in "".join(stage.source for stage in alike.stages)


def test_stages_that_hand_values_on_compute_what_the_model_does() -> None:
    _, pipe = readers_in_stages(FAR, check=False)

    found = pipe.verify()

    assert found.exact, found


def test_a_plan_that_hands_on_adds_up_and_is_priced_the_same_again() -> None:
    plan = readers_in_stages(FAR, check=False)[1].plan

    again = readers_in_stages(FAR, check=False, plan=type(plan).loads(plan.dumps()))[1].plan

    for stage in plan.stages:
        own = [t.seconds for t in plan.transfers if stage.stage in (t.source, t.target)]
        assert stage.send_s + stage.receive_s == pytest.approx(sum(own), rel=1e-9)
    assert plan.bottleneck_s == pytest.approx(max(stage.load_s for stage in plan.stages), rel=1e-9)
    assert plan.bound_s <= plan.bottleneck_s
    assert again.transfers == plan.transfers
    assert again.bottleneck_s == plan.bottleneck_s


def test_no_route_takes_the_links_longer_than_sending_straight_does_or_slows_a_plan_down() -> None:
    draw, handed_on = random.Random(0), 0
    for _ in range(30):
        k = draw.choice([3, 4])
        rates = tuple(tuple(draw.choice([1.0, 2.0, 8.0, 40.0]) for _ in range(k)) for _ in range(k))
        cluster = Cluster(Cluster.uniform(k).devices, rates, ((0.0,) * k,) * k)
        blocks = tuple(Block(f"b{s}", (f"o{s}",), (0.0,) * k, (0.0,) * k) for s in range(k))
        value = Value("v", "b0", tuple(f"b{s}" for s in range(1, k)), 40)
        in_order = [Value(f"w{s}", f"b{s}", (f"b{s + 1}",), 0) for s in range(k - 1)]

        plan = partition(Problem(blocks, (value, *in_order), {}), cluster, num_stages=k)

        at = [stage.device for stage in plan.stages]
        seconds = {(s, t): 40 / rates[at[s]][at[t]] for t in range(k) for s in range(t)}
        straight, taken = [(0, t) for t in range(1, k)], hops(plan.transfers, "v")
        handed_on += any(source != 0 for source, _ in taken)
        assert {target for _, target in taken} == set(range(1, k))
        assert sum(seconds[hop] for hop in taken) <= sum(seconds[hop] for hop in straight) * (1 + 1e-12)
        assert plan.bottleneck_s <= _slowest(straight, seconds, k) * (1 + 1e-12)
        assert plan.bottleneck_s == pytest.approx(_slowest(taken, seconds, k), rel=1e-9)
    assert handed_on > 5


def _slowest(way: Iterable[tuple[int, int]], seconds: Mapping[tuple[int, int], float], k: int) -> float:
    return max(sum(seconds[hop] for hop in way if stage in hop) for stage in range(k))
