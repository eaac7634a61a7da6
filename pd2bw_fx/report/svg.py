"""Hand-written SVG: elements with escaped text, and colours that suit a light and a dark page.

A picture brings its own background, and a style that switches with the reader's colour scheme, so that it is
good as a file, inside a page and in a notebook. Class names start with "pd-": a style inside a page holds for
the whole page. (No CSS variables: several SVG renderers do not know them.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape, quoteattr

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"

# (light, dark)
PAGE = ("#f4f5f8", "#101216")
SURFACE = ("#ffffff", "#191b20")
INK = ("#1b1f27", "#eceef2")
MUTED = ("#5d6470", "#a3abb8")
TRACK = ("#e9ecf1", "#2b2f37")
RULE = ("#d3d8e0", "#3a404b")
ALARM = ("#c8372d", "#ff7a6e")

# Neighbours stay apart under the common colour-vision deficiencies; the same hues serve both schemes.
HUES = ("#2a78d6", "#eb6834", "#1baf7a", "#a567d8", "#eda100", "#d9508a")

BASE_STYLE: Mapping[str, tuple[str, str]] = {
    "surface": SURFACE,
    "ink": INK,
    "muted": MUTED,
    "track": TRACK,
    "rule": RULE,
    "alarm": ALARM,
}


def mix(colour: str, other: str, share: float) -> str:
    """Returns `share` of the first colour mixed with the rest of the second."""
    pairs = zip(_channels(colour), _channels(other), strict=True)
    return "#" + "".join(f"{round(share * a + (1 - share) * b):02x}" for a, b in pairs)


def readable_on(colour: str) -> str:
    """Returns dark or white text, whichever has more contrast on this colour (WCAG relative luminance)."""
    linear = [(c / 255 / 12.92) if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in _channels(colour)]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return INK[0] if (luminance + 0.05) / 0.0615 > 1.05 / (luminance + 0.05) else "#ffffff"


def _channels(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def style(fills: Mapping[str, tuple[str, str]]) -> str:
    """Returns a style element that gives each class its fill, light and dark."""

    def rules(scheme: int) -> str:
        return "".join(f".pd-{name}{{fill:{colours[scheme]}}}" for name, colours in fills.items())

    fonts = f".pd-picture text{{font-family:{FONT};font-variant-numeric:tabular-nums}}"
    return f"<style>{fonts}{rules(0)}@media (prefers-color-scheme:dark){{{rules(1)}}}</style>"


def picture(width: float, height: float, description: str, parts: Sequence[str]) -> str:
    """Returns the whole SVG on its own background; `description` is what a screen reader says."""
    attributes = (
        f'xmlns="http://www.w3.org/2000/svg" class="pd-picture" role="img" '
        f'viewBox="0 0 {number(width)} {number(height)}" width="{number(width)}" height="{number(height)}" '
        f'style="max-width:100%;height:auto" aria-label={quoteattr(description)}'
    )
    background = rect("surface", 0, 0, width, height, radius=8)
    return f"<svg {attributes}>{background}{''.join(parts)}</svg>"


def rect(
    name: str, x: float, y: float, width: float, height: float, *, radius: float = 0, tooltip: str = ""
) -> str:
    rounded = f' rx="{number(radius)}"' if radius else ""
    shape = (
        f'<rect class="pd-{name}" x="{number(x)}" y="{number(y)}" '
        f'width="{number(width)}" height="{number(height)}"{rounded}'
    )
    return f"{shape}><title>{escape(tooltip)}</title></rect>" if tooltip else f"{shape}/>"


def text(
    name: str,
    x: float,
    y: float,
    content: str,
    *,
    size: float = 12,
    anchor: str = "start",
    bold: bool = False,
) -> str:
    """Returns a text element whose baseline is at `y`."""
    weight = ' font-weight="600"' if bold else ""
    place = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return (
        f'<text class="pd-{name}" x="{number(x)}" y="{number(y)}" font-size="{number(size)}"{place}{weight}>'
        f"{escape(content)}</text>"
    )


def text_width(content: str, size: float) -> float:
    """Returns about the width of a text; fonts differ, so leave room."""
    return sum(0.36 if c in " .,:;'|il()[]/" else 0.6 for c in content) * size


def number(value: float) -> str:
    """Returns two decimals at most, without trailing zeros: pictures with thousands of boxes stay small."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def ticks(start: float, end: float, at_most: int) -> list[float]:
    """Returns round numbers (1, 2 or 5 times a power of ten apart) inside start..end."""
    span = end - start
    if span <= 0:
        return [start]
    power = 10.0
    while power > span / at_most:
        power /= 10
    while power * 10 <= span / at_most:
        power *= 10
    step = next(power * factor for factor in (1, 2, 5, 10) if span / (power * factor) <= at_most)
    first = int(start / step) if start % step == 0 else int(start // step) + 1
    found = []
    while first * step <= end * (1 + 1e-12):
        found.append(first * step)
        first += 1
    return found
