"""Several timelines in one picture, one above the other, all on the same time axis."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pd2bw_fx.report import svg
from pd2bw_fx.report.timeline import readable_end_s, timeline_svg
from pd2bw_fx.timeline import Timeline

_WIDTH, _GAP = 1100.0, 10.0


def compared_svg(timelines: Sequence[Timeline]) -> str:
    """Returns the beginning of each, as far as all are readable; a second is equally wide in all of them."""
    shown_s = min(readable_end_s(t, t.start_s) - t.start_s for t in timelines)
    style, parts, top = "", [], 0.0
    for timeline in timelines:
        picture = timeline_svg(
            timeline, width=_WIDTH, start_s=timeline.start_s, end_s=timeline.start_s + shown_s
        )
        inside = re.fullmatch(r"<svg [^>]*height=\"([\d.]+)\"[^>]*>(.*)</svg>", picture, flags=re.DOTALL)
        assert inside is not None
        height, content = float(inside[1]), inside[2]
        found = re.search(r"<style>.*?</style>", content)
        assert found is not None
        style = found[0]  # the same in all
        parts.append(f'<g transform="translate(0 {svg.number(top)})">{content.replace(style, "")}</g>')
        top += height + _GAP
    return svg.picture(_WIDTH, top - _GAP, "Timelines on one axis", [style, *parts])
