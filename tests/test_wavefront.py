"""Sums for thousands of ranks, against the timeline of the same lists."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pd2bw_fx.actions import Kind, Shape
from pd2bw_fx.errors import InputError, ScheduleError
from pd2bw_fx.passes.schedule import METHODS, schedule_of
from pd2bw_fx.passes.simulate import Durations, LinkTimes, Totals, simulate_durations, simulate_totals
from pd2bw_fx.passes.simulate.wavefront import _Wavefront
from pd2bw_fx.report.timeline import timeline_svg


def lists(method: str, shape: Shape, updates: int) -> list[Iterator[tuple[Kind, int, int]]]:
    chosen = METHODS[method]
    return [
        chosen.order(shape, rank, range(updates), drain=True, empty_before=0)
        for rank in range(chosen.num_ranks(shape))
    ]


def uneven(d: int) -> Durations:
    """Different times at every stage and on every link."""
    steps = np.linspace(1.0, 1.7, d)
    return Durations(
        forward_s=tuple(steps),
        backward_s=tuple(1.1 * steps[::-1]),
        update_s=(0.3,) * d,
        links=tuple(
            LinkTimes(s, s + 1, latency_s=0.05 * s, activation_s=1.4, gradient_s=0.2, gradient_latency_s=0.1)
            for s in range(d - 1)
        ),
        weight_backward_s=tuple(0.9 * steps),
    )


@pytest.mark.parametrize("links", ["busy", "latency"])
@pytest.mark.parametrize(
    ("method", "shape"),
    [
        ("1f1b", Shape(4, 6)),
        ("gpipe", Shape(3, 5)),
        ("2bw", Shape(4, 4)),
        ("pipedream", Shape(5, 1)),
        ("zb-h1", Shape(4, 7)),
        ("zb-h2", Shape(3, 8)),
        ("interleaved", Shape(6, 6, chunks=2)),
        ("ddp", Shape(1, 3)),
    ],
)
def test_sums_are_those_of_the_timeline(method: str, shape: Shape, links: str) -> None:
    durations = uneven(shape.num_stages)

    timeline = simulate_durations(
        schedule_of(method, shape, updates=range(3), drain=True),
        durations,
        links=links,  # type: ignore[arg-type]
    )
    totals = simulate_totals(lists(method, shape, 3), durations, links=links)

    assert totals.span_s == pytest.approx(timeline.span_s, rel=1e-12)
    assert totals.busy_s == pytest.approx(timeline.busy_s, rel=1e-12)
    assert totals.bubble == pytest.approx(timeline.bubble, rel=1e-12)
    waits = timeline.idle_by_cause_s
    assert totals.activation_s == pytest.approx([w["activation"] for w in waits], abs=1e-9)
    assert totals.gradient_s == pytest.approx([w["gradient"] for w in waits], abs=1e-9)
    assert len(totals.update_ends_s) == 3


@pytest.mark.parametrize(("method", "d", "m"), [("1f1b", 512, 256), ("gpipe", 256, 512)])
def test_the_closed_form_holds_for_hundreds_of_devices_in_as_many_rounds_as_a_device_has_turns(
    method: str, d: int, m: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds, at = [0], _Wavefront._at

    def counted(*args: Any) -> Any:
        rounds[0] += 1
        return at(*args)

    monkeypatch.setattr(_Wavefront, "_at", counted)
    totals: Totals = simulate_totals(
        lists(method, Shape(d, m), 1), Durations.chain([1.0] * d, [2.0] * d), links="busy"
    )

    assert totals.span_s == (m + d - 1) * 3.0
    assert totals.bubble == pytest.approx((d - 1) / (m + d - 1), abs=1e-12)
    # Not as many as computations: 4,096 devices with 1,024 microbatches (benchmarks/scale.py) have 8 million.
    assert rounds[0] <= 2 * (m + d)


def test_a_circle_of_waits_and_a_link_that_skips_a_stage_are_refused() -> None:
    chain = Durations.chain([1.0] * 2, [2.0] * 2)
    waiting = [[(Kind.BACKWARD, 0, 0)], [(Kind.FORWARD, 1, 0)]]

    with pytest.raises(ScheduleError, match="rank 0 waits before B0 of stage 0; 2 of 2 ranks"):
        simulate_totals(waiting, chain)
    with pytest.raises(InputError, match="from stage 0 to 2"):
        simulate_totals(waiting, Durations((1.0,) * 3, (2.0,) * 3, (0.0,) * 3, (LinkTimes(0, 2),)))


def test_halves_of_a_backward_and_several_stages_of_a_rank_are_told_apart_in_the_picture() -> None:
    def picture(method: str, shape: Shape) -> str:
        schedule = schedule_of(method, shape, updates=range(1), drain=True)
        return timeline_svg(simulate_durations(schedule, uneven(shape.num_stages)))

    halves, chunks = picture("zb-h1", Shape(2, 3)), picture("interleaved", Shape(4, 2, chunks=2))

    assert "gradient of the weights of microbatch 2" in halves
    assert "weight gradient" in halves
    assert ">2.1<" in chunks
    assert "weight gradient" not in chunks
    assert picture("chimera", Shape(4, 4)).count("rank ") > 4
