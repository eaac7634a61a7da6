"""Every method's schedules: drawn, held against published numbers, and checked for random shapes."""

from __future__ import annotations

import math
from dataclasses import replace
from unittest import mock

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

from pd2bw_fx.actions import Action, Kind, Schedule, Shape
from pd2bw_fx.errors import InputError, ScheduleError
from pd2bw_fx.passes.schedule import (
    METHODS,
    Times,
    build_schedule,
    check_schedule,
    method_of,
    schedule_of,
)
from pd2bw_fx.passes.schedule.zb_search import find_orders
from pd2bw_fx.passes.simulate import Durations, simulate_durations

COMPUTE = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT, Kind.UPDATE)


def drawn(schedule: Schedule, *, with_stage: bool = False) -> list[str]:
    """Each rank's computations: F0 B0, or 2.F0 2.B0 with the stage, and U1 for the update that makes W1."""
    return [
        " ".join(
            f"{a.stage}.{a.kind}{a.microbatch}" if with_stage else f"{a.kind}{a.microbatch}"
            for a in rank
            if a.kind in COMPUTE and a.kind is not Kind.UPDATE
        )
        for rank in schedule.ranks
    ]


def one_update(method: str, d: int, m: int, **options: object) -> Schedule:
    return build_schedule(method, d, microbatches_per_update=m, updates=range(1), drain=True, **options)  # type: ignore[arg-type]


@st.composite
def shapes(draw: st.DrawFn) -> tuple[str, Shape]:
    """A method, and a shape that it can use."""
    name = draw(st.sampled_from(sorted(METHODS)))
    d, w, more = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(0, 4))
    if name == "interleaved":
        d, chunks = max(2, d), draw(st.integers(1, 3))
        m = draw(st.integers(1, 4)) * d if more else draw(st.integers(1, d))
        return name, Shape(d * chunks, m, chunks=chunks)
    if name == "chimera":
        return name, Shape(2 * d, 2 * (1 + more + w))
    if name == "pipedream":
        replicas = tuple(draw(st.lists(st.integers(1, 3), min_size=d, max_size=d)))
        m = math.lcm(*replicas) * draw(st.integers(1, 3))
        return name, Shape(d, m, replicas=replicas, vertical_sync=draw(st.booleans()))
    if name == "zb-auto":
        d, m = min(d, 3), draw(st.integers(1, 2))  # larger ones are searched for seconds
        return name, method_of(name).prepared(Shape(d, m))
    d = 1 if name == "ddp" else d
    m = (d + more if name == "2bw" else 1 + more) * w
    base = draw(st.sampled_from(["1f1b", "gpipe"])) if name == "bapipe" else None
    slack = draw(st.sampled_from([0.0, 0.5])) if "1f1b" in (name, base) else 0.0
    return name, Shape(d, m, slack, replicas=draw(st.sampled_from([None, (w,) * d])) or (w,) * d, base=base)


@settings(max_examples=150, deadline=None)
@given(shapes())
def test_every_method_keeps_its_own_rules_whatever_the_shape(case: tuple[str, Shape]) -> None:
    name, shape = case
    method = method_of(name)
    stages = range(shape.num_stages)

    at_once = schedule_of(name, shape, updates=range(4), drain=True)
    joined = schedule_of(name, shape, updates=range(1), drain=False)
    for update in range(1, 4):
        later = schedule_of(name, shape, updates=range(update, update + 1), drain=update == 3)
        joined = joined.then(later)
    flushed = schedule_of(name, shape, updates=range(2), drain=True)
    refilled = schedule_of(name, shape, updates=range(2, 4), drain=True, empty_before=2)

    assert joined == at_once
    check_schedule(at_once, in_flight=[method.in_flight(shape, stage) for stage in stages])
    check_schedule(flushed.then(refilled))
    for rank, actions in enumerate(at_once.ranks):
        assert {action.stage for action in actions} == set(method.stages_of(shape, rank))
    for stage in stages:
        assert method.ranks_of(shape, stage) == tuple(
            rank for rank in range(method.num_ranks(shape)) if stage in method.stages_of(shape, rank)
        )


@settings(max_examples=100, deadline=None)
@given(shapes())
def test_no_method_keeps_more_versions_or_holds_more_microbatches_than_it_uses(
    case: tuple[str, Shape],
) -> None:
    name, shape = case
    method = method_of(name)
    assume(method.trains and name != "2bw")  # two versions for m >= d, where m = d - 1 would use them all
    schedule = schedule_of(name, shape, updates=range(9), drain=True)

    for stage in range(shape.num_stages):
        alive, most_open = 1, 0
        for rank in method.ranks_of(shape, stage):
            newest, open_ = 0, dict[int, int]()
            for action in (a for a in schedule.ranks[rank] if a.stage == stage):
                if action.kind is Kind.FORWARD:
                    open_[action.microbatch] = action.version
                elif action.kind in (Kind.BACKWARD, Kind.WEIGHT_GRADIENT):
                    used = open_.pop(action.microbatch)
                    alive = max(alive, newest - used + 1) if method.keeps_versions else 1
                elif action.kind is Kind.UPDATE:
                    newest = action.version
                most_open = max(most_open, len(open_))
        assert most_open == method.in_flight(shape, stage)
        assert alive == method.num_versions(shape, stage) or (shape.vertical_sync and stage > 0)


