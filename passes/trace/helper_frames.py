"""Where an operator was written: torch notes the lines of forwards alone, and a function that one calls has
its own. So has what torch's attention calls, whose queries, keys and values have their names there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import StackSummary
from typing import Any

import torch.nn.functional as F
from torch.fx.proxy import TracerBase

from .diagnose import is_the_authors

_OF_ATTENTION = {"multi_head_attention_forward", "_in_projection_packed", "_in_projection"}


@contextmanager
def helpers_noted() -> Iterator[None]:
    """While it lasts, stack traces have functions beside a forward's file too, behind the forward."""
    plain = TracerBase._filter_traceback_frames

    def filtered(tracer: TracerBase, summary: StackSummary) -> StackSummary:
        kept = plain(tracer, summary)
        wanted = {(frame.filename, frame.lineno, frame.name) for frame in kept}
        found, folder = [], None
        for frame in summary:
            is_kept = (frame.filename, frame.lineno, frame.name) in wanted
            if is_kept and frame.name == "forward":
                folder = os.path.dirname(frame.filename) if is_the_authors(frame.filename) else None
            is_beside = folder is not None and os.path.dirname(frame.filename) == folder
            is_of_attention = frame.name in _OF_ATTENTION and frame.filename == F.__file__
            if is_kept or is_of_attention or (is_beside and not frame.name.startswith("<")):
                found.append(frame)
        return StackSummary.from_list(found)

    tracer: Any = TracerBase
    tracer._filter_traceback_frames = filtered
    try:
        yield
    finally:
        tracer._filter_traceback_frames = plain
