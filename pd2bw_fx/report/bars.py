"""A picture with one bar a stage, in parts, over an axis: what pictures of memory and of time share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pd2bw_fx.plan import Plan
from pd2bw_fx.report import svg

_WIDTH, _RIGHT, _TOP, _BOTTOM = 1100.0, 190.0, 88.0, 40.0
_GAP = 4.0  # above a bar and below it


@dataclass(frozen=True, slots=True)
class Part:
    """What a colour stands for. `name` is its class in the SVG."""

    name: str
    title: str
    hue: str
    is_in_legend: bool = True


@dataclass(frozen=True, slots=True)
class Bar:
    """One stage's bar: the size of every part, and the words at its end.

    `limit`, a value and its tooltip, is drawn as a line across the bar.
    """

    sizes: Sequence[float]
    tooltips: Sequence[str]
    told: str
    is_alarm: bool = False
    limit: tuple[float, str] | None = None


@dataclass(frozen=True, slots=True)
class Axis:
    """From 0 to `end`; `ticks` are values with their labels."""

    end: float
    ticks: Sequence[tuple[float, str]]


def bars_svg(
    plan: Plan, bars: Sequence[Bar], *, head: str, subtitle: str, parts: Sequence[Part], axis: Axis
) -> str:
    """Returns an SVG of one bar for each of the plan's stages."""
    row_height = 34.0 if plan.num_stages <= 4 else 26.0 if plan.num_stages <= 16 else 18.0
    height = _TOP + plan.num_stages * row_height + _BOTTOM
    labels = [f"stage {stage.stage} · {stage.place}" for stage in plan.stages]
    left = 30 + max(svg.text_width(label, 12) for label in labels)
    scale = (_WIDTH - _RIGHT - left) / axis.end
    drawn = [
        svg.style({**svg.BASE_STYLE, **{part.name: (part.hue, part.hue) for part in parts}}),
        svg.text("ink", 16, 26, head, size=15, bold=True),
        svg.text("muted", 16, 45, subtitle),
        *_legend(parts, any_limit=any(bar.limit for bar in bars)),
    ]
    for value, label in axis.ticks:
        x = left + value * scale
        drawn.append(svg.rect("rule", x - 0.5, _TOP - 3, 1, row_height * plan.num_stages + 8))
        drawn.append(svg.text("muted", x, height - 19, label, size=11, anchor="middle"))
    for number, (bar, label) in enumerate(zip(bars, labels, strict=True)):
        top = _TOP + number * row_height
        drawn.append(svg.text("ink", 16, top + row_height / 2 + 4, label))
        drawn.append(svg.rect("track", left, top + _GAP, axis.end * scale, row_height - 2 * _GAP, radius=2))
        drawn += _bar(bar, parts, left, scale, top, row_height)
        x = left + axis.end * scale + 10
        name = "alarm" if bar.is_alarm else "muted"
        drawn.append(svg.text(name, x, top + row_height / 2 + 4, bar.told, size=11))
    return svg.picture(_WIDTH, height, head, drawn)


def _legend(parts: Sequence[Part], *, any_limit: bool) -> Iterable[str]:
    x = 16.0
    for part in parts:
        if part.is_in_legend:
            yield svg.rect(part.name, x, 57, 13, 13, radius=2)
            yield svg.text("muted", x + 18, 67, part.title)
            x += 18 + svg.text_width(part.title, 12) + 14
    if any_limit:
        yield svg.rect("alarm", x, 56, 2.5, 15)
        yield svg.text("muted", x + 8, 67, "limit")


def _bar(
    bar: Bar, parts: Sequence[Part], left: float, scale: float, top: float, height: float
) -> Iterable[str]:
    x = left
    for part, size, tooltip in zip(parts, bar.sizes, bar.tooltips, strict=True):
        if size > 0:
            yield svg.rect(part.name, x, top + _GAP, size * scale, height - 2 * _GAP, tooltip=tooltip)
            x += size * scale
    if bar.limit is not None:
        value, tooltip = bar.limit
        yield svg.rect("alarm", left + value * scale - 1.25, top + 1, 2.5, height - 2, tooltip=tooltip)
