"""Where each stage's time goes: one bar a stage, the slowest limits the pipeline."""

from __future__ import annotations

from dataclasses import replace

from pd2bw_fx.plan import Plan, StagePlan
from pd2bw_fx.report import svg
from pd2bw_fx.report.bars import Axis, Bar, Part, bars_svg
from pd2bw_fx.units import format_seconds

_TITLES = ("forward", "forward again", "backward", "receiving", "sending", "adding up gradients")
_PARTS = tuple(Part(f"l{i}", title, svg.HUES[i]) for i, title in enumerate(_TITLES))


def loads_svg(plan: Plan) -> str:
    """Returns an SVG of the seconds that a stage needs for one microbatch, part by part, over its copies."""
    longest_s = max(stage.load_s for stage in plan.stages)
    end_s = max(longest_s, plan.bottleneck_s, 1e-12) * 1.04
    is_used = [any(own) for own in zip(*map(_seconds, plan.stages), strict=True)]
    stages = "stage" if plan.num_stages == 1 else "stages"
    return bars_svg(
        plan,
        [_bar(stage, longest_s) for stage in plan.stages],
        head=f"Predicted time of {plan.num_stages} {stages} a microbatch",
        subtitle=_subtitle(plan),
        parts=[
            replace(part, is_in_legend=used or part.title not in ("forward again", "adding up gradients"))
            for part, used in zip(_PARTS, is_used, strict=True)
        ],
        axis=_axis(end_s),
    )


def _subtitle(plan: Plan) -> str:
    slowest = max(plan.stages, key=lambda stage: stage.load_s)
    mean_s = sum(stage.load_s for stage in plan.stages) / plan.num_stages
    share = mean_s / slowest.load_s if slowest.load_s > 0 else 1.0
    return (
        f"slowest: stage {slowest.stage} on {slowest.place}, {format_seconds(slowest.load_s)}; "
        f"the stages need {share:.0%} of that on average"
    )


def _seconds(stage: StagePlan) -> tuple[float, ...]:
    again_s = stage.forward_s if stage.recompute else 0.0
    shared_s = stage.forward_s, again_s, stage.backward_s, stage.receive_s, stage.send_s
    return *(seconds / stage.replicas for seconds in shared_s), stage.gradient_sum_s


def _axis(end_s: float) -> Axis:
    units = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))
    name, unit_s = next(((n, u) for n, u in units if end_s >= 2 * u), units[-1])
    return Axis(end_s, [(tick * unit_s, f"{tick:g} {name}") for tick in svg.ticks(0, end_s / unit_s, 8)])


def _bar(stage: StagePlan, longest_s: float) -> Bar:
    seconds = _seconds(stage)
    share = stage.load_s / longest_s if longest_s > 0 else 1.0
    return Bar(
        sizes=seconds,
        tooltips=[
            f"stage {stage.stage}, {title}: {format_seconds(part_s)}"
            for title, part_s in zip(_TITLES, seconds, strict=True)
        ],
        told=f"{format_seconds(stage.load_s)}, {share:.0%} of the slowest",
    )
