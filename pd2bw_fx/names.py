"""Names that are made up: of a tensor in an argument, and such as are not taken yet. And misspelt ones."""

from __future__ import annotations

import difflib
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


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns the nearest name that there is, for the end of a message; "" where none is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
