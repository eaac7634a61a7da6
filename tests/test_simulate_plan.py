"""A plan on a model of time: transfers on links, stages on ranks, weights that several stages hold."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pd2bw_fx.actions import Kind, Schedule
from pd2bw_fx.cluster import Cluster
from pd2bw_fx.costs import StageMemory
from pd2bw_fx.errors import InputError
from pd2bw_fx.passes.schedule import build_schedule
from pd2bw_fx.passes.simulate import Durations, Tied, simulate, simulate_durations
from pd2bw_fx.plan import Plan, StagePlan, Transfer
from tests.schedules_by_definition import rank_actions, row


def plan_of(*devices: int, recompute: bool = False) -> Plan:
    memory = StageMemory(0, 0, 0, 0, 0, 0)
    stages = tuple(
        StagePlan(s, device, f"cpu:{device}", (), (), 1.0, 2.0, 0.0, 0.0, memory, 1, 1, recompute=recompute)
        for s, device in enumerate(devices)
    )
    transfers = (
        Transfer("h", 0, 1, bytes=300, gradient_bytes=300, seconds=0.0),
        Transfer("mask", 0, 1, bytes=100, gradient_bytes=0, seconds=0.0),
        Transfer("h", 0, 2, bytes=300, gradient_bytes=300, seconds=0.0),
        Transfer("ids", 1, 2, bytes=200, gradient_bytes=0, seconds=0.0),
    )
    return Plan(stages, transfers, 3.0, 3.0, "2bw", 1, "highs", 0.0, "f")


def test_a_plans_transfers_travel_on_the_links_of_its_devices() -> None:
    # Stage 0 sends 400 bytes to stage 1 and 300 to stage 2, over links of 100 bytes/s.
    cluster = Cluster.uniform(3, memory_bytes=1, bytes_per_s=100.0, latency_s=0.25)
    schedule = row("1f1b", ["F0 B0"] * 3, m=1)

    timeline = simulate(schedule, plan_of(2, 0, 1), cluster)

    starts = {(e.label, e.stage): e.start_s for e in timeline.compute()}
    assert starts["F0", 1] == 1.0 + 4.0 + 0.25
    assert starts["F0", 2] == 6.25 + 2.0 + 0.25
    # No gradient flows from stage 2 to stage 1, so stage 1 goes on at once; stage 0 waits for both readers.
    assert starts["B0", 1] == 6.25
    assert starts["B0", 0] == max(6.25 + 2.0 + 3.0 + 0.25, 8.5 + 3.0 + 3.0 + 0.25)


def test_a_recomputed_stage_runs_its_forward_again_before_the_backward() -> None:
    cluster = Cluster.uniform(3, memory_bytes=1)

    timeline = simulate(row("1f1b", ["F0 B0"] * 3, m=1), plan_of(0, 1, 2, recompute=True), cluster)

    assert [e.duration_s for e in timeline.compute() if e.kind is Kind.BACKWARD] == pytest.approx([3.0] * 3)


def test_an_update_waits_for_the_gradients_of_weights_that_another_stage_holds_too() -> None:
    # rank 0   F0 . . . . B0 [..] U        1000 bytes to and from in halves, and two latencies: 10.5 s
    # rank 1      F0 .  . B0 U
    # rank 2      . F0 B0 [.......] U      waits for rank 0's gradient first
    plan = plan_of(0, 1, 2)
    first, second, last = plan.stages
    tied = (replace(first, parameters=("w",)), second, replace(last, parameters=("w", "v")))
    cluster = Cluster.uniform(3, memory_bytes=1, bytes_per_s=100.0, latency_s=0.25)
    schedule = row("1f1b", ["F0 B0 U1"] * 3, m=1)

    sizes = {"w": 1000, "v": 700}
    timeline = simulate(schedule, replace(plan, stages=tied), cluster, trainable_bytes=sizes)
    frozen = simulate(schedule, replace(plan, stages=tied), cluster, trainable_bytes={"v": 700})

    ends_s = {e.stage: e.end_s for e in timeline.events if e.kind is Kind.BACKWARD}
    updates_s = {e.stage: e.start_s for e in timeline.events if e.kind is Kind.UPDATE}
    assert updates_s == {0: ends_s[0] + 10.5, 1: ends_s[1], 2: ends_s[0] + 10.5}
    waits = {e.rank: e.duration_s for e in timeline.events if e.kind is Kind.ALL_REDUCE}
    assert waits == {0: 10.5, 2: ends_s[0] + 10.5 - ends_s[2]}
    assert not any(e.kind is Kind.ALL_REDUCE for e in frozen.events)


def test_ranks_whose_stages_have_weights_of_one_another_do_not_wait_in_a_circle() -> None:
    # rank 0 has stages 0 and 2, rank 1 has 1 and 3; one weight is in 0 and 3, another in 1 and 2
    schedule = build_schedule(
        "interleaved", 4, chunks=2, microbatches_per_update=2, updates=range(2), drain=True
    )
    ties = tuple(Tied(frozenset(stages), frozenset({0, 1}), 0.5) for stages in ((0, 3), (1, 2)))
    durations = replace(Durations.chain([1.0] * 4, [2.0] * 4), tied=ties)

    timeline = simulate_durations(schedule, durations)

    ends_s = max(e.end_s for e in timeline.events if e.kind is Kind.BACKWARD and e.microbatch < 2)
    assert {e.start_s for e in timeline.events if (e.kind, e.version) == (Kind.UPDATE, 1)} == {ends_s + 0.5}


def test_stages_on_one_rank_take_turns() -> None:
    first = rank_actions("F0 F1 B0 B1", 0, 2, lambda k: 0)
    second = rank_actions("F0 F1 B0 B1", 1, 2, lambda k: 0)
    schedule = Schedule("gpipe", 2, 2, range(1), ((*first[:4], *second, *first[4:]),), True, 1)

    timeline = simulate_durations(schedule, Durations.chain([1.0, 1.0], [2.0, 2.0]))

    assert timeline.span_s == 12.0
    assert timeline.bubble == 0.0


def test_times_for_another_number_of_stages_or_devices_are_refused() -> None:
    schedule = row("1f1b", ["F0 B0"] * 3, m=1)

    with pytest.raises(InputError, match="3 stages and the times are for 2"):
        simulate_durations(schedule, Durations.chain([1.0] * 2, [2.0] * 2))
    with pytest.raises(InputError, match="stage 2 is on device 2, and the cluster has 2"):
        simulate(schedule, plan_of(0, 1, 2), Cluster.uniform(2, memory_bytes=1))
    with pytest.raises(InputError, match=r"link_jitter_s is -1"):
        simulate_durations(schedule, Durations.chain([1.0] * 3, [2.0] * 3), link_jitter_s=-1.0)
    with pytest.raises(InputError, match=r"jitter is 1\.5"):
        simulate_durations(schedule, Durations.chain([1.0] * 3, [2.0] * 3), jitter=1.5)
