"""Names that are made up: of a tensor inside an argument, and such as are not taken yet."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable


def free_name(name: str, taken: Container[str], *, joint: str = "_", first: int = 2) -> str:
    """Returns the name, or, where it is taken, the name with the first free number from `first` up."""
    candidate, number = name, first
    while candidate in taken:
        candidate = f"{name}{joint}{number}"
        number += 1
    return candidate


def name_of_path(argument: str, path: Iterable[str | int]) -> str:
    """Returns the input name of the tensor at `path` within an argument: `batch_pixels`, `state_0`."""
    name = re.sub(r"\W", "_", "_".join([argument, *map(str, path)]))
    return name if name.isidentifier() else f"_{name}"
