"""Where each operator stands in the picture of the graph.

in each stage    stage 0          stage 1         One region a stage, from left to right; in it rows from
+-----------+    +------------+   +---------+     top to bottom, each operator below all that it reads.
| tokens    |    | a    e  f  |   | h   k   |     A stage with many rows goes on in another column, so that
| mask      | -> | b c  g     |-> | i   l   |     the whole has about the shape of a screen.
|           |    | d          |   | j       |
+-----------+    +------------+   +---------+
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pd2bw_fx.graph import OperatorGraph
from pd2bw_fx.plan import Plan

BOX_WIDTH, BOX_HEIGHT = 132, 24
_GAP_X, _GAP_Y = 16, 22
_COLUMN_GAP, _REGION_GAP, _PADDING, _TITLE = 26, 54, 18, 34
_MOST_LANES = 6  # a row with more goes on below
_SHAPE = 1.7  # width over height

EVERYWHERE = -1  # the region of inputs, and of what every stage makes by itself


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
    """`places`: the left upper corner of each operator's and input's box."""

    regions: tuple[Region, ...]
    places: Mapping[str, tuple[float, float]]
    width: float
    height: float


def layout(graph: OperatorGraph, plan: Plan) -> Layout:
    """Boxes never overlap, and within a column an operator is below what it reads."""
    stage_of = plan.stage_of
    members: dict[int, list[str]] = {EVERYWHERE: list(graph.inputs)}
    members |= {stage.stage: [] for stage in plan.stages}
    for name in graph.operators:
        members[stage_of.get(name, EVERYWHERE)].append(name)
    rows = {stage: _rows(graph, names) for stage, names in members.items() if names}
    return _placed(rows, _best_height(rows))


def _rows(graph: OperatorGraph, names: Sequence[str]) -> list[list[str]]:
    """Rows of one region, top to bottom; neighbours in a row in the order of what they read."""
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


def _best_height(rows: Mapping[int, Sequence[Sequence[str]]]) -> int:
    """Rows in a column, so that the whole comes closest to the shape of a screen."""
    longest = max(len(own) for own in rows.values())
    candidates = {longest} | {
        height for height in (6, 8, 11, 15, 20, 27, 36, 48, 64, 85, 113, 150, 200) if height < longest
    }

    def off(height: int) -> float:
        made = _placed(rows, height)
        ratio = made.width / made.height
        return max(ratio / _SHAPE, _SHAPE / ratio)

    return min(sorted(candidates), key=off)


def _placed(rows: Mapping[int, Sequence[Sequence[str]]], height: int) -> Layout:
    places: dict[str, tuple[float, float]] = {}
    regions = []
    x, tallest = 0.0, min(height, max(len(own) for own in rows.values()))
    region_height = _TITLE + tallest * (BOX_HEIGHT + _GAP_Y) - _GAP_Y + 2 * _PADDING
    for stage, own in rows.items():
        left = x + _PADDING
        for start in range(0, len(own), height):
            column = own[start : start + height]
            lanes = max(len(row) for row in column)
            for number, row in enumerate(column):
                # A short row stands in the middle of its column.
                inset = (lanes - len(row)) * (BOX_WIDTH + _GAP_X) / 2
                for index, name in enumerate(row):
                    places[name] = (
                        left + inset + index * (BOX_WIDTH + _GAP_X),
                        _TITLE + _PADDING + number * (BOX_HEIGHT + _GAP_Y),
                    )
            left += lanes * (BOX_WIDTH + _GAP_X) - _GAP_X + _COLUMN_GAP
        width = left - _COLUMN_GAP + _PADDING - x
        regions.append(Region(stage, x, 0.0, width, region_height))
        x += width + _REGION_GAP
    return Layout(tuple(regions), places, x - _REGION_GAP, region_height)
