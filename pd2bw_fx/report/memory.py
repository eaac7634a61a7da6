"""Predicted memory as a picture: one bar a stage, its parts in colours, the device's limit as a line."""

from __future__ import annotations

from pd2bw_fx.plan import Plan, StagePlan
from pd2bw_fx.report import svg
from pd2bw_fx.report.bars import Axis, Bar, Part, bars_svg
from pd2bw_fx.report.devices import fullest_device
from pd2bw_fx.units import format_bytes

# Fields of StageMemory.
_FIELDS = (
    "weight_bytes",
    "gradient_bytes",
    "optimizer_bytes",
    "activation_bytes",
    "transfer_bytes",
    "workspace_bytes",
)
_PARTS = (
    Part("m0", "weights, all versions", svg.HUES[0]),
    Part("m1", "gradients", svg.HUES[1]),
    Part("m2", "optimizer", svg.HUES[3]),
    Part("m3", "activations", svg.HUES[2]),
    Part("m4", "received and sent", svg.HUES[4]),
    Part("m5", "temporary", svg.HUES[5]),
)


def memory_svg(plan: Plan) -> str:
    """Returns an SVG of what each stage's device holds for it at its worst moment, beside its limit.

    A limit far above all bars would make them too small to read: it is then told in words only.
    """
    largest = max(1, *(stage.memory.total_bytes for stage in plan.stages))
    near = [s.memory_limit_bytes for s in plan.stages if s.memory_limit_bytes <= 2 * largest]
    end = max([largest, *near]) * 1.04
    return bars_svg(
        plan,
        [_bar(stage, end) for stage in plan.stages],
        head=f"Predicted memory of {plan.num_stages} {'stage' if plan.num_stages == 1 else 'stages'}",
        subtitle=_subtitle(plan),
        parts=_PARTS,
        axis=_axis(end),
    )


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


def _axis(end: float) -> Axis:
    unit = next(size for size in (2**40, 2**30, 2**20, 2**10, 1) if end >= 2 * size or size == 1)
    ticks = svg.ticks(0, end / unit, 8)
    return Axis(end, [(tick * unit, format_bytes(tick * unit)) for tick in ticks])


def _bar(stage: StagePlan, end: float) -> Bar:
    memory, limit = stage.memory, stage.memory_limit_bytes
    sizes = {field: getattr(memory, field) for field in _FIELDS}
    # The activations that are held apart are not all held at once.
    sizes["activation_bytes"] -= min(sizes["activation_bytes"], memory.apart_bytes)
    return Bar(
        sizes=tuple(sizes.values()),
        tooltips=[
            f"stage {stage.stage}, {part.title}: {format_bytes(num_bytes)}"
            for part, num_bytes in zip(_PARTS, sizes.values(), strict=True)
        ],
        told=f"{format_bytes(memory.total_bytes)} of {format_bytes(limit)}, "
        f"{_percent(memory.total_bytes / limit)}",
        is_alarm=memory.total_bytes > limit,
        limit=(limit, f"limit of {stage.device_name}: {format_bytes(limit)}") if limit <= end else None,
    )
