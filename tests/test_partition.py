"""What the planner chooses on problems that can be counted by hand, and what it refuses."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from pd2bw_fx.cluster import Cluster
from pd2bw_fx.device import Device
from pd2bw_fx.errors import InfeasibleError, InputError, SolverError
from pd2bw_fx.passes.partition import baselines, partition
from pd2bw_fx.plan import Plan
from pd2bw_fx.problem import Block, ParameterSize, Problem, Value


def chain(num_blocks: int, num_devices: int, **more: Any) -> Problem:
    """A chain of blocks, 1 s forward and 2 s backward each, 100 trainable bytes, values of 10 bytes."""
    blocks = tuple(
        Block(f"b{at}", (f"op{at}",), (1.0,) * num_devices, (2.0,) * num_devices, (f"w{at}",), **more)
        for at in range(num_blocks)
    )
    values = tuple(Value(f"v{at}", f"b{at}", (f"b{at + 1}",), 10, 10) for at in range(num_blocks - 1))
    return Problem(blocks, values, {f"w{at}": ParameterSize(100) for at in range(num_blocks)}, "print")


def roomy(num_devices: int, **more: Any) -> Cluster:
    return Cluster.uniform(num_devices, memory_bytes=10**9, bytes_per_s=1e3, latency_s=0.0, **more)


def test_even_chain_is_cut_evenly_and_its_plan_adds_up() -> None:
    plan = partition(chain(6, 3), roomy(3))
    assert [stage.operators for stage in plan.stages] == [("op0", "op1"), ("op2", "op3"), ("op4", "op5")]
    assert plan.bottleneck_s == pytest.approx(6.0 + 2 * 0.02)
    assert [(t.value, t.source, t.target, t.bytes, t.gradient_bytes) for t in plan.transfers] == [
        ("v1", 0, 1, 10, 10),
        ("v3", 1, 2, 10, 10),
    ]
    assert [transfer.seconds for transfer in plan.transfers] == pytest.approx([0.02, 0.02])
    assert [stage.microbatches_in_flight for stage in plan.stages] == [3, 2, 1]
    memory = plan.stages[1].memory
    assert (memory.weight_bytes, memory.gradient_bytes, memory.optimizer_bytes) == (400, 200, 400)
    assert memory.transfer_bytes == 2 * (10 + 10)
    assert (plan.fingerprint, plan.microbatches_per_update, plan.solver) == ("print", 6, "highs")
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("solver", ["highs", "cbc"])
def test_either_solver_proves_the_same_bottleneck(solver: str) -> None:
    problem = chain(11, 3)
    plan = partition(problem, roomy(3), solver=solver)
    assert plan.bottleneck_s == pytest.approx(12.0 + 0.02)
    assert plan.gap <= 1.01e-4
    assert plan.solver == solver


def test_same_input_gives_the_same_plan() -> None:
    plans = [partition(chain(13, 4), roomy(4)) for _ in range(2)]
    assert dataclasses.replace(plans[0], planning_s=0.0) == dataclasses.replace(plans[1], planning_s=0.0)


def test_value_is_sent_once_to_each_stage_that_reads_it() -> None:
    problem = chain(4, 3)
    more = Value("skip", "b0", ("b1", "b2", "b3"), 40, 0)
    plan = partition(dataclasses.replace(problem, values=(*problem.values, more)), roomy(3), num_stages=3)
    stage_of = plan.stage_of
    sent = {(t.source, t.target) for t in plan.transfers if t.value == "skip"}
    assert sent == {(0, stage_of[f"op{at}"]) for at in (1, 2, 3) if stage_of[f"op{at}"] != 0}


def test_tied_parameter_is_held_by_every_stage_that_has_a_block_of_it() -> None:
    problem = chain(4, 2)
    tied = dataclasses.replace(problem.blocks[3], parameters=("w0",))
    plan = partition(dataclasses.replace(problem, blocks=(*problem.blocks[:3], tied)), roomy(2))
    assert [stage.parameters for stage in plan.stages] == [("w0", "w1"), ("w2", "w0")]
    assert [stage.memory.weight_bytes for stage in plan.stages] == [400, 400]


def test_slow_device_gets_less_and_the_order_of_devices_is_chosen() -> None:
    problem = chain(9, 2)
    slow = tuple(
        dataclasses.replace(block, forward_s=(2.0, 1.0), backward_s=(4.0, 2.0)) for block in problem.blocks
    )
    heavy = dataclasses.replace(slow[0], saved_bytes=1000)
    cluster = dataclasses.replace(
        roomy(2), devices=(Device("small", memory_bytes=5000), Device("large", memory_bytes=10**6))
    )
    plan = partition(dataclasses.replace(problem, blocks=(heavy, *slow[1:])), cluster)
    assert [len(stage.operators) for stage in plan.stages if stage.device_name == "small"] == [3]
    assert plan.bottleneck_s == pytest.approx(18.02)


def test_overlapped_links_cost_only_what_the_work_does_not_hide() -> None:
    problem = chain(4, 2)
    slow_link = Cluster.uniform(2, memory_bytes=10**9, bytes_per_s=4.0, latency_s=0.0)
    beside = partition(problem, slow_link, overlap=True)
    after = partition(problem, slow_link, overlap=False)
    assert beside.bottleneck_s == pytest.approx(6.0)
    assert [stage.send_s + stage.receive_s for stage in beside.stages] == [0.0, 0.0]
    assert after.bottleneck_s == pytest.approx(6.0 + 5.0)


def test_recomputation_is_chosen_only_where_memory_needs_it() -> None:
    problem = chain(6, 3, saved_bytes=1000)
    # Without it there is room for one block on stages 0 and 1 and for two on stage 2, four of six.
    cluster = Cluster.uniform(3, memory_bytes=4000, bytes_per_s=1e3, latency_s=0.0)
    with pytest.raises(InfeasibleError):
        partition(problem, cluster)
    plan = partition(problem, cluster, recompute="auto")
    assert [stage.recompute for stage in plan.stages] == [True, True, False]
    assert plan.bottleneck_s == pytest.approx(2 * 4.0 + 2 * 0.02)
    assert all(stage.memory.total_bytes <= 4000 for stage in plan.stages)


def test_too_little_memory_names_device_need_and_limit() -> None:
    cluster = Cluster.uniform(2, memory_bytes=1400, bytes_per_s=1e3, latency_s=0.0)
    with pytest.raises(
        InfeasibleError, match=r"stage \d needs .* bytes\) on cpu:\d, which has .*\(1400 bytes"
    ):
        partition(chain(6, 2), cluster)


def test_block_larger_than_any_device_is_named() -> None:
    cluster = Cluster.uniform(2, memory_bytes=400, bytes_per_s=1e3, latency_s=0.0)
    with pytest.raises(
        InfeasibleError, match=r"block 'b0' alone needs .*\(700 bytes\).*try a device with more"
    ):
        partition(chain(6, 2), cluster)


def test_time_limit_returns_the_best_plan_so_far_with_its_gap() -> None:
    plan = partition(chain(40, 4), roomy(4), time_limit_s=1e-9)
    assert plan.bottleneck_s >= plan.bound_s > 0
    assert [len(stage.operators) for stage in plan.stages] == [10, 10, 10, 10]


def test_more_orders_of_devices_than_can_be_listed_are_planned_in_time() -> None:
    num_devices = 12  # four nodes of three: 369,600 orders
    rates = [[0.0 if a == b else 2e9 if a // 3 == b // 3 else 1e6 for b in range(12)] for a in range(12)]
    cluster = Cluster(
        Cluster.uniform(num_devices).devices, tuple(map(tuple, rates)), ((0.0,) * num_devices,) * num_devices
    )
    blocks = tuple(Block(f"b{at}", (f"o{at}",), (1e-3,) * 12, (2e-3,) * 12) for at in range(36))
    values = tuple(Value(f"v{at}", f"b{at}", (f"b{at + 1}",), 100, 100) for at in range(35))

    plan = partition(Problem(blocks, values, {}), cluster, time_limit_s=5.0)

    # No stage has a slow link on both sides, which costs 0.2 ms.
    assert 9e-3 <= plan.bound_s <= plan.bottleneck_s < 9.3e-3


def test_method_decides_how_many_microbatches_are_in_flight() -> None:
    plan = partition(chain(4, 2), roomy(2), method="gpipe", microbatches_per_update=5)
    assert [stage.microbatches_in_flight for stage in plan.stages] == [5, 5]
    plan = partition(chain(4, 2), roomy(2), method="1f1b", microbatches_per_update=1)
    assert [stage.microbatches_in_flight for stage in plan.stages] == [1, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_stages": 5}, "5 stages for 3 devices"),
        ({"num_stages": 0}, "num_stages is 0"),
        ({"num_stages": True}, "num_stages is True"),
        ({"microbatches_per_update": 2}, "microbatches_per_update=2 with 3 stages"),
        ({"method": "2wb"}, "method '2wb' is unknown; known are 2bw"),
        ({"max_gap": -0.1}, "max_gap is -0.1"),
        ({"time_limit_s": float("nan")}, "time_limit_s is nan"),
        ({"recompute": "sometimes"}, "recompute is 'sometimes'"),
    ],
)
def test_argument_that_makes_no_sense_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        partition(chain(6, 3), roomy(3), **arguments)


def test_more_stages_than_blocks_names_both_numbers() -> None:
    with pytest.raises(InputError, match="3 stages for a model of 2 blocks"):
        partition(chain(2, 3), roomy(3))


def test_unknown_solver_is_refused_before_any_work() -> None:
    with pytest.raises(SolverError, match="'hihgs' is not known"):
        partition(chain(6, 3), roomy(3), solver="hihgs")


def _with_block(**changes: Any) -> Problem:
    problem = chain(4, 2)
    return dataclasses.replace(
        problem, blocks=(dataclasses.replace(problem.blocks[0], **changes), *problem.blocks[1:])
    )


def _with_value(**changes: Any) -> Problem:
    problem = chain(4, 2)
    return dataclasses.replace(
        problem, values=(dataclasses.replace(problem.values[0], **changes), *problem.values[1:])
    )


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (_with_block(forward_s=(1.0,)), "block 'b0': forward_s has 1 entry for 2 devices"),
        (_with_block(forward_s=(1.0, math.nan)), r"block 'b0': forward_s\[1\] is nan"),
        (_with_block(backward_s=(1.0, -2.0)), r"block 'b0': backward_s\[1\] is -2.0"),
        (_with_block(backward_s=(math.inf, 2.0)), r"block 'b0': backward_s\[0\] is inf"),
        (_with_block(saved_bytes=-1), "block 'b0': saved_bytes is -1"),
        (_with_block(workspace_bytes=None), "block 'b0': workspace_bytes is None"),
        (_with_block(parameters=("lost",)), "block 'b0' names parameter 'lost', whose size is not given"),
        (_with_block(name="b1"), "two blocks are named 'b1'"),
        (_with_value(producer="nobody"), "value 'v0' names block 'nobody'"),
        (_with_value(consumers=("b1", "nobody")), "value 'v0' names block 'nobody'"),
        (_with_value(bytes=-5), "value 'v0': bytes is -5"),
        (_with_value(gradient_bytes=math.nan), "value 'v0': gradient_bytes is nan"),
        (_with_value(producer="b3", consumers=("b1",)), "cycle .* block 'b1'"),
        (
            dataclasses.replace(chain(4, 2), parameters={**chain(4, 2).parameters, "w0": ParameterSize(-1)}),
            "'w0': trainable_bytes is -1",
        ),
        (Problem((), (), {}), "no blocks"),
    ],
)
def test_problem_that_makes_no_sense_is_refused(problem: Problem, message: str) -> None:
    with pytest.raises(InputError, match=message):
        partition(problem, roomy(2))


def test_blocks_out_of_order_are_planned_in_the_order_of_their_values() -> None:
    problem = chain(6, 2)
    plan = partition(dataclasses.replace(problem, blocks=tuple(reversed(problem.blocks))), roomy(2))
    assert plan.stage_of == {f"op{at}": at // 3 for at in range(6)}


def test_other_planners_cut_where_their_rule_says() -> None:
    problem = chain(6, 2)
    heavy = dataclasses.replace(problem.blocks[0], forward_s=(5.0, 5.0), backward_s=(7.0, 7.0))
    large = {**problem.parameters, "w5": ParameterSize(1000)}
    wide = dataclasses.replace(problem.values[0], bytes=10**6)
    changed = Problem((heavy, *problem.blocks[1:]), (wide, *problem.values[1:]), large)
    found = {other.rule: list(other.stage_of.values()) for other in baselines(changed, roomy(2))}
    assert found == {
        "equal": [0, 0, 0, 1, 1, 1],
        "parameters": [0, 0, 0, 0, 0, 1],
        "time": [0, 1, 1, 1, 1, 1],
        "pipedream": [0, 0, 1, 1, 1, 1],
    }
    pairs = [("b0", "b1", "b2", "b3"), ("b4",), ("b5",)]
    by_layer = baselines(chain(6, 3), roomy(3), layers=pairs)[0]
    assert list(by_layer.stage_of.values()) == [0, 0, 0, 0, 1, 2]


def test_an_optimum_is_kept_where_a_solver_is_off_by_a_little_more_than_its_tolerance() -> None:
    # On orders of these devices HiGHS gives an assignment of 15 s for one that is to be 4.5e-5 s faster.
    forward_s = [(0, 0, 2), (2, 8, 20), (0, 20, 1), (1, 1, 1), (1, 1, 1), (1, 5, 1), (0, 0, 5)]
    blocks = tuple(
        Block(f"b{at}", (f"b{at}",), tuple(map(float, times)), tuple(2.0 * time for time in times))
        for at, times in enumerate(forward_s)
    )
    sent = [("b0", ("b3", "b4", "b6"), 100), ("b1", ("b3", "b4"), 100), ("b2", ("b3",), 200)]
    sent.append(("b3", ("b4", "b6"), 200))
    values = tuple(Value(f"v{at}", by, to, size, size) for at, (by, to, size) in enumerate(sent))
    cluster = Cluster(
        tuple(Device(f"d{at}", memory_bytes=20000) for at in range(3)),
        bytes_per_s=((0, 50.0, 1000.0), (50.0, 0, 1000.0), (1000.0, 1000.0, 0)),
        latency_s=((0, 0.5, 0.5), (0.5, 0, 2.0), (0.5, 2.0, 0)),
    )
    options: dict[str, Any] = {"method": "gpipe", "microbatches_per_update": 3, "recompute": "auto"}
    plan = partition(Problem(blocks, values, {}), cluster, max_gap=0.0, **options)
    assert plan.bottleneck_s == pytest.approx(13.2)
    assert plan.gap < 1e-5
