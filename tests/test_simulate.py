"""Schedules on a model of time, against closed forms and published numbers."""

import json
from collections.abc import Callable
from itertools import pairwise

import pytest

from pd2bw_fx.actions import Kind, Schedule
from pd2bw_fx.errors import ScheduleError
from pd2bw_fx.passes.schedule import build_schedule
from pd2bw_fx.passes.simulate import Durations, LinkTimes, simulate_durations
from pd2bw_fx.timeline import Event, Timeline
from tests.schedules_by_definition import flush, gpipe, row, two_buffered


@pytest.mark.parametrize(("d", "m"), [(1, 1), (2, 2), (2, 4), (4, 8), (5, 3), (8, 24)])
@pytest.mark.parametrize("build", [gpipe, flush])
def test_gpipe_and_1f1b_take_m_plus_d_minus_1_microbatch_times(
    build: Callable[[int, int], Schedule], d: int, m: int
) -> None:
    timeline = simulate_durations(build(d, m), Durations.chain([1.0] * d, [2.0] * d))

    assert timeline.span_s == (m + d - 1) * 3.0
    assert timeline.bubble == pytest.approx((d - 1) / (m + d - 1), abs=1e-15)


@pytest.mark.parametrize(("d", "m"), [(1, 1), (2, 4), (4, 4), (4, 8)])
def test_the_projects_own_schedules_take_the_same_times_as_those_written_here(d: int, m: int) -> None:
    durations = Durations.chain([1.0, 1.5, 0.7, 1.2][:d], [2.0, 2.5, 2.1, 3.0][:d], latency_s=0.1)
    written = {"gpipe": gpipe(d, m), "1f1b": flush(d, m, updates=3), "2bw": two_buffered(d, m, updates=3)}

    for method, schedule in written.items():
        updates = 1 if method == "gpipe" else 3
        built = build_schedule(method, d, microbatches_per_update=m, updates=range(updates), drain=True)
        ours, theirs = (simulate_durations(s, durations) for s in (schedule, built))
        assert [e for e in theirs.compute() if e.kind is not Kind.UPDATE] == [
            e for e in ours.compute() if e.kind is not Kind.UPDATE
        ]


def test_gpipe_holds_all_microbatches_and_1f1b_only_as_many_as_stages_follow() -> None:
    durations = Durations.chain([1.0] * 4, [2.0] * 4)

    assert simulate_durations(gpipe(4, 8), durations).in_flight_peak == (8, 8, 8, 8)
    assert simulate_durations(flush(4, 8), durations).in_flight_peak == (4, 3, 2, 1)


@pytest.mark.parametrize(
    ("d", "m", "forward", "input_gradient", "weight_gradient", "communication", "published"),
    [
        (8, 24, 18.522, 18.086, 9.337, 0.601, "0.2431"),
        (8, 64, 29.935, 29.621, 19.388, 0.535, "0.1091"),
    ],
)
def test_the_1f1b_bubbles_of_the_zero_bubble_paper_to_every_digit(
    d: int,
    m: int,
    forward: float,
    input_gradient: float,
    weight_gradient: float,
    communication: float,
    published: str,
) -> None:
    """arXiv 2401.10241: cost is the longest of the stages' spans, the rate its share without work."""
    backward = input_gradient + weight_gradient
    durations = Durations.chain([forward] * d, [backward] * d, latency_s=communication)

    timeline = simulate_durations(flush(d, m), durations, links="latency")

    work = [[e for e in timeline.compute() if e.rank == rank and e.microbatch >= 0] for rank in range(d)]
    cost = max(events[-1].end_s - events[0].start_s for events in work)
    assert f"{(cost - m * (forward + backward)) / cost:.4f}" == published
    assert f"{timeline.bubble:.4f}" == published


@pytest.mark.parametrize(("d", "m"), [(1, 1), (2, 2), (3, 4), (4, 8), (8, 8)])
def test_2bw_has_no_bubble_in_the_steady_state(d: int, m: int) -> None:
    timeline = simulate_durations(two_buffered(d, m, updates=8), Durations.chain([1.0] * d, [2.0] * d))

    assert timeline.throughput == pytest.approx(1 / 3, rel=1e-12)
    assert timeline.in_flight_peak == tuple(range(d, 0, -1))


@pytest.mark.parametrize(("d", "m"), [(2, 4), (4, 8)])
def test_steadily_a_flush_costs_its_bubble_and_2bw_nothing(d: int, m: int) -> None:
    durations = Durations.chain([1.0] * d, [2.0] * d)

    flushed = simulate_durations(flush(d, m, updates=8), durations)

    assert flushed.steady_bubble == pytest.approx((d - 1) / (m + d - 1))
    assert simulate_durations(two_buffered(d, m, updates=8), durations).steady_bubble == pytest.approx(0.0)


