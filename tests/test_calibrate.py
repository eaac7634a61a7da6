"""What a run took besides the operators' profile: found again in a timeline that was made with it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

import pd2bw_fx
from pd2bw_fx.actions import Kind
from pd2bw_fx.costs import Calibration
from pd2bw_fx.errors import InputError
from pd2bw_fx.models.mlp import MLP, MLPConfig
from pd2bw_fx.passes.schedule import build_schedule
from pd2bw_fx.passes.simulate import Durations, simulate_durations
from pd2bw_fx.timeline import Timeline

KNOWN = Calibration(
    forward=1.2,
    backward=1.1,
    halves=1.3,
    weight_share=0.4,
    shared=1.07,
    update_s_per_byte=1e-9,
    send_s=3e-4,
    receive_s=1e-4,
)


@pytest.fixture(scope="module")
def pipe() -> pd2bw_fx.Pipeline:
    model: nn.Module = MLP(MLPConfig(width=128))
    made = pd2bw_fx.split(model, cluster=2, costs="analytic", check=False)
    # Times that are long beside the latency of a link, so that receives are seen which wait for nothing.
    stages = tuple(replace(s, forward_s=1e-2, backward_s=2e-2) for s in made.plan.stages)
    made.plan = replace(made.plan, stages=stages)
    return made


def run(pipe: pd2bw_fx.Pipeline, method: str, **options: object) -> Timeline:
    return pipe.simulate(method=method, microbatches_per_update=4, num_updates=4, **options)  # type: ignore[arg-type]


def test_a_calibration_is_found_again_in_the_timelines_that_it_made(pipe: pd2bw_fx.Pipeline) -> None:
    found = pipe.calibration(
        run(pipe, "1f1b", calibration=KNOWN), run(pipe, "zb-h1", calibration=KNOWN), run(pipe, "2bw")
    )
    alone = pipe.calibration(run(pipe, "1f1b", calibration=KNOWN))

    assert alone.halves is None
    exact = pipe.calibration(*(run(pipe, name, calibration=KNOWN) for name in ("1f1b", "zb-h1", "chimera")))
    wanted = ("forward", "backward", "halves", "weight_share", "shared", "update_s_per_byte", "receive_s")
    for field in wanted:
        assert getattr(exact, field) == pytest.approx(getattr(KNOWN, field), rel=1e-6), field
    assert found.forward < KNOWN.forward  # a run at the profile's own speed was among them


def test_without_a_calibration_the_engine_takes_no_time_and_closed_forms_hold(
    pipe: pd2bw_fx.Pipeline,
) -> None:
    plain, nothing = run(pipe, "1f1b"), run(pipe, "1f1b", calibration=Calibration())

    assert plain.events == nothing.events


def test_what_the_engine_takes_slows_each_update_by_as_much(pipe: pd2bw_fx.Pipeline) -> None:
    def update_s(**fields: float) -> float:
        return 4 / run(pipe, "2bw", calibration=Calibration(**fields)).throughput

    m, busiest_bytes = 4, max(stage.memory.gradient_bytes for stage in pipe.plan.stages)

    assert update_s(forward=2.0) - update_s() == pytest.approx(m * 1e-2, rel=1e-6)
    assert update_s(between_s=5e-3) - update_s() == pytest.approx(5e-3, rel=1e-6)
    assert update_s(send_s=1e-3) - update_s() == pytest.approx(m * 1e-3, rel=1e-6)
    assert update_s(update_s_per_byte=1e-9) - update_s() == pytest.approx(1e-9 * busiest_bytes, rel=0.05)


def test_halves_of_a_backward_count_where_gradients_are_sent_on(pipe: pd2bw_fx.Pipeline) -> None:
    durations = Durations.of(pipe.plan, pipe.cluster, calibration=KNOWN)

    assert durations.weight_backward_s is not None
    # The first stage has no gradient to send: all of its backward is in the second half.
    assert durations.backward_s[0] == 0.0
    assert durations.weight_backward_s[0] == pytest.approx(1.1 * 2e-2)
    assert durations.backward_s[1] == pytest.approx(1.1 * 2e-2 * 1.3 * 0.6)
    assert durations.weight_backward_s[1] == pytest.approx(1.1 * 2e-2 * 1.3 * 0.4)
    assert durations.whole_backward_s(1) == pytest.approx(1.1 * 2e-2)


def test_a_rank_is_busy_with_its_messages_at_both_ends() -> None:
    chain = Durations.chain([1.0] * 2, [2.0] * 2)
    links = tuple(replace(link, send_s=0.25, receive_s=0.125) for link in chain.links)
    schedule = build_schedule("1f1b", 2, microbatches_per_update=1, updates=range(1), drain=True)

    timeline = simulate_durations(schedule, replace(chain, links=links))

    # F, send | take, F, B, send | take, B
    assert timeline.span_s == 1 + 0.25 + 0.125 + 1 + 2 + 0.25 + 0.125 + 2


def test_timelines_without_what_is_needed_are_refused(pipe: pd2bw_fx.Pipeline) -> None:
    with pytest.raises(InputError, match="record an update of 1f1b"):
        pipe.calibration(run(pipe, "zb-h1"))
    with pytest.raises(InputError, match="nothing was recorded of that run; train with record=8"):
        pipe.calibration(None)
    whole = run(pipe, "1f1b")
    first = replace(whole, events=tuple(e for e in whole.events if e.stage == 0 or e.kind is not Kind.UPDATE))
    with pytest.raises(InputError, match="no U of stage 1"):
        pipe.calibration(first)
