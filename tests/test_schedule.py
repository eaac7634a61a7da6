"""Schedules: drawn for small cases, and held against the rule for many."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pd2bw_fx.actions import Action, Kind, RunRequest, Schedule, Shape
from pd2bw_fx.cluster import Cluster
from pd2bw_fx.errors import InputError, ScheduleError
from pd2bw_fx.passes.schedule import build_schedule, check_schedule, method_of, shape_of
from pd2bw_fx.passes.simulate import Durations, simulate_durations
from pd2bw_fx.pipeline import Pipeline
from pd2bw_fx.runtime.job import work_for
from tests.stages import split_of_our_own

COMPUTE = (Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE)


def drawn(schedule: Schedule) -> list[str]:
    """Each rank's computations: F0 B0, and U1 for the update that makes W1."""
    return [
        " ".join(
            f"{a.kind}{a.version if a.kind is Kind.UPDATE else a.microbatch}"
            for a in rank
            if a.kind in COMPUTE
        )
        for rank in schedule.ranks
    ]


def build(method: str, d: int, m: int, updates: range, *, drain: bool = True, **more: float) -> Schedule:
    return build_schedule(method, d, microbatches_per_update=m, updates=updates, drain=drain, **more)  # type: ignore[arg-type]


def test_2bw_keeps_going_over_updates_and_ends_each_segment_where_it_would_wait() -> None:
    first = build("2bw", 3, 4, range(1), drain=False)
    second = build("2bw", 3, 4, range(1, 2))

    assert drawn(first) == ["F0 F1 F2 B0 F3", "F0 F1 B0 F2 B1 F3", "F0 B0 F1 B1 F2 B2 F3 B3 U1"]
    assert drawn(second) == [
        "B1 F4 B2 F5 B3 U1 F6 B4 F7 B5 B6 B7 U2",
        "B2 F4 B3 U1 F5 B4 F6 B5 F7 B6 B7 U2",
        "F4 B4 F5 B5 F6 B6 F7 B7 U2",
    ]


def test_flush_and_gpipe_do_one_update_after_another() -> None:
    assert drawn(build("1f1b", 2, 3, range(1))) == ["F0 F1 B0 F2 B1 B2 U1", "F0 B0 F1 B1 F2 B2 U1"]
    assert drawn(build("gpipe", 2, 3, range(1))) == ["F0 F1 F2 B2 B1 B0 U1"] * 2


def test_slack_lengthens_the_warm_up() -> None:
    assert drawn(build("2bw", 2, 2, range(2), slack=1.0))[0] == "F0 F1 F2 B0 F3 B1 U1 B2 B3 U2"


def test_every_transfer_stands_beside_its_computation() -> None:
    middle = build("1f1b", 3, 1, range(1)).ranks[1]

    assert [str(action.kind) for action in middle] == ["RF", "F", "SF", "RB", "B", "SB", "U"]


@pytest.mark.parametrize("method", ["2bw", "1f1b", "gpipe", "inference"])
@pytest.mark.parametrize(("d", "m"), [(1, 1), (1, 3), (2, 2), (3, 3), (3, 5), (5, 8)])
def test_segments_joined_are_the_schedule_built_at_once(method: str, d: int, m: int) -> None:
    parts = [build(method, d, m, range(t, t + 1), drain=False) for t in range(4)]
    drain = build(method, d, m, range(4, 4), drain=True)

    joined = parts[0]
    for part in (*parts[1:], drain):
        joined = joined.then(part)

    assert joined == build(method, d, m, range(4))
    check_schedule(joined)


@pytest.mark.parametrize("d", range(1, 7))
def test_two_versions_are_enough_whatever_the_depth_and_slack(d: int) -> None:
    for m in range(d, 2 * d + 3):
        most = (m / (d - 1) - 1) if d > 1 else 0.0
        for slack in (0.0, most / 2, most):
            schedule = build("2bw", d, m, range(5), slack=int(slack * 1000) / 1000)
            check_schedule(schedule)
            assert schedule.weight_versions == 2


def test_microbatches_in_flight_are_as_few_as_the_depth_below() -> None:
    for d in range(1, 6):
        check_schedule(build("2bw", d, d + 1, range(4)), in_flight=[d - stage for stage in range(d)])
        with pytest.raises(ScheduleError, match="memory holds"):
            check_schedule(build("2bw", d, d + 1, range(4)), in_flight=[d - 1 - stage for stage in range(d)])


