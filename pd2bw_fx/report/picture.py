"""A picture as a file: the SVG itself, or drawn as PNG."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from pd2bw_fx.arguments import require_path
from pd2bw_fx.errors import InputError
from pd2bw_fx.files import writing
from pd2bw_fx.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture that a notebook shows and `save` writes. `timeline` is what it shows, if that is one."""

    svg: str
    timeline: Timeline | None = None

    def __repr__(self) -> str:
        return f"<Picture: {len(self.svg)} characters of SVG>"

    def save(self, path: str | Path) -> None:
        """Writes .svg or .png; a timeline also as .json, for Perfetto and chrome://tracing.

        Raises InputError for another suffix, and where the file cannot be written.
        """
        require_path("path", path)
        if self.timeline is not None and Path(path).suffix == ".json":
            with writing(path) as file:
                file.write_text(json.dumps(self.timeline.to_chrome_trace()), encoding="utf-8")
        else:
            write_picture(self.svg, path, or_else=" or .json" if self.timeline is not None else "")

    def _repr_html_(self) -> str:
        return self.svg


def write_picture(svg: str, path: str | Path, *, scale: float = 2.0, or_else: str = "") -> None:
    """Writes .svg, or, in its light colours, .png with `scale` pixels a unit.

    Raises InputError for another suffix, and where the file cannot be written. `or_else` names suffixes that
    the caller writes itself.
    """
    path = Path(path)
    if path.suffix not in (".svg", ".png"):
        known = ".svg, .png" + or_else if or_else else ".svg or .png"
        raise InputError(f"{path.name} ends with {path.suffix!r}; give a name that ends with {known}")
    with writing(path):
        if path.suffix == ".svg":
            path.write_text(svg, encoding="utf-8")
        else:
            from pd2bw_fx.report import raster  # matplotlib, which takes half a second to import

            raster.drawn(svg).savefig(path, dpi=raster.UNITS_PER_INCH * scale)
