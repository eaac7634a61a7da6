"""A picture as a file: the SVG as it is, or the same drawn as PNG."""

from __future__ import annotations

from pathlib import Path

from pd2bw_fx.errors import InputError


def write_picture(svg: str, path: str | Path, *, scale: float = 2.0) -> None:
    """As .svg, or in its light colours as .png with `scale` pixels a unit.

    Raises InputError for another suffix.
    """
    path = Path(path)
    if path.suffix == ".svg":
        path.write_text(svg)
    elif path.suffix == ".png":
        from pd2bw_fx.report import raster  # matplotlib, which takes half a second to import

        raster.drawn(svg).savefig(path, dpi=raster.UNITS_PER_INCH * scale)
    else:
        raise InputError(f"{path.name} ends with {path.suffix!r}; give a name that ends with .svg or .png")