def test_the_first_two_updates_run_on_the_initial_weights() -> None:
    assert [method_of("2bw").forward_version(Shape(2, 2), 0, k) for k in range(8)] == [0, 0, 0, 0, 1, 1, 2, 2]
    assert [method_of("1f1b").forward_version(Shape(2, 2), 0, k) for k in range(6)] == [0, 0, 1, 1, 2, 2]


def test_after_a_flush_the_pipeline_fills_again_and_versions_go_on() -> None:
    drained = build("2bw", 2, 2, range(2))
    refilled = build("2bw", 2, 2, range(2, 4), empty_before=2)

    assert drawn(refilled)[0] == "F4 F5 B4 F6 B5 U3 F7 B6 B7 U4"
    assert {a.version for a in refilled.ranks[0] if a.microbatch == 4} == {1}
    check_schedule(drained.then(refilled))


@pytest.mark.parametrize(("d", "m"), [(2, 4), (4, 8), (4, 4)])
def test_the_bubble_is_that_of_the_papers(d: int, m: int) -> None:
    updates = 6
    chain = Durations.chain([1.0] * d, [2.0] * d)

    flush = simulate_durations(build("1f1b", d, m, range(updates)), chain)
    gpipe = simulate_durations(build("gpipe", d, m, range(updates)), chain)
    pipelined = simulate_durations(build("2bw", d, m, range(updates)), chain)

    assert flush.span_s == pytest.approx(updates * (m + d - 1) * 3)
    assert gpipe.span_s == pytest.approx(updates * (m + d - 1) * 3)
    assert pipelined.span_s == pytest.approx(updates * m * 3 + (d - 1) * 3)


def test_fewer_microbatches_than_stages_are_refused_for_2bw() -> None:
    with pytest.raises(InputError, match="3 microbatches an update on 4 stages"):
        build("2bw", 4, 3, range(1))


def test_slack_that_needs_a_third_version_is_refused() -> None:
    with pytest.raises(InputError, match="slack"):
        build("2bw", 3, 4, range(1), slack=1.5)


def test_slack_is_refused_where_it_would_say_nothing() -> None:
    with pytest.raises(InputError, match=r"slack=1\.0 says nothing of gpipe"):
        build("gpipe", 2, 4, range(1), slack=1.0)


@pytest.mark.parametrize(
    ("d", "m", "in_flight"),
    [(2, 2, (3, 1)), (4, 4, (5, 4, 3, 1)), (4, 5, (6, 5, 3, 1)), (4, 9, (7, 5, 3, 1))],
)
def test_automatic_slack_goes_as_far_as_two_versions_allow(
    d: int, m: int, in_flight: tuple[int, ...]
) -> None:
    planned = planned_mlp(d, m)
    timeline = planned.simulate(num_updates=6, slack="auto")

    assert timeline.in_flight_peak == in_flight
    assert work_for(planned, RunRequest(slack="auto")).shape.slack == pytest.approx(
        (in_flight[0] - d) / (d - 1)
    )


@pytest.mark.parametrize("recompute", [False, True])
def test_automatic_slack_takes_only_memory_that_is_left(*, recompute: bool) -> None:
    plan = planned_mlp(4, 8, recompute=recompute).plan
    first = plan.stages[0]
    saved_bytes = 0 if recompute else first.memory.activation_bytes
    each_bytes = (saved_bytes + first.memory.transfer_bytes) / first.microbatches_in_flight

    def slack_with(more: float) -> float:
        limit = int(first.memory.total_bytes + more * each_bytes)
        tight = replace(plan, stages=(replace(first, memory_limit_bytes=limit), *plan.stages[1:]))
        return shape_of(tight, "2bw", microbatches_per_update=8, slack="auto").slack

    assert [slack_with(more) for more in (0.5, 1.5, 2.5, 3.5)] == [0, 1 / 3, 2 / 3, 1]


def planned_mlp(num_stages: int, microbatches_per_update: int, *, recompute: bool = False) -> Pipeline:
    return split_of_our_own(
        "mlp",
        cluster=Cluster.uniform(num_stages, bytes_per_s=1e9, latency_s=1e-5, memory_bytes="1 GiB"),
        num_stages=num_stages,
        microbatches_per_update=microbatches_per_update,
        recompute=recompute,
    )


def test_a_schedule_of_unknown_method_or_impossible_counts_is_refused() -> None:
    with pytest.raises(InputError, match="expected one of"):
        build("zigzag", 2, 2, range(1))
    with pytest.raises(InputError, match="must be 1 or more"):
        build("2bw", 2, 0, range(1))
    with pytest.raises(InputError, match="empty before update 3"):
        build("2bw", 2, 2, range(1), empty_before=3)