@pytest.mark.parametrize("d", [1, 2, 3, 4, 6])
def test_pipedream_keeps_d_minus_s_versions_and_runs_each_forward_on_the_newest(d: int) -> None:
    shape = Shape(d, 1)
    schedule = schedule_of("pipedream", shape, updates=range(10), drain=False)

    for stage, actions in enumerate(schedule.ranks):
        newest, used = 0, dict[int, int]()
        for action in actions:
            newest = action.version if action.kind is Kind.UPDATE else newest
            if action.kind is Kind.FORWARD:
                assert action.version == newest == max(0, action.microbatch - (d - 1 - stage))
                used[action.microbatch] = newest
            elif action.kind is Kind.BACKWARD:
                assert action.version == used[action.microbatch]
        assert METHODS["pipedream"].num_versions(shape, stage) == d - stage


def test_vertical_sync_puts_all_stages_on_the_first_ones_version() -> None:
    schedule = build_schedule(
        "pipedream", 3, microbatches_per_update=1, updates=range(6), drain=True, vertical_sync=True
    )

    versions = [{a.microbatch: a.version for a in rank if a.microbatch >= 0} for rank in schedule.ranks]

    assert versions[0] == versions[1] == versions[2] == {0: 0, 1: 0, 2: 0, 3: 1, 4: 2, 5: 3}
    assert schedule.weight_versions == 3
    check_schedule(schedule)


def test_unequal_replicas_take_their_microbatches_in_turn() -> None:
    # PipeDream's 2-1: in flight are NOAM = ceil(3 ranks / 2 replicas) = 2 on each replica of stage 0.
    schedule = build_schedule(
        "pipedream", 2, microbatches_per_update=2, updates=range(3), drain=True, replicas=(2, 1)
    )

    assert drawn(schedule) == [
        "F0 F2 B0 F4 B2 B4",
        "F1 F3 B1 F5 B3 B5",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5",
    ]
    assert METHODS["pipedream"].in_flight(Shape(2, 2, replicas=(2, 1)), 0) == 2
    check_schedule(schedule)


def test_without_a_stash_a_backward_runs_on_newer_weights_than_its_forward() -> None:
    first = build_schedule("pb", 3, microbatches_per_update=1, updates=range(6), drain=True).ranks[0]

    forward, backward = ({a.microbatch: a.version for a in first if a.kind == kind} for kind in "FB")

    assert forward == {0: 0, 1: 0, 2: 0, 3: 1, 4: 2, 5: 3}
    assert backward == {k: k for k in range(6)}


class _Stage:
    """Has the attributes of a stage that torch's schedules read when they make their lists."""

    def __init__(self, rank: int, num_ranks: int, chunks: int) -> None:
        self.group, self.group_rank, self.group_size = None, rank, num_ranks
        self.num_stages, self.stage_index, self.device, self.has_backward = num_ranks * chunks, 0, "cpu", True
        self.stage_index_to_group_rank = {stage: stage % num_ranks for stage in range(self.num_stages)}
        self.is_first = self.is_last = False


LETTERS = {"FORWARD": "F", "FULL_BACKWARD": "B"}


@pytest.mark.parametrize(
    ("d", "v", "m"), [(2, 2, 4), (2, 3, 2), (4, 2, 8), (4, 2, 10), (4, 3, 3), (3, 2, 12)]
)
def test_interleaved_has_the_order_of_torchs_own(d: int, v: int, m: int) -> None:
    ours = drawn(one_update("interleaved", d * v, m, chunks=v), with_stage=True)

    with mock.patch.object(ScheduleInterleaved1F1B, "_prepare_schedule_with_comms"):
        stages = [_Stage(0, d, v) for _ in range(v)]
        theirs = ScheduleInterleaved1F1B(stages, m, loss_fn=lambda *_: None).pipeline_order  # type: ignore[arg-type]

    for rank in range(d):
        pieces = [a for a in theirs[rank] if a is not None]
        assert ours[rank] == " ".join(
            f"{a.stage_index}.{LETTERS[a.computation_type.name]}{a.microbatch_index}" for a in pieces
        )


