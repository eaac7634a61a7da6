"""Where each operator stands in the picture of the graph.

in each stage    stage 0          stage 1         One region a stage, from left to right; in it rows from
+-----------+    +------------+   +---------+     top to bottom, each operator below all that it reads.
| tokens    |    | a    e  f  |   | h   k   |     A stage of many rows goes on in another column, and many
| mask      | -> | b c  g     |-> | i   l   |     stages on another shelf: about the shape of a screen.
|           |    | d          |   | j       |
+-----------+    +------------+   +---------+
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pd2bw_fx.graph import OperatorGraph
from pd2bw_fx.plan import Plan

BOX_WIDTH, BOX_HEIGHT = 132, 24
_GAP_X, _GAP_Y = 16, 22
_COLUMN_GAP, _REGION_GAP, _SHELF_GAP, _PADDING = 26, 54, 76, 18
_MOST_LANES = 6  # a row with more goes on below
_SHAPE = 1.7  # width over height

_HEIGHTS = (6, 8, 11, 15, 20, 27, 36, 48, 64, 85, 113, 150, 200)  # rows in a column
_SHELVES = range(2, 13)

EVERYWHERE = -1  # the region of inputs, and of what every stage computes by itself


@dataclass(frozen=True, slots=True)
class Region:
    """A stage's part of the picture."""

    stage: int
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class Layout:
    """The boxes of the picture: `places` is the upper left corner of each operator's and input's box."""

    regions: tuple[Region, ...]
    places: Mapping[str, tuple[float, float]]
    width: float
    height: float


def layout(graph: OperatorGraph, plan: Plan) -> Layout:
    """Returns a layout in which boxes never overlap, and in a column operators are below what they read."""
    stage_of = plan.stage_of
    members: dict[int, list[str]] = {EVERYWHERE: list(graph.inputs)}
    members |= {stage.stage: [] for stage in plan.stages}
    for name in graph.operators:
        members[stage_of.get(name, EVERYWHERE)].append(name)
    rows = {stage: _rows(graph, names) for stage, names in members.items() if names}
    longest = max(len(own) for own in rows.values())
    made = _placed(rows, longest, math.inf)
    if made.width < _SHAPE * made.height:
        heights = [height for height in _HEIGHTS if height < longest]
        candidates = [made, *(_placed(rows, height, math.inf) for height in heights)]
    else:
        widest = max(region.width for region in made.regions)
        candidates = [made, *(_placed(rows, longest, made.width / n + widest) for n in _SHELVES)]
    return min(candidates, key=_off)


def _off(made: Layout) -> float:
    ratio = made.width / made.height
    return max(ratio / _SHAPE, _SHAPE / ratio)


def _rows(graph: OperatorGraph, names: Sequence[str]) -> list[list[str]]:
    """Returns one region's rows, top to bottom; neighbours in a row are in the order of what they read."""
    depth: dict[str, int] = {}
    for name in names:  # in program order, which is a topological one
        reads = graph.operators[name].reads if name in graph.operators else ()
        depth[name] = 1 + max((depth[read] for read in reads if read in depth), default=-1)
    layers: list[list[str]] = [[] for _ in range(1 + max(depth.values()))]
    for name in names:
        layers[depth[name]].append(name)
    lane: dict[str, float] = {}
    rows = []
    for layer in layers:
        layer.sort(key=lambda name: _wanted_lane(graph, name, lane))
        lane |= {name: index for index, name in enumerate(layer)}
        rows += [layer[start : start + _MOST_LANES] for start in range(0, len(layer), _MOST_LANES)]
    return rows


def _wanted_lane(graph: OperatorGraph, name: str, lane: Mapping[str, float]) -> float:
    above = (
        [lane[read] for read in graph.operators[name].reads if read in lane]
        if name in graph.operators
        else []
    )
    return sum(above) / len(above) if above else 0.0


def _placed(rows: Mapping[int, Sequence[Sequence[str]]], height: int, most_width: float) -> Layout:
    """Places columns of so many rows; a region that would go beyond `most_width` begins another shelf."""
    places: dict[str, tuple[float, float]] = {}
    regions: list[Region] = []
    tallest = min(height, max(len(own) for own in rows.values()))
    region_height = tallest * (BOX_HEIGHT + _GAP_Y) - _GAP_Y + 2 * _PADDING
    x = y = 0.0
    for stage, own in rows.items():
        columns = [own[start : start + height] for start in range(0, len(own), height)]
        width = 2 * _PADDING - _COLUMN_GAP + sum(_width(column) + _COLUMN_GAP for column in columns)
        if x > 0 and x + width > most_width:
            x, y = 0.0, y + region_height + _SHELF_GAP
        regions.append(Region(stage, x, y, width, region_height))
        left = x + _PADDING
        for column in columns:
            places |= _column(column, left, y + _PADDING)
            left += _width(column) + _COLUMN_GAP
        x += width + _REGION_GAP
    whole = max(region.x + region.width for region in regions)
    return Layout(tuple(regions), places, whole, y + region_height)


def _width(column: Sequence[Sequence[str]]) -> float:
    return max(len(row) for row in column) * (BOX_WIDTH + _GAP_X) - _GAP_X


def _column(column: Sequence[Sequence[str]], left: float, top: float) -> dict[str, tuple[float, float]]:
    """Places a column, in which a short row is centred."""
    lanes = max(len(row) for row in column)
    places = {}
    for number, row in enumerate(column):
        inset = (lanes - len(row)) * (BOX_WIDTH + _GAP_X) / 2
        for index, name in enumerate(row):
            x = left + inset + index * (BOX_WIDTH + _GAP_X)
            places[name] = (x, top + number * (BOX_HEIGHT + _GAP_Y))
    return places
