"""A value that several stages read is sent by whoever the links make cheapest."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from pd2bw_fx.cluster import Cluster
from pd2bw_fx.constraints import Constraints
from pd2bw_fx.device import Device
from pd2bw_fx.passes.partition import partition
from pd2bw_fx.passes.partition.bounds import relaxed_bound
from pd2bw_fx.passes.partition.choices import Deadline
from pd2bw_fx.passes.partition.search import search, search_with_routes
from pd2bw_fx.passes.solver import Status
from pd2bw_fx.plan import Progress, Transfer
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


def test_of_many_readers_some_are_sent_a_value_by_another_one_on_equal_links_too() -> None:
    _, pipe = readers_in_stages(FAR, near_bytes_per_s=FAR, num_layers=5, check=False)

    # Stage 0 would send to four or five stages, and is no slower now than those that send and receive twice.
    taken = hops(pipe.plan.transfers, "linear")
    assert {source for source, _ in taken} == {0, 1}
    assert [source for source, _ in taken].count(0) == 3
    assert "handed on" in "".join(stage.source for stage in pipe.stages)
    pipe.verify(tolerance=1e-15)  # a gradient of six parts is added up in another order than the model's


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


@pytest.mark.parametrize("alike", [False, True])
def test_plans_are_as_fast_as_any_assignment_with_any_routes(alike: bool) -> None:
    draw, num_gained, num_best = random.Random(1), 0, 0
    for _ in range(15):
        problem, cluster = _drawn(draw, num_blocks=5, alike=alike)

        plan = partition(problem, cluster, num_stages=3)

        straight_s, best_s = _exhaustive(problem, cluster)
        assert plan.gap <= 1.01e-4
        assert best_s * (1 - 1e-9) <= plan.bottleneck_s <= straight_s * (1 + 1.01e-4)
        num_gained += plan.bottleneck_s < straight_s * 0.99
        num_best += plan.bottleneck_s <= best_s * (1 + 1.01e-4)
    assert num_gained > 2
    assert num_best == 15


def test_a_value_is_handed_on_by_slow_links_where_that_relieves_its_maker() -> None:
    # One way x takes 1 ms from a to b, 5 ms from b to c and 3 ms from a to c, and its gradient as long.
    times = {"x": 20e-3, "y": 0.1e-3, "z": 0.1e-3}
    blocks = tuple(Block(name, (name,), (seconds,) * 3, (0.0,) * 3) for name, seconds in times.items())
    values = (Value("vx", "x", ("z",), 1000, 1000), Value("vy", "y", ("z",), 1000, 0))
    latency = ((0.0, 1e-3, 3e-3), (1e-3, 0.0, 5e-3), (3e-3, 5e-3, 0.0))
    cluster = Cluster(tuple(Device(name, 10**9) for name in "abc"), ((1e12,) * 3,) * 3, latency)

    pins = Constraints(device_of={"x": "a", "y": "b", "z": "c"})
    plan = partition(Problem(blocks, values, {}), cluster, constraints=pins)

    assert hops(plan.transfers, "vx") == {(0, 1), (1, 2)}
    assert plan.bottleneck_s == pytest.approx(22e-3, rel=1e-6)


def test_equal_links_share_out_what_the_slowest_stage_sends() -> None:
    blocks = tuple(Block(f"b{s}", (f"o{s}",), (work,) * 4, (0.0,) * 4) for s, work in enumerate((9, 1, 1, 1)))
    value = Value("v", "b0", ("b1", "b2", "b3"), 4)
    in_order = [Value(f"w{s}", f"b{s}", (f"b{s + 1}",), 0) for s in range(3)]
    cluster = Cluster(Cluster.uniform(4).devices, ((1.0,) * 4,) * 4, ((0.0,) * 4,) * 4)

    plan = partition(Problem(blocks, (value, *in_order), {}), cluster, num_stages=4)

    # Straight stage 0 sends three times: 9 + 12. Handed on it sends once, and the others have less.
    assert sorted(target for _, target in hops(plan.transfers, "v")) == [1, 2, 3]
    assert [source for source, _ in hops(plan.transfers, "v")].count(0) == 1
    assert plan.bottleneck_s == 9 + 4
    assert plan.gap <= 1.01e-4


@pytest.mark.parametrize("seed", range(40))
def test_what_milder_rules_refute_no_assignment_with_any_routes_reaches(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, cluster = _drawn(random.Random(seed), num_blocks=6, alike=True)
    refuted_s, ask = [0.0], relaxed_bound.RelaxedBound.__call__

    def noted(rules: relaxed_bound.RelaxedBound, target_s: float, deadline: Deadline) -> Any:
        answer = ask(rules, target_s, deadline)
        if answer[0] is Status.INFEASIBLE:
            refuted_s.append(target_s)
        return answer

    monkeypatch.setattr(relaxed_bound.RelaxedBound, "__call__", noted)
    monkeypatch.setattr(search, "_FIRST_SHARE", 0.0)  # no time for programs before them
    plan = partition(problem, cluster, num_stages=3)

    _, best_s = _exhaustive(problem, cluster)
    assert max(refuted_s) <= best_s * (1 + 1e-9)
    assert plan.bottleneck_s >= best_s * (1 - 1e-9)


def _drawn(draw: random.Random, num_blocks: int, *, alike: bool) -> tuple[Problem, Cluster]:
    def matrix(entries: list[float]) -> tuple[tuple[float, ...], ...]:
        if alike:
            return ((draw.choice(entries),) * 3,) * 3
        return tuple(tuple(draw.choice(entries) for _ in range(3)) for _ in range(3))

    def times() -> tuple[float, ...]:
        if alike:
            return (float(draw.randint(0, 9)),) * 3
        return tuple(float(draw.randint(0, 9)) for _ in range(3))

    blocks = tuple(Block(f"b{at}", (f"o{at}",), times(), times()) for at in range(num_blocks))
    values = []
    for at in range(num_blocks - 1):
        later = [f"b{other}" for other in range(at + 1, num_blocks)]
        readers = tuple(name for name in later if draw.random() < 0.6) or (later[0],)
        values.append(Value(f"v{at}", f"b{at}", readers, draw.randint(0, 8), draw.choice([0, 4])))
    cluster = Cluster(Cluster.uniform(3).devices, matrix([1.0, 2.0, 20.0]), matrix([0.0, 0.5]))
    return Problem(blocks, tuple(values), {}), cluster


def _exhaustive(problem: Problem, cluster: Cluster) -> tuple[float, float]:
    """The least bottleneck of three stages with every value sent straight, and with any routes."""
    straight_s = best_s = float("inf")
    names = [block.name for block in problem.blocks]
    for stages in itertools.product(range(3), repeat=len(names)):
        at = dict(zip(names, stages, strict=True))
        forward = all(at[v.producer] <= at[reader] for v in problem.values for reader in v.consumers)
        if not forward or set(stages) != {0, 1, 2}:
            continue
        ways = [_ways(at[v.producer], {at[reader] for reader in v.consumers}) for v in problem.values]
        for devices in itertools.permutations(range(3)):
            costs = [_round_trips(value, cluster, devices) for value in problem.values]
            work_s = [0.0] * 3
            for block in problem.blocks:
                device = devices[at[block.name]]
                work_s[at[block.name]] += block.forward_s[device] + block.backward_s[device]
            for number, way in enumerate(itertools.product(*ways)):
                load_s = list(work_s)
                for seconds, hops_taken in zip(costs, way, strict=True):
                    for hop in hops_taken:
                        load_s[hop[0]] += seconds[hop]
                        load_s[hop[1]] += seconds[hop]
                best_s = min(best_s, max(load_s))
                if number == 0:
                    straight_s = min(straight_s, max(load_s))
    return straight_s, best_s


def _ways(source: int, readers: set[int]) -> list[list[tuple[int, int]]]:
    """Returns the ways of a value among three stages: first direct, then through the stage between."""
    straight = [(source, reader) for reader in sorted(readers - {source})]
    return [straight, [(0, 1), (1, 2)]] if (0, 2) in straight else [straight]


def _round_trips(value: Value, cluster: Cluster, devices: tuple[int, ...]) -> dict[tuple[int, int], float]:
    def seconds(a: int, b: int, num_bytes: int) -> float:
        return cluster.latency_s[a][b] + num_bytes / cluster.bytes_per_s[a][b]

    return {
        (s, t): seconds(devices[s], devices[t], value.bytes)
        + (seconds(devices[t], devices[s], value.gradient_bytes) if value.gradient_bytes else 0.0)
        for t in range(3)
        for s in range(t)
    }


def test_an_interrupt_ends_both_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    left_s = []

    def once_more(*_: Any, deadline: Deadline, **__: Any) -> tuple[None, float]:
        left_s.append(deadline.left_s)
        return None, 0.0

    def interrupt(_: Progress) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(search_with_routes, "search_faster", once_more)
    draw = random.Random(3)
    names = [f"b{at}" for at in range(6)]
    blocks = tuple(Block(name, (name,), (draw.uniform(1, 3),) * 3, (0.0,) * 3) for name in names)
    values = tuple(Value(f"v{at}", f"b{at}", (f"b{at + 1}",), 10) for at in range(5))
    near = Cluster.uniform(3, memory_bytes=10**9, bytes_per_s=10.0, latency_s=0.0)
    rates = tuple(
        tuple(rate * (1 + a + b) for b, rate in enumerate(row)) for a, row in enumerate(near.bytes_per_s)
    )
    plan = partition(Problem(blocks, values, {}), replace(near, bytes_per_s=rates), progress=interrupt)
    assert plan.num_stages == 3
    assert left_s == [0.0]