def test_the_slowest_stage_sets_the_pace_of_2bw() -> None:
    durations = Durations.chain([1.0, 1.5, 0.5], [2.0, 3.0, 1.0])

    timeline = simulate_durations(two_buffered(3, 4, updates=8), durations)

    assert timeline.throughput == pytest.approx(1 / 4.5, rel=1e-12)


@pytest.mark.parametrize(
    ("d", "m", "latency", "flushed", "slack_0", "slack_1"),
    [(2, 4, 0.1, 0.779, 0.968, 1.0), (4, 8, 0.3, 0.635, 0.870, 1.0)],
)
def test_latency_costs_2bw_what_it_cost_the_prototype(
    d: int, m: int, latency: float, flushed: float, slack_0: float, slack_1: float
) -> None:
    """Efficiency is microbatches a second times F + B, with F = 1, B = 2 and links of pure latency.

    Without slack d microbatches are in flight, and each goes d(F + B) + 2(d - 1) latencies round.
    """
    durations = Durations.chain([1.0] * d, [2.0] * d, latency_s=latency)

    def efficiency(schedule: Schedule) -> float:
        return simulate_durations(schedule, durations, links="latency").throughput * 3.0

    assert round(efficiency(flush(d, m, updates=20)), 3) == flushed
    assert round(efficiency(two_buffered(d, m, updates=20)), 3) == slack_0
    assert slack_0 == pytest.approx(3 * d / (3 * d + 2 * (d - 1) * latency), abs=5e-4)
    assert round(efficiency(two_buffered(d, m, updates=20, slack=1.0)), 3) == slack_1


def test_jitter_slows_a_flushed_pipeline_more_than_2bw() -> None:
    durations = Durations.chain([1.0] * 4, [2.0] * 4)

    flushed = simulate_durations(flush(4, 8, updates=60), durations, jitter=0.15, seed=1)
    two_versions = simulate_durations(two_buffered(4, 8, updates=60), durations, jitter=0.15, seed=1)

    assert flushed.throughput * 3 == pytest.approx(0.69, abs=0.02)
    assert two_versions.throughput * 3 == pytest.approx(0.91, abs=0.02)


@pytest.mark.parametrize("seed", range(3))
def test_slack_hides_late_and_uneven_messages(seed: int) -> None:
    """10% of a forward each: the plain schedule loses more than 8% on 4 stages, slack 1 less than 2%."""
    durations = Durations.chain([1.0] * 4, [2.0] * 4, latency_s=0.1)

    def efficiency(slack: float) -> float:
        schedule = two_buffered(4, 8, updates=40, slack=slack)
        told = simulate_durations(schedule, durations, links="latency", link_jitter_s=0.1, seed=seed)
        return told.throughput * 3.0

    assert efficiency(0.0) < 0.92
    assert efficiency(1.0) > 0.98


def test_the_same_seed_gives_the_same_timeline_and_another_seed_another() -> None:
    durations = Durations.chain([1.0] * 3, [2.0] * 3)
    schedule = two_buffered(3, 4, updates=3)

    first, second, other = (
        simulate_durations(schedule, durations, jitter=0.1, seed=seed) for seed in (7, 7, 8)
    )

    assert first == second
    assert first.span_s != other.span_s


def test_a_busy_link_sends_one_message_after_another_and_a_latency_link_all_at_once() -> None:
    # The link needs 10 s for a message, the first stage makes one every second:
    #   busy     |1....11|11....21|      second forward of stage 1 at 21 s
    #   latency  |1....11|
    #              |2....12|             at 12 s
    schedule = row("gpipe", ["F0 F1 B0 B1"] * 2, m=2)
    durations = Durations((1.0, 1.0), (2.0, 2.0), (0.0, 0.0), (LinkTimes(0, 1, 0.0, 10.0, 0.0),))

    def forwards(links: str) -> list[float]:
        timeline = simulate_durations(schedule, durations, links=links)  # type: ignore[arg-type]
        return [e.start_s for e in timeline.of_rank(1) if e.kind is Kind.FORWARD]

    assert forwards("busy") == [11.0, 21.0]
    assert forwards("latency") == [11.0, 12.0]


