"""Where each stage's time goes: one bar a stage, the slowest limits the pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pd2bw_fx.plan import Plan, StagePlan
from pd2bw_fx.report import svg
from pd2bw_fx.units import format_seconds

_RIGHT, _TOP, _BOTTOM = 190.0, 88.0, 40.0

_PARTS = ("forward", "forward again", "backward", "receiving", "sending", "adding up gradients")


def loads_svg(plan: Plan, *, width: float = 1100) -> str:
    """An SVG of the seconds that each stage needs for one microbatch, part by part, shared by its copies."""
    longest_s = max(stage.load_s for stage in plan.stages)
    end_s = max(longest_s, plan.bottleneck_s, 1e-12) * 1.04
    row_height = 34.0 if plan.num_stages <= 4 else 26.0 if plan.num_stages <= 16 else 18.0
    height = _TOP + plan.num_stages * row_height + _BOTTOM
    labels = [f"stage {stage.stage} · {stage.place}" for stage in plan.stages]
    left = 30 + max(svg.text_width(label, 12) for label in labels)
    per_s = (width - _RIGHT - left) / end_s
    head = f"Predicted time of {plan.num_stages} {'stage' if plan.num_stages == 1 else 'stages'} a microbatch"
    parts = [
        svg.style({**svg.BASE_STYLE, **{f"l{i}": (svg.HUES[i], svg.HUES[i]) for i in range(len(_PARTS))}}),
        svg.text("ink", 16, 26, head, size=15, bold=True),
        svg.text("muted", 16, 45, _subtitle(plan)),
        *_legend([any(own) for own in zip(*map(_seconds, plan.stages), strict=True)]),
        *_axis(left, per_s, end_s, height, row_height * plan.num_stages),
    ]
    for index, (stage, label) in enumerate(zip(plan.stages, labels, strict=True)):
        top = _TOP + index * row_height
        parts.append(svg.text("ink", 16, top + row_height / 2 + 4, label))
        parts += _bar(stage, left, per_s, end_s, top, row_height, longest_s=longest_s)
    return svg.picture(width, height, head, parts)


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


def _legend(has: Sequence[bool]) -> Iterable[str]:
    x = 16.0
    for index, name in enumerate(_PARTS):
        if name in ("forward again", "adding up gradients") and not has[index]:
            continue
        yield svg.rect(f"l{index}", x, 57, 13, 13, radius=2)
        yield svg.text("muted", x + 18, 67, name)
        x += 18 + svg.text_width(name, 12) + 14


def _axis(left: float, per_s: float, end_s: float, height: float, rows: float) -> Iterable[str]:
    units = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))
    name, unit_s = next(((n, u) for n, u in units if end_s >= 2 * u), units[-1])
    for tick in svg.ticks(0, end_s / unit_s, 8):
        x = left + tick * unit_s * per_s
        yield svg.rect("rule", x - 0.5, _TOP - 3, 1, rows + 8)
        yield svg.text("muted", x, height - 19, f"{tick:g} {name}", size=11, anchor="middle")


def _bar(
    stage: StagePlan,
    left: float,
    per_s: float,
    end_s: float,
    top: float,
    height: float,
    *,
    longest_s: float,
) -> Iterable[str]:
    gap = 4.0
    yield svg.rect("track", left, top + gap, end_s * per_s, height - 2 * gap, radius=2)
    x = left
    for index, (part, part_s) in enumerate(zip(_PARTS, _seconds(stage), strict=True)):
        if part_s > 0:
            tooltip = f"stage {stage.stage}, {part}: {format_seconds(part_s)}"
            yield svg.rect(f"l{index}", x, top + gap, part_s * per_s, height - 2 * gap, tooltip=tooltip)
            x += part_s * per_s
    share = stage.load_s / longest_s if longest_s > 0 else 1.0
    told = f"{format_seconds(stage.load_s)}, {share:.0%} of the slowest"
    yield svg.text("muted", left + end_s * per_s + 10, top + height / 2 + 4, told, size=11)
