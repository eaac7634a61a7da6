"""Loss curves as a picture for a page: without a library, in light and dark."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from pd2bw_fx.errors import InputError
from pd2bw_fx.report import svg

_LEFT, _RIGHT, _TOP, _BOTTOM = 62.0, 24.0, 76.0, 40.0
_WIDTH, _HEIGHT = 1100.0, 320.0
_MOST_POINTS = 1200
_TITLE = "Training loss"


def losses_svg(
    curves: Mapping[str, Sequence[float]],
    *,
    first: int = 1,
) -> str:
    """Returns an SVG of the loss of each update, a curve for each name; a loss that is no number is a gap.

    `first` is the number of the first update that is drawn.

    Raises InputError where there is nothing to draw.
    """
    finite = [loss for losses in curves.values() for loss in losses if math.isfinite(loss)]
    if not finite:
        raise InputError("there is no loss to draw; give at least one curve with one value")
    low, high = min(finite), max(finite)
    low, high = (low - 0.5, high + 0.5) if low == high else (low, high)
    longest = max(len(losses) for losses in curves.values())
    across = (_WIDTH - _LEFT - _RIGHT) / max(longest - 1, 1)
    down = (_HEIGHT - _TOP - _BOTTOM) / (high - low)
    names = list(curves)
    hues = {f"c{i}": (svg.HUES[i % len(svg.HUES)],) * 2 for i in range(len(names))}
    parts = [
        svg.style({**svg.BASE_STYLE, **hues}),
        svg.text("ink", 16, 26, _TITLE, size=15, bold=True),
        *_legend(names),
        *_grid(low, high, longest, across, down, first),
    ]
    for index, losses in enumerate(curves.values()):
        line = _line(losses, low, across, down)
        colour = svg.HUES[index % len(svg.HUES)]
        parts.append(
            f'<path d="{line}" fill="none" stroke="{colour}" stroke-width="1.8" stroke-linejoin="round"/>'
        )
    return svg.picture(_WIDTH, _HEIGHT, _TITLE, parts)


def _legend(names: Sequence[str]) -> Iterable[str]:
    x = 16.0
    for index, name in enumerate(names):
        yield svg.rect(f"c{index}", x, 42, 13, 4, radius=2)
        yield svg.text("muted", x + 18, 49, name)
        x += 18 + svg.text_width(name, 12) + 14


def _grid(
    low: float,
    high: float,
    longest: int,
    across: float,
    down: float,
    first: int,
) -> Iterable[str]:
    step = svg.ticks(0, high - low, 5)
    apart = step[1] - step[0] if len(step) > 1 else high - low
    for tick in (apart * n for n in range(math.ceil(low / apart), math.floor(high / apart) + 1)):
        y = _HEIGHT - _BOTTOM - (tick - low) * down
        yield svg.rect("rule", _LEFT, y - 0.5, _WIDTH - _LEFT - _RIGHT, 1)
        yield svg.text("muted", _LEFT - 8, y + 4, f"{tick:.4g}", size=11, anchor="end")
    for tick in svg.ticks(first, first + max(longest, 2) - 1, 10):
        x = _LEFT + (tick - first) * across
        yield svg.text("muted", x, _HEIGHT - 19, f"{tick:g}", size=11, anchor="middle")
    yield svg.text("muted", _WIDTH - _RIGHT, _HEIGHT - 4, "update", size=11, anchor="end")


def _line(losses: Sequence[float], low: float, across: float, down: float) -> str:
    """Returns the path, with only every n-th of very many updates: a screen shows no more."""
    every = max(1, len(losses) // _MOST_POINTS)
    path, is_drawing = [], False
    for index in range(0, len(losses), every):
        loss = losses[index]
        if not math.isfinite(loss):
            is_drawing = False
            continue
        x, y = _LEFT + index * across, _HEIGHT - _BOTTOM - (loss - low) * down
        path.append(f"{'L' if is_drawing else 'M'}{svg.number(x)} {svg.number(y)}")
        is_drawing = True
    return "".join(path)
