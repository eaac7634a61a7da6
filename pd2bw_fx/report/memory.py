"""Predicted memory as a picture: one bar a stage, its parts in colours, the device's limit as a line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pd2bw_fx.plan import Plan, StagePlan
from pd2bw_fx.report import svg
from pd2bw_fx.report.devices import fullest_device
from pd2bw_fx.units import format_bytes

_RIGHT, _TOP, _BOTTOM = 190.0, 88.0, 40.0

# Field of StageMemory, its name for people, hue.
_PARTS = (
    ("weight_bytes", "weights, all versions", svg.HUES[0]),
    ("gradient_bytes", "gradients", svg.HUES[1]),
    ("optimizer_bytes", "optimizer", svg.HUES[3]),
    ("activation_bytes", "activations", svg.HUES[2]),
    ("transfer_bytes", "received and sent", svg.HUES[4]),
    ("workspace_bytes", "temporary", svg.HUES[5]),
)


def memory_svg(plan: Plan, *, width: float = 1100) -> str:
    """An SVG of what each stage's device holds for it at its worst moment, beside its limit.

    A limit far above all bars would make them too small to read: it is then told in words only.
    """
    largest = max(1, *(stage.memory.total_bytes for stage in plan.stages))
    near = [s.memory_limit_bytes for s in plan.stages if s.memory_limit_bytes <= 2 * largest]
    end = max([largest, *near]) * 1.04
    row_height = 34.0 if plan.num_stages <= 4 else 26.0 if plan.num_stages <= 16 else 18.0
    height = _TOP + plan.num_stages * row_height + _BOTTOM
    labels = [f"stage {stage.stage} · {stage.place}" for stage in plan.stages]
    left = 30 + max(svg.text_width(label, 12) for label in labels)
    per_byte = (width - _RIGHT - left) / end
    head = f"Predicted memory of {plan.num_stages} {'stage' if plan.num_stages == 1 else 'stages'}"
    parts = [
        svg.style({**svg.BASE_STYLE, **_fills()}),
        svg.text("ink", 16, 26, head, size=15, bold=True),
        svg.text("muted", 16, 45, _subtitle(plan)),
        *_legend(any_limit=bool(near)),
        *_axis(left, per_byte, end, height, row_height * plan.num_stages),
    ]
    for index, (stage, label) in enumerate(zip(plan.stages, labels, strict=True)):
        top = _TOP + index * row_height
        parts.append(svg.text("ink", 16, top + row_height / 2 + 4, label))
        parts += _bar(stage, left, per_byte, end, top, row_height)
    return svg.picture(width, height, head, parts)


def _subtitle(plan: Plan) -> str:
    fullest = max(plan.stages, key=lambda stage: stage.memory.total_bytes / stage.memory_limit_bytes)
    share = fullest.memory.total_bytes / fullest.memory_limit_bytes
    told = f"fullest: stage {fullest.stage} on {fullest.place}, {_percent(share)} of its limit"
    if (device := fullest_device(plan)).num_stages == 1:
        return told
    held = f"{format_bytes(device.num_bytes)} of {format_bytes(device.limit_bytes)}"
    return f"{told}, a share of its device's; {device.place} with all its stages: {held}"


def _percent(share: float) -> str:
    return f"{share:.1%}" if share < 0.1 else f"{share:.0%}"


def _fills() -> Mapping[str, tuple[str, str]]:
    return {f"m{index}": (hue, hue) for index, (_, _, hue) in enumerate(_PARTS)}


def _legend(*, any_limit: bool) -> Iterable[str]:
    x = 16.0
    for index, (_, name, _) in enumerate(_PARTS):
        yield svg.rect(f"m{index}", x, 57, 13, 13, radius=2)
        yield svg.text("muted", x + 18, 67, name)
        x += 18 + svg.text_width(name, 12) + 14
    if any_limit:
        yield svg.rect("alarm", x, 56, 2.5, 15)
        yield svg.text("muted", x + 8, 67, "limit")


def _axis(left: float, per_byte: float, end: float, height: float, rows: float) -> Iterable[str]:
    unit = next(size for size in (2**40, 2**30, 2**20, 2**10, 1) if end >= 2 * size or size == 1)
    for tick in svg.ticks(0, end / unit, 8):
        x = left + tick * unit * per_byte
        yield svg.rect("rule", x - 0.5, _TOP - 3, 1, rows + 8)
        yield svg.text("muted", x, height - 19, format_bytes(tick * unit), size=11, anchor="middle")


def _bar(
    stage: StagePlan, left: float, per_byte: float, end: float, top: float, height: float
) -> Iterable[str]:
    gap = 4.0
    yield svg.rect("track", left, top + gap, end * per_byte, height - 2 * gap, radius=2)
    x = left
    for index, (field, name, _) in enumerate(_PARTS):
        num_bytes = getattr(stage.memory, field)
        if field == "activation_bytes":
            num_bytes -= min(num_bytes, stage.memory.apart_bytes)  # they are not held all at once
        if num_bytes:
            tooltip = f"stage {stage.stage}, {name}: {format_bytes(num_bytes)}"
            yield svg.rect(f"m{index}", x, top + gap, num_bytes * per_byte, height - 2 * gap, tooltip=tooltip)
            x += num_bytes * per_byte
    total, limit = stage.memory.total_bytes, stage.memory_limit_bytes
    if limit <= end:
        tooltip = f"limit of {stage.device_name}: {format_bytes(limit)}"
        yield svg.rect("alarm", left + limit * per_byte - 1.25, top + 1, 2.5, height - 2, tooltip=tooltip)
    told = f"{format_bytes(total)} of {format_bytes(limit)}, {_percent(total / limit)}"
    name = "alarm" if total > limit else "muted"
    yield svg.text(name, left + end * per_byte + 10, top + height / 2 + 4, told, size=11)
