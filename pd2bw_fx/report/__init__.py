"""Pictures and pages of a pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

Part = Literal["graph", "timeline", "measured", "time", "memory", "loss"]
PARTS: tuple[Part, ...] = ("graph", "timeline", "measured", "time", "memory", "loss")


def is_page(path: Path) -> bool:
    return path.suffix in (".html", ".htm")
