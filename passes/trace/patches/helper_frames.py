"""Source lines of functions that a forward calls: torch records the lines of forwards alone.

The functions of torch's attention are included: the queries, keys and values have their names there.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import StackSummary
from typing import Any

import torch.nn.functional as F
from torch.fx.proxy import TracerBase

from pd2bw_fx.passes.trace.source_lines import is_the_authors

_OF_ATTENTION = {"multi_head_attention_forward", "_in_projection_packed", "_in_projection"}


@contextmanager
def record_helper_frames() -> Iterator[None]:
    """Keeps frames of functions in stack traces, if they come after a forward and lie beside its file.

    After the last forward, frames of its whole package are kept.
    """
    plain = TracerBase._filter_traceback_frames

    def filtered(tracer: TracerBase, summary: StackSummary) -> StackSummary:
        kept = plain(tracer, summary)
        wanted = {(frame.filename, frame.lineno, frame.name) for frame in kept}
        found, own, package = [], None, None
        forwards = [at for at, f in enumerate(summary) if f.name == "forward" and is_the_authors(f.filename)]
        for at, frame in enumerate(summary):
            is_kept = (frame.filename, frame.lineno, frame.name) in wanted
            if is_kept and frame.name == "forward":
                own = os.path.dirname(frame.filename) if is_the_authors(frame.filename) else None
                package = None if own is None else _package(own)
            is_beside = False
            if own is not None:
                folder = os.path.dirname(frame.filename)
                # Functions elsewhere in the package that come before another forward only wrap it.
                is_theirs = is_the_authors(frame.filename) and _package(folder) == package
                is_beside = folder == own or (at > forwards[-1] and is_theirs)
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


@functools.cache
def _package(folder: str) -> str:
    """Returns the outermost folder of the package that a folder belongs to, or the folder itself."""
    while os.path.exists(os.path.join(os.path.dirname(folder), "__init__.py")):
        folder = os.path.dirname(folder)
    return folder