def altered(schedule: Schedule, rank: int, change: str) -> Schedule:
    """The same with one rank's list edited: `-F1` takes an action away, `F2<F1` moves one before another."""
    actions = list(schedule.ranks[rank])
    names = [f"{a.kind}{a.version if a.kind is Kind.UPDATE else a.microbatch}" for a in actions]
    if change.startswith("-"):
        del actions[names.index(change[1:])]
    else:
        moved, before = change.split("<")
        action = actions.pop(names.index(moved))
        names.remove(moved)
        actions.insert(names.index(before), action)
    ranks = tuple(tuple(actions) if r == rank else list_ for r, list_ in enumerate(schedule.ranks))
    return replace(schedule, ranks=ranks)


@pytest.mark.parametrize(
    ("rank", "change", "complaint"),
    [
        (0, "-F1", r"SF1\(stage 0, W0\): F1 of its stage must come before"),
        (0, "-RB0", r"B0\(stage 0, W0\): RB0 of its stage"),
        (1, "-B1", r"SB1.*: B1 of its stage"),
        (0, "-SF1", r"rank 1.*RF1\(stage 1, W0\): it waits for ever for SF1 of stage 0"),
        (1, "-SB1", r"rank 0.*RB1\(stage 0, W0\): it waits for ever for SB1 of stage 1"),
        (0, "U1<B1", r"U\(stage 0 -> W1\): update 0 has 1 of its 2 backwards"),
        (0, "-U1", r"F4\(stage 0, W1\): W1 is not made yet"),
        (0, "-U2", r"F6\(stage 0, W2\): W2 is not made yet"),
        (0, "RB0<F0", r"waits for ever for SB0 of stage 1"),
    ],
)
def test_the_first_offending_action_is_named(rank: int, change: str, complaint: str) -> None:
    good = build("2bw", 2, 2, range(4))

    with pytest.raises(ScheduleError, match=complaint):
        check_schedule(altered(good, rank, change))


@pytest.mark.parametrize(
    ("rank", "change", "complaint"),
    [
        (0, "-U4", "rank 0 ends drained, and update 3 of stage 0 was not made"),
        (1, "-U4", "rank 1 ends drained, and update 3 of stage 1 was not made"),
    ],
)
def test_a_drained_schedule_has_all_its_updates(rank: int, change: str, complaint: str) -> None:
    with pytest.raises(ScheduleError, match=complaint):
        check_schedule(altered(build("2bw", 2, 2, range(4)), rank, change))


def test_a_rank_that_does_nothing_and_one_that_does_another_s_are_noticed() -> None:
    good = build("inference", 2, 2, range(1))
    with pytest.raises(ScheduleError, match="microbatch 0 of stage 0 had no forward"):
        check_schedule(replace(good, ranks=((), ())))

    trained = build("2bw", 2, 2, range(1))
    foreign = (*trained.ranks[0], Action(Kind.UPDATE, 1, -1, 1))
    with pytest.raises(ScheduleError, match="2bw has none of stage 1 on this rank"):
        check_schedule(replace(trained, ranks=(foreign, trained.ranks[1])))


def test_a_backward_that_is_done_twice_in_two_ways_and_one_of_inference_are_noticed() -> None:
    whole = build("1f1b", 1, 1, range(1))
    again = replace(whole, ranks=((*whole.ranks[0][:2], Action(Kind.INPUT_GRADIENT, 0, 0, 0)),))
    with pytest.raises(ScheduleError, match=r"I0\(stage 0, W0\): the whole backward was done before"):
        check_schedule(again)

    forwards = build("inference", 1, 1, range(1))
    with pytest.raises(ScheduleError, match=r"B0\(stage 0, W0\): inference has no backwards"):
        check_schedule(replace(forwards, ranks=whole.ranks))


def test_a_third_version_is_noticed() -> None:
    good = build("2bw", 2, 2, range(3))
    stashing = replace(good, weight_versions=1)

    with pytest.raises(ScheduleError, match="overwrites W0, which microbatch 2 needs"):
        check_schedule(stashing)


def test_a_wrong_version_is_noticed() -> None:
    actions = (Action(Kind.FORWARD, 0, 0, 1), Action(Kind.BACKWARD, 0, 0, 1), Action(Kind.UPDATE, 0, -1, 1))

    with pytest.raises(ScheduleError, match="runs microbatch 0 on W0"):
        check_schedule(Schedule("2bw", 1, 1, range(1), (actions,), True, 2))
