"""Models that set torch's generators in their forward, which no trace shows and no stage does."""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

_SETTING = ("manual_seed", "seed", "set_rng_state")  # fork_rng and the others call these
_PASSES = Path(__file__).resolve().parents[1]
_MACHINERY = (str(Path(torch.__file__).parent) + os.sep, contextlib.__file__)


@contextlib.contextmanager
def record_reseeding() -> Iterator[list[str]]:
    """Yields a list that gets the model author's lines that set a generator."""
    lines: list[str] = []

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            place = _callers_line()
            if place is not None:
                lines.append(place)
            return function(*args, **kwargs)

        return call

    with contextlib.ExitStack() as places:
        for holder in (torch, torch.random):
            for name in _SETTING:
                places.enter_context(patch.object(holder, name, noting(getattr(holder, name))))
        yield lines


def _callers_line() -> str | None:
    """Returns the innermost line outside of torch; None if it is one of a pass, which seeds to compare."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_MACHINERY):
        frame = frame.f_back
    file = frame.f_code.co_filename
    if _PASSES in Path(file).resolve().parents:
        return None
    return f"{Path(file).name}:{frame.f_lineno}: {linecache.getline(file, frame.f_lineno).strip()}"