@pytest.mark.parametrize(("d", "v", "m"), [(2, 2, 4), (4, 2, 8), (4, 4, 8), (8, 2, 32)])
def test_interleaved_has_a_bubble_of_d_minus_1_over_v_m(d: int, v: int, m: int) -> None:
    durations = Durations.chain([1.0 / v] * d * v, [2.0 / v] * d * v)

    span_s = simulate_durations(one_update("interleaved", d * v, m, chunks=v), durations).span_s

    assert (span_s - 3.0 * m) / (3.0 * m) == pytest.approx((d - 1) / (v * m))


@pytest.mark.parametrize(
    ("d", "backward", "makespan", "flushed"), [(4, 1, 10, 14), (8, 1, 22, 30), (4, 2, 16, 21), (8, 2, 36, 45)]
)
def test_chimera_takes_the_time_of_its_paper(d: int, backward: int, makespan: int, flushed: int) -> None:
    durations = Durations.chain([1.0] * d, [float(backward)] * d)

    assert simulate_durations(one_update("chimera", d, d), durations).span_s == makespan
    assert simulate_durations(one_update("1f1b", d, d), durations).span_s == flushed


@pytest.mark.parametrize(("d", "m"), [(2, 6), (4, 8), (4, 20), (6, 12), (8, 32)])
def test_more_microbatches_than_stages_leave_chimera_the_bubble_of_one_unit(d: int, m: int) -> None:
    timeline = simulate_durations(one_update("chimera", d, m), Durations.chain([1.0] * d, [1.0] * d))

    assert timeline.span_s == 2 * m + d - 2
    assert max(timeline.in_flight_peak) <= d


def test_chimera_holds_most_in_the_middle_and_every_stage_twice() -> None:
    timeline = simulate_durations(one_update("chimera", 8, 8), Durations.chain([1.0] * 8, [2.0] * 8))

    assert timeline.in_flight_peak == (5, 6, 7, 8, 8, 7, 6, 5)
    assert [METHODS["chimera"].stages_of(Shape(4, 4), rank) for rank in range(4)] == [
        (0, 3),
        (1, 2),
        (1, 2),
        (0, 3),
    ]


def test_chimera_is_drawn_as_in_its_docstring() -> None:
    assert drawn(one_update("chimera", 4, 4), with_stage=True)[:2] == [
        "0.F0 0.F1 3.F2 3.B2 3.F3 3.B3 0.B0 0.B1",
        "1.F0 2.F2 1.F1 2.F3 2.B2 1.B0 2.B3 1.B1",
    ]


CELLS = [
    (8, 24, (18.522, 18.086, 9.337, 0.601), {"1f1b": ".2431", "zb-h1": ".1585", "zb-h2": ".1083"}),
    (8, 64, (29.935, 29.621, 19.388, 0.535), {"1f1b": ".1091", "zb-h1": ".0554", "zb-h2": ".0294"}),
]


@pytest.mark.parametrize(("d", "m", "seconds", "published"), CELLS)
@pytest.mark.parametrize("method", ["1f1b", "zb-h1", "zb-h2"])
def test_the_bubbles_of_the_zero_bubble_paper_to_every_digit(
    method: str, d: int, m: int, seconds: tuple[float, ...], published: dict[str, str]
) -> None:
    """arXiv 2401.10241: cost is the longest of the stages' spans, the rate its share without work."""
    forward, inputs, weights, latency = seconds
    durations = Durations.chain(
        [forward] * d, [inputs] * d, weight_backward_s=[weights] * d, latency_s=latency
    )

    timeline = simulate_durations(one_update(method, d, m), durations, links="latency")

    assert f"{timeline.rank_bubble:.4f}" == "0" + published[method]


@pytest.mark.parametrize(("d", "m"), [(3, 6), (4, 8), (8, 24)])
def test_zero_bubble_holds_what_1f1b_holds_or_twice_that(d: int, m: int) -> None:
    chain = Durations.chain([1.0] * d, [1.0] * d, weight_backward_s=[1.0] * d)

    first, second = (simulate_durations(one_update(name, d, m), chain) for name in ("zb-h1", "zb-h2"))

    assert max(first.in_flight_peak) == d
    assert max(second.in_flight_peak) == min(m, 2 * d - 1)
    assert first.rank_bubble == pytest.approx((d - 1) / (3 * m + d - 1))  # (d - 1)(F + I - W)
    assert second.rank_bubble == pytest.approx(0.0)  # (d - 1)(F + I - 2W)


