"""Draws an SVG by matplotlib, for files of pixels.

Pictures here consist of rectangles, texts and lines (see svg.py), which matplotlib can draw.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any
from xml.etree import ElementTree

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, PathPatch, Rectangle
from matplotlib.path import Path as Line

_SVG = "{http://www.w3.org/2000/svg}"
UNITS_PER_INCH = 100.0
_POINTS = 72.0 / UNITS_PER_INCH  # in a unit
_ANCHORS = {"start": "left", "middle": "center", "end": "right"}


def drawn(svg: str) -> Figure:
    """Returns a figure in the SVG's light colours, with a hundredth of an inch for each unit."""
    root = ElementTree.fromstring(svg)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    light = svg.partition("@media")[0]
    fills = dict(re.findall(r"\.(pd-\w+)\{fill:(#\w{6})\}", light))
    figure = Figure(figsize=(width / UNITS_PER_INCH, height / UNITS_PER_INCH))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.axis("off")
    for order, (element, down) in enumerate(_placed(root, 0.0)):
        _draw(element, axes, fills, order, down)
    return figure


def _placed(element: ElementTree.Element, down: float) -> Iterator[tuple[ElementTree.Element, float]]:
    """Yields every element, and how far the groups around it move it down."""
    moved = re.fullmatch(r"translate\(0 ([\d.]+)\)", element.get("transform", ""))
    down += float(moved[1]) if moved else 0.0
    yield element, down
    for child in element:
        yield from _placed(child, down)


def _draw(
    element: ElementTree.Element, axes: Axes, fills: Mapping[str, str], order: int, down: float
) -> None:
    kind, given = element.tag.removeprefix(_SVG), element.attrib
    colour = fills.get(given.get("class", ""), given.get("fill", "none"))
    if kind == "rect":
        x, y, width, height = (float(given[name]) for name in ("x", "y", "width", "height"))
        y += down
        radius = min(float(given.get("rx", 0)), width / 2, height / 2)
        look: dict[str, Any] = {"facecolor": colour, "linewidth": 0, "zorder": order}
        if radius:
            style = f"round,pad=0,rounding_size={radius}"
            axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, **look))
        else:
            axes.add_patch(Rectangle((x, y), width, height, **look))
    elif kind == "text":
        axes.text(
            float(given["x"]),
            float(given["y"]) + down,
            (element.text or "").replace("$", r"\$"),
            color=colour,
            fontsize=float(given["font-size"]) * _POINTS * 0.94,
            fontweight="bold" if "font-weight" in given else "normal",
            ha=_ANCHORS[given.get("text-anchor", "start")],
            va="baseline",
            zorder=order,
            clip_on=True,
        )
    elif kind == "path":
        steps = re.findall(r"([ML])(-?[\d.]+) (-?[\d.]+)", given["d"])
        line = Line(
            [(float(x), float(y) + down) for _, x, y in steps],
            [Line.MOVETO if step == "M" else Line.LINETO for step, _, _ in steps],
        )
        axes.add_patch(
            PathPatch(
                line,
                facecolor="none",
                edgecolor=given.get("stroke", colour),
                alpha=float(given.get("stroke-opacity", 1)),
                linewidth=float(given["stroke-width"]) * _POINTS,
                zorder=order,
            )
        )