def test_waiting_is_told_apart_by_what_was_waited_for() -> None:
    # stage 0   F0 . . . . . B0      waits 4 s for the gradient
    # stage 1   . F0 B0 . .          waits 1.5 s for the activation, and has nothing to do after 4.5 s
    schedule = row("1f1b", ["F0 B0"] * 2, m=1)
    durations = Durations.chain([1.0, 1.0], [2.0, 2.0], latency_s=0.5)

    timeline = simulate_durations(schedule, durations)

    assert timeline.span_s == 7.0
    assert timeline.busy_s == (3.0, 3.0)
    assert timeline.idle_by_cause_s == (
        {"activation": 0.0, "gradient": 4.0, "other": 0.0},
        {"activation": 1.5, "gradient": 0.0, "other": 2.5},
    )


def test_a_schedule_that_never_ends_is_refused_with_the_first_action_that_waits() -> None:
    good = row("gpipe", ["F0 F1 B0 B1"] * 2, m=2)
    without_a_send = tuple(a for a in good.ranks[0] if str(a) != "SF1(stage 0, W0)")
    bad = Schedule("gpipe", 2, 2, range(1), (without_a_send, good.ranks[1]), True, 1)

    with pytest.raises(ScheduleError, match=r"rank 1 waits in action 2, RF1\(stage 1, W0\), for the activ"):
        simulate_durations(bad, Durations.chain([1.0, 1.0], [2.0, 2.0]))


def test_ranks_that_wait_for_one_another_are_refused() -> None:
    # Rank 0 wants the gradient of 1 first, rank 1 wants to give that of 0 first.
    schedule = row("1f1b", ["F0 B1 F1 B0", "F0 B0 F1 B1"], m=2)
    ranks = list(schedule.ranks)
    ranks[0] = tuple(a for a in ranks[0] if not (a.microbatch == 1 and a.kind is Kind.BACKWARD))

    with pytest.raises(ScheduleError, match=r"rank 0 waits in action 2, RB1\(stage 0, W0\), for the grad"):
        simulate_durations(
            Schedule("1f1b", 2, 2, range(1), tuple(ranks), True, 1), Durations.chain([1.0] * 2, [2.0] * 2)
        )


@pytest.mark.parametrize("missing", ["RF0(stage 1, W0)", "F0(stage 1, W0)", "RB0(stage 0, W0)"])
def test_a_rank_that_works_on_what_it_has_not_got_is_refused(missing: str) -> None:
    good = row("gpipe", ["F0 B0"] * 2, m=1)
    ranks = tuple(tuple(a for a in rank if str(a) != missing) for rank in good.ranks)

    with pytest.raises(ScheduleError, match=r"comes before its (RF|F|RB)0"):
        simulate_durations(
            Schedule("gpipe", 2, 1, range(1), ranks, True, 1), Durations.chain([1.0] * 2, [2.0] * 2)
        )


def test_a_timeline_survives_json() -> None:
    timeline = simulate_durations(two_buffered(2, 2, updates=2), Durations.chain([0.1, 0.2], [0.3, 0.4]))

    assert Timeline.from_json(json.loads(json.dumps(timeline.to_json()))) == timeline


def test_a_chrome_trace_has_a_thread_for_each_rank_and_slices_that_never_overlap() -> None:
    durations = Durations.chain([0.1, 0.2], [0.3, 0.4], latency_s=0.05, update_s=0.01)
    timeline = simulate_durations(two_buffered(2, 2, updates=2), durations)

    trace = json.loads(json.dumps(timeline.to_chrome_trace()))["traceEvents"]

    for rank in range(2):
        slices = [entry for entry in trace if entry["ph"] == "X" and entry["tid"] == rank]
        assert [s["cat"] for s in slices if s["cat"] != "wait"].count("forward") == 4
        for earlier, later in pairwise(slices):
            assert earlier["ts"] + earlier["dur"] <= later["ts"] + 1e-6
    opened = [entry["id"] for entry in trace if entry["ph"] == "b"]
    assert sorted(opened) == sorted(entry["id"] for entry in trace if entry["ph"] == "e")
    assert len(set(opened)) == len(opened) == 8


def test_throughput_of_few_updates_is_all_microbatches_over_the_span() -> None:
    timeline = Timeline("1f1b", 1, 1, (Event(0, Kind.FORWARD, 0, 0, 0, 0.0, 1.0),
                                       Event(0, Kind.BACKWARD, 0, 0, 0, 1.0, 4.0)))  # fmt: skip

    assert timeline.throughput == 0.25


def test_two_hundred_thousand_actions_are_simulated() -> None:
    schedule = two_buffered(16, 32, updates=66)
    assert sum(map(len, schedule.ranks)) > 190_000

    timeline = simulate_durations(schedule, Durations.chain([1.0] * 16, [2.0] * 16))

    assert timeline.span_s == 66 * 32 * 3.0 + 15 * 3.0  # all microbatches, and filling and draining
