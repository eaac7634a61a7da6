"""The timeline as a picture: one row a rank, a box for each forward, backward and update.

rank 0  [F0][F1][ B0 ][F2][ B1 ]        hue: the weight version; light: forward, full: backward;
rank 1      [F0][ B0 ][F1][ B1 ]        the bare track of a row is idle time
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pd2bw_fx.actions import Kind
from pd2bw_fx.report import svg
from pd2bw_fx.timeline import COMPUTE, Event, Timeline
from pd2bw_fx.units import counted, format_seconds

_LEFT, _RIGHT, _TOP, _BOTTOM = 66.0, 82.0, 88.0, 40.0
_FONT = 11.0
_BOX_FONTS = (11.0, 9.0, 8.0)  # sizes to try: the first in which the number fits is used
_WHAT = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRADIENT: "gradient of the inputs",
    Kind.WEIGHT_GRADIENT: "gradient of the weights",
    Kind.UPDATE: "update",
}
# More boxes than this in a row are too narrow to tell apart.
_MOST_BOXES = 72  # but at least five for each rank, so that a deep pipeline is seen filled


def timeline_svg(
    timeline: Timeline,
    *,
    width: float = 1100,
    start_s: float | None = None,
    end_s: float | None = None,
) -> str:
    """Returns an SVG of the timeline between two times.

    Without them it shows the whole, or, if that is too much to read, its beginning; the headline says which.
    Hovering over a box shows its times.
    """
    start_s = timeline.start_s if start_s is None else start_s
    end_s = readable_end_s(timeline, start_s) if end_s is None else end_s
    shown = [e for e in timeline.between(start_s, end_s).events if e.kind in COMPUTE]
    scale = _Scale(start_s, max(end_s, start_s + 1e-12), width)
    row_height = 34.0 if timeline.num_ranks <= 4 else 26.0 if timeline.num_ranks <= 16 else 18.0
    height = _TOP + timeline.num_ranks * row_height + _BOTTOM
    versions = sorted({e.version for e in shown if e.kind is not Kind.UPDATE})
    head = _headline(timeline)
    parts = [
        svg.style({**svg.BASE_STYLE, **_version_fills()}),
        svg.text("ink", 16, 26, head, size=15, bold=True),
        svg.text("muted", 16, 45, _subtitle(timeline, start_s, end_s), size=12),
        *_legend(versions, is_split=any(e.kind is Kind.WEIGHT_GRADIENT for e in shown)),
        *_axis(scale, height, row_height * timeline.num_ranks),
    ]
    busy_s = timeline.busy_s
    for rank in range(timeline.num_ranks):
        top = _TOP + rank * row_height
        share = busy_s[rank] / timeline.span_s if timeline.span_s > 0 else 0.0
        parts += _row(rank, share, [e for e in shown if e.rank == rank], scale, top, row_height)
    return svg.picture(width, height, f"Timeline. {head}", parts)


class _Scale:
    """Seconds to pixels."""

    def __init__(self, start_s: float, end_s: float, width: float) -> None:
        self.start_s, self.end_s = start_s, end_s
        self.left, self.right = _LEFT, width - _RIGHT
        self._pixels_per_s = (self.right - self.left) / (end_s - start_s)

    def x(self, seconds: float) -> float:
        inside_s = min(max(seconds, self.start_s), self.end_s)
        return self.left + (inside_s - self.start_s) * self._pixels_per_s


def readable_end_s(timeline: Timeline, start_s: float) -> float:
    """Returns how far a picture may go so that its boxes can be told apart."""
    boxes, most = [0] * timeline.num_ranks, max(_MOST_BOXES, 5 * timeline.num_ranks)
    ends_s = []
    for event in timeline.events:
        if event.kind in COMPUTE and event.kind is not Kind.UPDATE and event.start_s >= start_s:
            boxes[event.rank] += 1
            if boxes[event.rank] == most:
                ends_s.append(event.end_s)
    return min(ends_s, default=timeline.end_s)


def _headline(timeline: Timeline) -> str:
    return f"{timeline.method} on {counted(timeline.num_ranks, 'rank')}, {timeline.origin}"


def _subtitle(timeline: Timeline, start_s: float, end_s: float) -> str:
    is_steady = timeline.steady_per_s is not None or timeline.longer_per_s is not None
    when = "in the steady state" if is_steady else "from end to end"
    facts = [
        f"{timeline.throughput:.3g} microbatches/s {when}",
        f"{counted(timeline.microbatches_per_update, 'microbatch')} an update",
        f"idle {timeline.bubble:.1%} of all time",
    ]
    if start_s > timeline.start_s or end_s < timeline.end_s:
        facts.append(f"{format_seconds(end_s - start_s)} of {format_seconds(timeline.span_s)} shown")
    return "  ·  ".join(facts)


def _fill(event: Event) -> str:
    if event.kind is Kind.UPDATE:
        return "update"
    side = {Kind.FORWARD: "f", Kind.WEIGHT_GRADIENT: "w"}.get(event.kind, "b")
    return f"{side}{event.version % len(svg.HUES)}"


def _version_fills() -> dict[str, tuple[str, str]]:
    """Returns the fills of each hue's forward, backward and weight gradient, and of the text on each.

    Their names are "f0", "b0", "w0", and "f0t" and so on for text.
    """
    fills = {"update": svg.INK}
    for index, hue in enumerate(svg.HUES):
        tint = (svg.mix(hue, svg.SURFACE[0], 0.34), svg.mix(hue, svg.SURFACE[1], 0.45))
        fills[f"f{index}"] = tint
        fills[f"b{index}"] = (hue, hue)
        between = (svg.mix(hue, svg.SURFACE[0], 0.66), svg.mix(hue, svg.SURFACE[1], 0.72))
        fills[f"w{index}"] = between
        fills[f"w{index}t"] = (svg.readable_on(between[0]), svg.readable_on(between[1]))
        fills[f"f{index}t"] = (svg.readable_on(tint[0]), svg.readable_on(tint[1]))
        fills[f"b{index}t"] = (svg.readable_on(hue), svg.readable_on(hue))
    return fills


def _row(
    rank: int, busy_share: float, events: Sequence[Event], scale: _Scale, top: float, height: float
) -> Iterable[str]:
    gap = 3.0
    middle = top + height / 2 + 4
    yield svg.text("ink", 16, middle, f"rank {rank}", size=12)
    yield svg.rect("track", scale.left, top + gap, scale.right - scale.left, height - 2 * gap, radius=2)
    updates = [event for event in events if event.kind is Kind.UPDATE]
    names_stage = len({event.stage for event in events}) > 1
    for event in events:
        if event.kind is not Kind.UPDATE:
            yield from _box(event, scale, top + gap, height - 2 * gap, names_stage=names_stage)
    # Last, so that an update that takes no time is a line on top of its neighbours.
    for event in updates:
        left = scale.x(event.start_s)
        length = max(scale.x(event.end_s) - left, 1.6)
        yield svg.rect("update", left - 0.8, top + 1, length, height - 2, tooltip=_tooltip(event))
    yield svg.text("muted", scale.right + 10, middle, f"{busy_share:.0%} busy", size=_FONT)


def _box(event: Event, scale: _Scale, top: float, height: float, *, names_stage: bool) -> Iterable[str]:
    """Yields a box with its microbatch, after its stage ("2.5") if the rank has several and there is room."""
    left, right = scale.x(event.start_s), scale.x(event.end_s)
    # A hair of track between neighbours, where a box can spare it.
    length = max(right - left - (0.8 if right - left > 3 else 0.0), 0.2)
    name = _fill(event)
    yield svg.rect(name, left, top, length, height, tooltip=_tooltip(event))
    labels = [f"{event.stage}.{event.microbatch}"] * names_stage + [str(event.microbatch)]
    for label, size in ((label, size) for label in labels for size in _BOX_FONTS):
        if length >= svg.text_width(label, size) + 1:
            middle, baseline = left + length / 2, top + height / 2 + size * 0.36
            yield svg.text(f"{name}t", middle, baseline, label, size=size, anchor="middle")
            break


def _tooltip(event: Event) -> str:
    what = _WHAT[event.kind]
    where = f"rank {event.rank}, stage {event.stage}"
    times = f"{format_seconds(event.start_s)} to {format_seconds(event.end_s)}"
    if event.kind is Kind.UPDATE:
        return f"{what} to weights W{event.version}, {where}: {times}"
    return f"{what} of microbatch {event.microbatch} on weights W{event.version}, {where}: {times}"


def _legend(versions: Sequence[int], *, is_split: bool) -> Iterable[str]:
    """Yields what the shades mean, and which hue is which version."""
    x, y, hues = 16.0, 67.0, len(svg.HUES)
    halves = [("input gradient", "b0"), ("weight gradient", "w0")] if is_split else [("backward", "b0")]
    for label, name in (("forward", "f0"), *halves, ("update", "update"), ("idle", "track")):
        swatch = 3.0 if name == "update" else 13.0
        yield svg.rect(name, x, y - 10, swatch, 13, radius=0 if name == "update" else 2)
        yield svg.text("muted", x + swatch + 5, y, label)
        x += swatch + 5 + svg.text_width(label, 12) + 14
    if not versions:
        return
    yield svg.text("muted", x + 14, y, "weights")
    x += 14 + svg.text_width("weights", 12) + 8
    for version in versions[:hues]:
        yield svg.rect(f"f{version % hues}", x, y - 10, 9.5, 13)
        yield svg.rect(f"b{version % hues}", x + 9.5, y - 10, 9.5, 13)
        yield svg.text("muted", x + 24, y, f"W{version}")
        x += 24 + svg.text_width(f"W{version}", 12) + 11
    if len(versions) > hues:
        yield svg.text("muted", x, y, "and so on, in turn")


def _axis(scale: _Scale, height: float, rows: float) -> Iterable[str]:
    span_s = scale.end_s - scale.start_s
    unit, per_s = next(
        ((u, f) for u, f in (("s", 1.0), ("ms", 1e3), ("us", 1e6)) if span_s * f >= 2), ("us", 1e6)
    )
    for tick in svg.ticks(scale.start_s * per_s, scale.end_s * per_s, 12):
        x = scale.x(tick / per_s)
        yield svg.rect("rule", x - 0.5, _TOP - 3, 1, rows + 8)
        yield svg.text("muted", x, height - 19, f"{tick:g}", size=_FONT, anchor="middle")
    yield svg.text("muted", scale.right + 10, height - 19, unit, size=_FONT)