def test_the_program_finds_an_order_that_no_hand_made_one_reaches_and_proves_it() -> None:
    times = Times((1.0,) * 2, (1.0,) * 2, (1.0,) * 2, 0.1, (3, 3))

    found = find_orders(4, times, time_limit_s=60.0)

    shape = replace(Shape(2, 4), orders=found.orders)
    schedule = schedule_of("zb-auto", shape, updates=range(2), drain=True)
    chain = Durations.chain([1.0] * 2, [1.0] * 2, weight_backward_s=[1.0] * 2, latency_s=0.1)
    check_schedule(schedule, in_flight=times.in_flight)
    timeline = simulate_durations(
        schedule_of("zb-auto", shape, updates=range(1), drain=True), chain, links="latency"
    )
    by_hand = simulate_durations(one_update("zb-h1", 2, 4), chain, links="latency")
    assert timeline.longest_rank_s == pytest.approx(found.cost_s)
    assert found.bound_s == pytest.approx(found.cost_s)
    assert found.cost_s < by_hand.longest_rank_s


def test_more_memory_never_makes_the_found_order_slower() -> None:
    costs_s = [
        find_orders(3, replace(Times.equal(3), in_flight=(limit,) * 3), time_limit_s=30.0).cost_s
        for limit in (1, 2, 3)
    ]

    assert costs_s == sorted(costs_s, reverse=True)
    assert costs_s[0] > costs_s[-1]


@pytest.mark.parametrize(
    ("method", "shape", "complaint"),
    [
        ("chimera", Shape(3, 4), "even number of stages, and this cut has 3; try num_stages=4"),
        ("chimera", Shape(4, 5), "half of an update's 5 microbatches; try microbatches_per_update=6"),
        ("interleaved", Shape(5, 4, chunks=2), "the cut has 5; try num_stages=6"),
        ("interleaved", Shape(8, 9, chunks=2), "rounds cannot share them equally.*=8"),
        ("2bw", Shape(4, 6, replicas=(2,) * 4), "3 microbatches an update for each replica.*=8"),
        ("1f1b", Shape(2, 5, replicas=(2, 2)), "shared equally by 2 replicas; try microbatches_per_update=6"),
        ("1f1b", Shape(2, 6, replicas=(2, 3)), "as many at every stage"),
        ("gpipe", Shape(2, 6, chunks=2), "try method='interleaved'"),
        ("pb", Shape(2, 6, vertical_sync=True), "an option of pipedream"),
        ("pb", Shape(2, 6, slack=1.0), "would make pb another method"),
        ("ddp", Shape(2, 2), "the whole model on every rank, and this cut has 2 stages"),
        ("zb-auto", Shape(2, 2), "prepared"),
        ("zb-auto", Shape(1, 2, orders=("F0 I0 W0",)), "not each of F, I and W once for 2"),
        ("bapipe", Shape(2, 2, base="2bw"), "chooses among 1f1b, gpipe"),
    ],
)
def test_what_a_method_cannot_use_is_refused_with_what_to_do(
    method: str, shape: Shape, complaint: str
) -> None:
    with pytest.raises(InputError, match=complaint):
        method_of(method).check(shape)


def test_no_order_is_searched_for_where_a_replica_has_no_microbatch() -> None:
    with pytest.raises(InputError, match="shared equally by 2 replicas; try microbatches_per_update=2"):
        method_of("zb-auto").prepared(Shape(2, 1, replicas=(2, 2)))


def edited(schedule: Schedule, rank: int, actions: list[Action]) -> Schedule:
    ranks = tuple(tuple(actions) if r == rank else list_ for r, list_ in enumerate(schedule.ranks))
    return replace(schedule, ranks=ranks)


def test_an_update_before_its_last_weight_gradient_is_noticed() -> None:
    good = one_update("zb-h1", 2, 2)
    actions = list(good.ranks[1])
    actions[-2:] = reversed(actions[-2:])

    with pytest.raises(ScheduleError, match=r"U\(stage 1 -> W1\): update 0 has 1 of its 2 backwards"):
        check_schedule(edited(good, 1, actions))


def test_a_microbatch_on_the_wrong_replica_is_noticed() -> None:
    good = one_update("1f1b", 1, 2, replicas=(2,))
    stolen = [replace(action, microbatch=0) if action.microbatch == 1 else action for action in good.ranks[1]]

    with pytest.raises(ScheduleError, match="runs microbatch 0 of stage 0 on rank 0"):
        check_schedule(edited(good, 1, stolen))


def test_messages_that_overtake_one_another_are_noticed() -> None:
    good = one_update("gpipe", 2, 2)
    names = "F1 SF1 F0 SF0 RB1 B1 RB0 B0 U"
    by_name = {str(a).partition("(")[0]: a for a in good.ranks[0]}

    with pytest.raises(ScheduleError, match="sends it before what RF0"):
        check_schedule(edited(good, 0, [by_name[name] for name in names.split()]))


def test_a_schedule_survives_json() -> None:
    for schedule in (
        one_update("pipedream", 2, 2, replicas=(2, 1), vertical_sync=True),
        one_update("zb-auto", 2, 2),
        one_update("chimera", 2, 2),
    ):
        assert Schedule.from_json(schedule.to_json()) == schedule
